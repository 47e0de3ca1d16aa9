"""Running a graph of the recurrent form chunk by chunk: which tensors are its state, how a sequence is cut and put together.

Graph inputs ``state.*`` go in with a chunk, outputs ``next.*`` come out with its answer and are the state of the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pom_edge.arrays import read_safetensors, write_safetensors
from pom_edge.bundle import Artifact, GoldenCase, TensorSpec
from pom_edge.errors import InputError

STATE, NEXT, COUNT = "state.", "next.", "state.count"
STATE_FORMAT, STATE_VERSION = "pom-edge-state", "1"
NO_AXIS = -1  # of an output that has no row for each token: the last chunk's stands

Arrays = dict[str, np.ndarray]
Execute = Callable[[Arrays], Mapping[str, np.ndarray]]

__all__ = [
    "COUNT",
    "NEXT",
    "NO_AXIS",
    "STATE",
    "empty_state",
    "is_state",
    "join",
    "load_state",
    "next_state",
    "run_case",
    "run_chunks",
    "run_rows",
    "save_state",
    "split",
]


def is_state(name: str) -> bool:
    """Whether a graph's input or output carries state."""
    return name.startswith((STATE, NEXT))


def empty_state(specs: Sequence[TensorSpec], batch: int) -> Arrays:
    """The state of a stream that has seen nothing, for so many sequences."""
    shapes = {spec.name: [batch if isinstance(dim, str) else dim for dim in spec.shape] for spec in specs}
    return {spec.name: np.zeros(shapes[spec.name], spec.dtype) for spec in specs if spec.name.startswith(STATE)}


def next_state(outputs: Mapping[str, np.ndarray]) -> Arrays:
    """The ``next.*`` outputs under the names of the inputs that they become."""
    return {STATE + name.removeprefix(NEXT): array for name, array in outputs.items() if name.startswith(NEXT)}


def split(inputs: Mapping[str, np.ndarray], axes: Mapping[str, int], chunks: Sequence[int]) -> Iterator[Arrays]:
    """Cut sequences along their token axes; inputs without one go into every chunk.

    Args:
        inputs: whole sequences by name.
        axes: token axis of each input that has one.
        chunks: lengths, which add up to the sequence.

    Raises:
        InputError: they do not.
    """
    start = 0
    lengths = {name: inputs[name].shape[axis] for name, axis in axes.items() if name in inputs}
    if not lengths or {sum(chunks)} != set(lengths.values()):
        raise InputError(
            f"chunks of {list(chunks)} tokens do not make up the sequence ({lengths or 'no input has a token axis'})"
        )
    for length in chunks:
        here = slice(start, start + length)
        yield {name: array[(slice(None),) * axes[name] + (here,)] if name in axes else array for name, array in inputs.items()}
        start += length


def join(pieces: Sequence[Mapping[str, np.ndarray]], axes: Mapping[str, int]) -> Arrays:
    """Put the outputs of chunks together along their token axes (1 where unsaid); state is left out."""
    joined = {}
    for name in pieces[0]:
        if is_state(name):
            continue
        axis = axes.get(name, 1)
        rows = [piece[name] for piece in pieces]
        joined[name] = rows[-1] if axis == NO_AXIS or len(rows) == 1 else np.concatenate(rows, axis=axis)
    return joined


def run_chunks(
    execute: Execute, inputs: Mapping[str, np.ndarray], axes: Mapping[str, int], chunks: Sequence[int], state: Arrays
) -> Arrays:
    """Run a sequence through a recurrent graph in chunks of the given lengths, from the given state.

    Returns:
        The outputs of the whole sequence.
    """
    pieces = []
    for part in split(inputs, axes, chunks):
        outputs = execute({**part, **state})
        state = next_state(outputs)
        pieces.append({name: array for name, array in outputs.items() if not is_state(name)})  # old states are done with
    return join(pieces, axes)


def run_rows(execute: Execute, inputs: Arrays, rows: int | None) -> Arrays:
    """Run what takes a fixed number of sequences on a multiple of them, one part after the other.

    Args:
        execute: inputs by name -> outputs by name, each with a row for each sequence.
        inputs: whose first array says how many sequences there are.
        rows: sequences that it takes; None takes any number.
    """
    total = next(iter(inputs.values())).shape[0]
    if rows is None or total <= rows or total % rows:
        return dict(execute(inputs))
    parts = []
    for start in range(0, total, rows):
        own = {n: a[start : start + rows] if a.ndim and a.shape[0] == total else a for n, a in inputs.items()}
        parts.append(execute(own))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def run_case(execute: Execute, artifact: Artifact, case: GoldenCase, inputs: Arrays) -> Arrays:
    """One golden case through an artifact of any form, as it was recorded."""
    if artifact.form != "recurrent":
        return dict(execute(inputs))
    batch = inputs[artifact.inputs[0].name].shape[0]
    return run_chunks(execute, inputs, artifact.token_axes, case.chunks, empty_state(artifact.inputs, batch))


def save_state(path: Path, state: Arrays, artifact: Artifact, sha256: str) -> None:
    """Write a stream's state, bound to the artifact that made it.

    Raises:
        InputError: the place cannot be written.
    """
    metadata = {"format": STATE_FORMAT, "version": STATE_VERSION, "artifact": artifact.file, "sha256": sha256}
    write_safetensors(path, state, metadata)


def load_state(path: Path, artifact: Artifact, sha256: str) -> Arrays:
    """Read a stream's state.

    Raises:
        InputError: no such file, not a state, or that of another model or version.
    """
    arrays, metadata = read_safetensors(path)
    if metadata.get("format") != STATE_FORMAT:
        raise InputError(f"{path} is not a saved state; expected a file that session.save_state() wrote")
    if metadata.get("version") != STATE_VERSION:
        raise InputError(
            f"{path} is a state of version {metadata.get('version')}, this release reads version {STATE_VERSION}; go on with "
            "the release of pom-edge that saved it, or start the stream anew"
        )
    if metadata.get("sha256") != sha256:
        raise InputError(
            f"{path} is the state of another model or export ({metadata.get('artifact')} of other bytes than {artifact.file} "
            "here); a state means something to the graph that made it only"
        )
    batch = arrays[COUNT].shape[0] if COUNT in arrays else 0
    expected = empty_state(artifact.inputs, batch)
    if {name: (a.shape, a.dtype) for name, a in arrays.items()} != {name: (a.shape, a.dtype) for name, a in expected.items()}:
        raise InputError(f"{path} does not hold the state tensors of {artifact.file}; save the state again")
    return arrays
