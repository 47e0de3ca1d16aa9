"""Where tokens lie that are too many for memory: arrays, ``.npy`` files, the buffer between two passes of the streamed form.

Files are read and written at offsets (pread, pwrite), never mapped: what is mapped counts as memory where a budget is enforced.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

import numpy as np

from pom_edge.errors import InputError

SPILL_PREFIX = ".pom-edge-spill-"

__all__ = ["ArrayRows", "Buffer", "FileRows", "NpySink", "NpySource", "Reader", "Rows", "Spill", "Writer", "check_folder"]


class Reader(Protocol):
    """One value for each token, to be read piece by piece."""

    def read(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens from ``start``, along the token axis."""
        ...


class Writer(Protocol):
    """One value for each token, to be written piece by piece."""

    def write(self, start: int, values: np.ndarray) -> None:
        """Put tokens at ``start``."""
        ...


class Rows(Reader, Writer, Protocol):
    """One value for each token, to be written and read again."""


class ArrayRows:
    """Tokens in an array."""

    def __init__(self, array: np.ndarray, axis: int) -> None:
        self.array, self.axis = array, axis

    def read(self, start: int, count: int) -> np.ndarray:
        """See :class:`Rows`."""
        return self.array[self._at(start, count)]

    def write(self, start: int, values: np.ndarray) -> None:
        """See :class:`Rows`."""
        self.array[self._at(start, values.shape[self.axis])] = values

    def _at(self, start: int, count: int) -> tuple[slice, ...]:
        return (slice(None),) * self.axis + (slice(start, start + count),)


class FileRows:
    """Tokens in a file, one after the other.

    Args:
        descriptor: of the open file.
        offset: of the first token, in bytes.
        shape: of a chunk; the length of its token axis is of no account.
        axis: the token axis.
        dtype: of the values.
        where: the file's name, for messages.
    """

    def __init__(self, descriptor: int, offset: int, shape: Sequence[int], axis: int, dtype: np.dtype, where: Path) -> None:
        self._descriptor, self._offset, self._where = descriptor, offset, where
        self._axis, self._dtype = axis, np.dtype(dtype)
        self._rest = [n for i, n in enumerate(shape) if i != axis]
        self.row_bytes = math.prod(self._rest) * self._dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        """See :class:`Rows`.

        Raises:
            InputError: the file ends early.
        """
        flat = np.empty((count, *self._rest), self._dtype)
        view, at = flat.reshape(-1).view(np.uint8).data, self._offset + start * self.row_bytes
        while view:
            got = os.preadv(self._descriptor, [view], at)
            if got <= 0:
                raise InputError(f"{self._where} ends before token {start + count}; it was cut short")
            view, at = view[got:], at + got
        return np.moveaxis(flat, 0, self._axis)

    def write(self, start: int, values: np.ndarray) -> None:
        """See :class:`Rows`.

        Raises:
            InputError: the disk is full.
        """
        rows = np.ascontiguousarray(np.moveaxis(values, self._axis, 0), dtype=self._dtype)
        view, at = rows.reshape(-1).view(np.uint8).data, self._offset + start * self.row_bytes
        try:
            while view:
                put = os.pwrite(self._descriptor, view, at)
                view, at = view[put:], at + put
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full; free some space or choose another place" if full else error.strerror
            raise InputError(f"cannot write {self._where}: {reason}") from error


class Buffer:
    """Memory between two passes: arrays in RAM, or a file in a folder that is gone when the run is over, however it ends."""

    def __init__(self, folder: Path | None = None) -> None:
        self._spill = None if folder is None else Spill(folder)

    def rows(self, tokens: int, shape: Sequence[int], axis: int, dtype: np.dtype) -> Rows:
        """Room for one value of every token; ``shape`` is that of a chunk."""
        if self._spill is not None:
            return self._spill.rows(tokens, shape, axis, dtype)
        return ArrayRows(np.empty([tokens if i == axis else n for i, n in enumerate(shape)], dtype), axis)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._spill is not None:
            self._spill.close()


def check_folder(folder: Path) -> None:
    """Refuse a place that tokens cannot be spilled into.

    Raises:
        InputError: no folder, or one that cannot be written.
    """
    if not folder.is_dir():
        raise InputError(f"--spill {folder} is not a folder; expected one with room for the tokens")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--spill {folder} cannot be written; choose another folder")


class Spill:
    """A file without a name, where the system has such: a killed process leaves nothing. Elsewhere the next start cleans up.

    Raises:
        InputError: the folder is missing or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        for stale in folder.glob(f"{SPILL_PREFIX}*"):
            if not _alive(stale.name.removeprefix(SPILL_PREFIX).partition("-")[0]):
                with contextlib.suppress(OSError):
                    stale.unlink()
        try:
            self._descriptor, name = tempfile.mkstemp(prefix=f"{SPILL_PREFIX}{os.getpid()}-", dir=folder)
        except OSError as error:
            raise InputError(f"--spill {folder}: {error.strerror}; choose a folder that can be written") from error
        self._path = Path(name)
        with contextlib.suppress(OSError):  # Windows keeps open files
            self._path.unlink()
        self._end = 0

    def rows(self, tokens: int, shape: Sequence[int], axis: int, dtype: np.dtype) -> FileRows:
        """Room for one value of every token.

        Raises:
            InputError: the disk has less free.
        """
        rows = FileRows(self._descriptor, self._end, shape, axis, dtype, self._path.parent)
        needed = tokens * rows.row_bytes
        promised = max(self._end - os.fstat(self._descriptor).st_blocks * 512, 0)  # to earlier values, and not yet written
        free = max(shutil.disk_usage(self._path.parent).free - promised, 0)
        if needed > free:
            raise InputError(
                f"--spill {self._path.parent}: the tokens take {needed / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are "
                "free; "
                "free some space, or choose another folder"
            )
        self._end += needed
        return rows

    def close(self) -> None:
        """Give the room back."""
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._path.unlink()


class NpySource:
    """A ``.npy`` file of shape (1, tokens, ..) or (batch 1) that is read as it is needed.

    Attributes:
        shape, dtype: of the array.

    Raises:
        InputError: no such file, not a ``.npy``, or one that is not stored row by row.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("rb")
            version = np.lib.format.read_magic(self._file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, columns, self.dtype = read(self._file)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as .npy: {getattr(error, 'strerror', None) or error}") from error
        if columns and len(self.shape) > 1:
            raise InputError(f"{path} is stored column by column (Fortran order); save numpy.ascontiguousarray(x)")
        if self.dtype.hasobject or len(self.shape) < 2 or self.shape[0] != 1:
            raise InputError(
                f"{path} holds {self.dtype} {self.shape}; a file that is read in chunks is (1, tokens, ..), numbers row by row"
            )
        self.rows = FileRows(self._file.fileno(), self._file.tell(), self.shape, 1, self.dtype, path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NpySink:
    """A ``.npy`` file that is written chunk by chunk, and takes its name when it is whole."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: np.dtype) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp.npy")
        try:
            self._file: BinaryIO = self._temporary.open("wb")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.flush()
        self.rows = FileRows(self._file.fileno(), self._file.tell(), shape, 1, np.dtype(dtype), path)

    def finish(self) -> None:
        """All is written."""
        self._file.close()
        os.replace(self._temporary, self._path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
