"""Images as tokens: a row for each patch, read from the image where it lies, and written into one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["GridRows", "PatchRows", "PixelRows"]


class _Grid:
    """The image and its patches, counted row by row."""

    def __init__(self, array: np.ndarray, patch: int) -> None:
        self.array, self._patch = array, patch
        self._columns = array.shape[3] // patch

    def _strips(self, start: int, count: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Patches that lie side by side: which of the ``count`` they are, and where in the image."""
        done = 0
        while done < count:
            row, column = divmod(start + done, self._columns)
            length = min(count - done, self._columns - column)
            high, wide = (slice(at * self._patch, end * self._patch) for at, end in ((row, row + 1), (column, column + length)))
            yield slice(done, done + length), (slice(None), slice(None), high, wide)
            done += length


class PatchRows(_Grid):
    """The patches of an image (B, C, h p, w p) as tokens (B, h w, C p p): channel, row, column, as a convolution has them."""

    def read(self, start: int, count: int) -> np.ndarray:
        """See :class:`pom_edge.runtimes.tokens.Reader`."""
        batch, channels, p = *self.array.shape[:2], self._patch
        tokens = np.empty((batch, count, channels * p * p), self.array.dtype)
        for which, where in self._strips(start, count):
            strip = self.array[where].reshape(batch, channels, p, -1, p)  # (B, C, p, n, p)
            tokens[:, which] = strip.transpose(0, 3, 1, 2, 4).reshape(batch, -1, channels * p * p)
        return tokens


class PixelRows(_Grid):
    """Tokens (B, h w, K p p) as the patches of an image (B, K, h p, w p): the layout of torch's pixel_shuffle."""

    def write(self, start: int, values: np.ndarray) -> None:
        """See :class:`pom_edge.runtimes.tokens.Writer`."""
        batch, channels, p = *self.array.shape[:2], self._patch
        for which, where in self._strips(start, values.shape[1]):
            strip = values[:, which].reshape(batch, -1, channels, p, p)  # (B, n, K, p, p)
            self.array[where] = strip.transpose(0, 2, 3, 1, 4).reshape(batch, channels, p, -1)


class GridRows:
    """Row and column of every patch, int64 (h w, 2).

    Args:
        columns: w.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns

    def read(self, start: int, count: int) -> np.ndarray:
        """See :class:`pom_edge.runtimes.tokens.Reader`."""
        return np.stack(np.divmod(np.arange(start, start + count), self._columns), axis=-1)
