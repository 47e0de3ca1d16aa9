"""Running the streamed form: every pass over all tokens, chunk by chunk, its sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from pom_edge.bundle import PassSpec, StreamSpec
from pom_edge.errors import InputError
from pom_edge.runtimes.tokens import ArrayRows, Buffer, Rows

OFFSET, VALID = "offset", "valid"

Arrays = dict[str, np.ndarray]
Execute = Callable[[Arrays], Mapping[str, np.ndarray]]
Progress = Callable[[int, int], None]  # token-passes done, and how many there are

__all__ = ["OFFSET", "VALID", "Progress", "run_passes", "token_sources"]


def token_sources(spec: StreamSpec, inputs: Mapping[str, np.ndarray]) -> tuple[dict[str, Rows], Arrays, int]:
    """Inputs with tokens, inputs without, and how many tokens there are.

    Raises:
        InputError: inputs of different lengths.
    """
    rows: dict[str, Rows] = {}
    rest: Arrays = {}
    lengths: dict[str, int] = {}
    for name, array in inputs.items():
        axis = spec.token_axes.get(name)
        if axis is None:
            rest[name] = array
        else:
            rows[name] = ArrayRows(array, axis)
            lengths[name] = array.shape[axis]
    if len(set(lengths.values())) != 1:
        raise InputError(f"inputs have different numbers of tokens: {lengths}; expected the same in each")
    return rows, rest, next(iter(lengths.values()))


def run_passes(
    spec: StreamSpec,
    executes: Sequence[Execute],
    rows: Mapping[str, Rows],
    rest: Arrays,
    tokens: int,
    buffer: Buffer,
    sinks: Mapping[str, Rows] | None = None,
    progress: Progress | None = None,
) -> Arrays:
    """Run all passes.

    Args:
        spec: how they fit together.
        executes: one function for each pass: inputs by name -> outputs by name (it may return more than the spec knows).
        rows: model inputs with tokens.
        rest: model inputs without.
        tokens: N.
        buffer: where what passes store for each token lies.
        sinks: where results go that should not be held in memory.
        progress: called after every chunk.

    Returns:
        The model's outputs (and what else the passes returned) that have no sink.
    """
    stored = _Slots(spec, tokens, buffer)
    known: Arrays = dict(rest)
    results: dict[str, Rows] = dict(sinks or {})
    whole: Arrays = {}
    looped = [step for step in spec.passes if step.looped]
    done, total = 0, len(looped) * tokens
    for index, (step, execute) in enumerate(zip(spec.passes, executes, strict=True)):
        sums = {entry.name: np.zeros(spec.shapes[entry.name], np.float64) for entry in step.sums}
        stored.begin(index)
        own = {*step.stores, *sums}
        for start in range(0, tokens if step.looped else 1, spec.chunk):
            count = min(spec.chunk, tokens - start)
            outputs = execute(_chunk(spec, step, rows, stored.rows, known, start, count))
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
            del outputs, values  # the runtime's own memory, which the next chunk can have
            done += count if step.looped else 0
            if progress is not None:
                progress(done, total)
        for entry in step.sums:
            sums[entry.name] /= tokens * entry.rows if entry.mean else 1
            known[entry.name] = sums[entry.name].astype(spec.dtypes[entry.name])
    held = {name: found.array for name, found in results.items() if isinstance(found, ArrayRows)}
    return {**held, **whole}


def _chunk(
    spec: StreamSpec,
    step: PassSpec,
    rows: Mapping[str, Rows],
    stored: Mapping[str, Rows],
    known: Arrays,
    start: int,
    count: int,
) -> Arrays:
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
            values = (rows[name] if name in rows else stored[name]).read(start, count)
            if count < spec.chunk:
                widths = [(0, spec.chunk - count if i == axis else 0) for i in range(values.ndim)]
                values = np.pad(values, widths, mode="edge")  # real tokens again: log(0) or 0/0 would spoil the sums
            feeds[name] = np.ascontiguousarray(values, dtype=spec.dtypes[name])
    return feeds


def _first(values: np.ndarray, axis: int, count: int) -> np.ndarray:
    return values if values.shape[axis] == count else values[(slice(None),) * axis + (slice(count),)]


class _Slots:
    """Stored values, in as few places as can be: a pass reads a chunk before it writes it, so a value takes over the place of
    one of equal size that no later pass reads."""

    def __init__(self, spec: StreamSpec, tokens: int, buffer: Buffer) -> None:
        self._spec, self._tokens, self._buffer = spec, tokens, buffer
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
                self._writing[name] = self._buffer.rows(self._tokens, spec.shapes[name], axis, dtype)
            else:
                self._writing[name] = free.pop(like)
        self.rows = {**self.rows, **self._writing}

    def write(self, name: str, start: int, values: np.ndarray) -> None:
        """Store tokens of a value."""
        self._writing[name].write(start, values)

    def _kind(self, name: str) -> tuple[Iterable[int], int, str]:
        spec = self._spec
        return tuple(spec.shapes[name]), spec.token_axes[name], spec.dtypes[name]
