"""Running the streamed form: every pass over all tokens, chunk by chunk, its sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pom_edge.bundle import ImageSpec, PassSpec, StreamSpec
from pom_edge.errors import InputError
from pom_edge.runtimes.patches import GridRows, PatchRows, PixelRows
from pom_edge.runtimes.tokens import ArrayRows, Buffer, Reader, Rows, Writer

OFFSET, VALID, TOKENS = "offset", "valid", "tokens"

Arrays = dict[str, np.ndarray]
Execute = Callable[[Arrays], Mapping[str, np.ndarray]]
Progress = Callable[[int, int], None]  # token-passes done, and how many there are

__all__ = ["OFFSET", "VALID", "Feed", "Progress", "run_passes", "run_stream"]


@dataclass
class Feed:
    """What goes into the passes, and where results go.

    Attributes:
        rows: inputs with tokens.
        lengths: how many tokens there are, by the name of their axis.
        rest: inputs without tokens.
        sinks: for results that should not be held as arrays of tokens.
        words: how a message about one of ``rows`` begins, where the user knows it by another name.
    """

    rows: dict[str, Reader]
    lengths: dict[str, int]
    rest: Arrays = field(default_factory=dict)
    sinks: Mapping[str, Writer] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


def run_stream(
    spec: StreamSpec,
    executes: Sequence[Execute],
    inputs: Mapping[str, np.ndarray],
    buffer: Buffer,
    progress: Progress | None = None,
) -> Arrays:
    """Run all passes on arrays: the artifact's inputs by name -> its outputs, and what else the passes returned.

    Args:
        spec, executes, buffer, progress: as of :func:`run_passes`.
        inputs: by name.

    Raises:
        InputError: inputs of different lengths, an image that is not made of whole patches.
    """
    if spec.image is None:
        return run_passes(spec, executes, _feed(spec, inputs), buffer, progress)
    image = inputs[spec.image.input]
    feed, pixels = _image_feed(spec, spec.image, image)
    outputs = run_passes(spec, executes, feed, buffer, progress)
    return {**outputs, **pixels}


def _feed(spec: StreamSpec, inputs: Mapping[str, np.ndarray]) -> Feed:
    feed = Feed({}, {})
    for name, array in inputs.items():
        axis = spec.token_axes.get(name)
        if axis is None:
            feed.rest[name] = array
            continue
        feed.rows[name] = ArrayRows(array, axis)
        along, length = spec.axes.get(name, TOKENS), array.shape[axis]
        if feed.lengths.setdefault(along, length) != length:
            raise InputError(
                f"input {name!r} has {length} {along}, another input {feed.lengths[along]}; expected the same in each"
            )
    return feed


def _image_feed(spec: StreamSpec, image: ImageSpec, array: np.ndarray) -> tuple[Feed, Arrays]:
    """The image as tokens, and the images that results are written into."""
    batch, _, height, width = array.shape
    p = image.patch
    if height % p or width % p:
        raise InputError(f"input {image.input!r} has {height} x {width} pixels; expected multiples of {p}, the side of a patch")
    rows: dict[str, Reader] = {image.patches: PatchRows(array, p)}
    if image.positions is not None:
        rows[image.positions] = GridRows(width // p)
    made = {}
    for name in image.pixels:
        made[name] = np.empty((batch, spec.shapes[name][-1] // p**2, height, width), spec.dtypes[name])
    sinks = {name: PixelRows(found, p) for name, found in made.items()}
    words = {image.patches: f"input {image.input!r} contains NaN or infinity at patch"}
    feed = Feed(rows, {TOKENS: (height // p) * (width // p)}, sinks=sinks, words=words)
    return feed, {image.pixels[name]: found for name, found in made.items()}


def run_passes(
    spec: StreamSpec, executes: Sequence[Execute], feed: Feed, buffer: Buffer, progress: Progress | None = None
) -> Arrays:
    """Run all passes.

    Args:
        spec: how they fit together.
        executes: one function for each pass: inputs by name -> outputs by name (it may return more than the spec knows).
        feed: inputs, and where results go.
        buffer: where what passes store for each token lies.
        progress: called after every chunk.

    Returns:
        The results (and what else the passes returned) that have no sink.

    Raises:
        InputError: tokens drive a sum to NaN or infinity, which every answer would carry.
    """
    stored = _Slots(spec, feed.lengths, buffer)
    known: Arrays = dict(feed.rest)
    results: dict[str, Writer] = dict(feed.sinks)
    whole: Arrays = {}
    done, total = 0, sum(feed.lengths[step.axis] for step in spec.passes if step.looped)
    for index, (step, execute) in enumerate(zip(spec.passes, executes, strict=True)):
        sums = {entry.name: np.zeros(spec.shapes[entry.name], np.float64) for entry in step.sums}
        stored.begin(index)
        own, tokens = {*step.stores, *sums}, feed.lengths[step.axis]
        for start in range(0, tokens if step.looped else 1, spec.chunk):
            count = min(spec.chunk, tokens - start)
            feeds = _chunk(spec, step, {**stored.rows, **feed.rows}, known, start, count)
            outputs = execute(feeds)
            if not all(np.isfinite(outputs[name]).all() for name in sums):
                raise _not_finite({name: feeds[name] for name in feed.rows if name in feeds}, spec, start, count, feed.words)
            for name, values in outputs.items():
                if name in sums:
                    sums[name] += values
                elif name in step.stores:
                    stored.write(name, start, _first(values, spec.token_axes[name], count))
                elif name not in own and name in spec.token_axes:
                    axis = spec.token_axes[name]
                    if name not in results:
                        shape = [tokens if i == axis else n for i, n in enumerate(values.shape)]
                        results[name] = ArrayRows(np.empty(shape, values.dtype), axis)
                    results[name].write(start, _first(values, axis, count))
                else:
                    whole[name] = values
            del feeds, outputs, values  # what the next chunk can have: copies, and the runtime's own memory
            done += count if step.looped else 0
            if progress is not None:
                progress(done, total)
        for entry in step.sums:
            sums[entry.name] /= tokens * entry.rows if entry.mean else 1
            known[entry.name] = sums[entry.name].astype(spec.dtypes[entry.name])
    held = {name: found.array for name, found in results.items() if isinstance(found, ArrayRows)}
    return {**held, **whole}


def _chunk(spec: StreamSpec, step: PassSpec, rows: Mapping[str, Reader], known: Arrays, start: int, count: int) -> Arrays:
    """The inputs of a pass for the tokens from ``start``; the last token is repeated to fill a chunk."""
    feeds: Arrays = {}
    for name in step.inputs:
        if name == OFFSET:
            feeds[name] = np.array(start, np.int64)
        elif name == VALID:
            feeds[name] = (np.arange(spec.chunk) < count).astype(np.float32)
        elif name in known:
            feeds[name] = known[name]
        else:
            axis = spec.token_axes[name]
            values = rows[name].read(start, count)
            if count < spec.chunk:
                # real tokens again: log(0) or 0/0 would spoil the sums. (np.pad takes the memory twice.)
                last = np.take(values, [-1], axis)
                shape = [spec.chunk - count if i == axis else n for i, n in enumerate(values.shape)]
                values = np.concatenate((values, np.broadcast_to(last, shape)), axis)
            feeds[name] = np.ascontiguousarray(values, dtype=spec.dtypes[name])
    return feeds


def _not_finite(inputs: Arrays, spec: StreamSpec, start: int, count: int, words: Mapping[str, str]) -> InputError:
    """Says which token it is, where it comes in as one."""
    for name, values in inputs.items():
        bad = np.argwhere(~np.isfinite(np.moveaxis(values, spec.token_axes[name], 0)))
        if bad.size:
            return InputError(
                f"{words.get(name, f'input {name!r} contains NaN or infinity at token')} {start + bad[0][0]}, which the sums "
                "over tokens would carry into every answer; give finite values"
            )
    which = f"{'patches' if words else 'tokens'} {start} to {start + count - 1}"
    return InputError(
        f"{which} drive a sum beyond what FP32 holds, which every answer would carry; are they of the scale that the model was "
        "trained on?"
    )


def _first(values: np.ndarray, axis: int, count: int) -> np.ndarray:
    return values if values.shape[axis] == count else values[(slice(None),) * axis + (slice(count),)]


class _Slots:
    """Stored values, in as few places as can be: a pass reads a chunk before it writes it, so a value takes over the place of
    one of equal size that no later pass reads."""

    def __init__(self, spec: StreamSpec, lengths: Mapping[str, int], buffer: Buffer) -> None:
        self._spec, self._lengths, self._buffer = spec, lengths, buffer
        self.rows: dict[str, Rows] = {}
        self._last = {name: index for index, step in enumerate(spec.passes) for name in step.inputs}

    def begin(self, index: int) -> None:
        """Make room for what pass ``index`` stores; it can still read what was there."""
        spec = self._spec
        self._writing: dict[str, Rows] = {}
        free = {name: place for name, place in self.rows.items() if self._last.get(name, -1) <= index}
        for name in spec.passes[index].stores:
            like = next((old for old in free if self._kind(old) == self._kind(name)), None)
            if like is None:
                axis, dtype = spec.token_axes[name], np.dtype(spec.dtypes[name])
                tokens = self._lengths[spec.axes.get(name, TOKENS)]
                self._writing[name] = self._buffer.rows(tokens, spec.shapes[name], axis, dtype)
            else:
                self._writing[name] = free.pop(like)
        self.rows = {**self.rows, **self._writing}

    def write(self, name: str, start: int, values: np.ndarray) -> None:
        """Store tokens of a value."""
        self._writing[name].write(start, values)

    def _kind(self, name: str) -> tuple[Iterable[int], int, str, str]:
        spec = self._spec
        return tuple(spec.shapes[name]), spec.token_axes[name], spec.dtypes[name], spec.axes.get(name, TOKENS)
