"""Golden cases for an artifact whose sizes are fixed: it runs what it was built for.

A case of another length does not fit and is left out. Engines have no cases of their own: on them one of more samples is run a
part of the batch at a time, and a stream is cut anew. A Core ML package has its own, and takes others as they were recorded or
not at all.
"""

from __future__ import annotations

import numpy as np

from pom_edge.bundle import Artifact, GoldenCase, TensorSpec
from pom_edge.runtimes.stepping import Arrays, Execute, is_state, run_case

BATCH_AXIS = 0

__all__ = ["run_fitting"]


def run_fitting(execute: Execute, artifact: Artifact, case: GoldenCase, inputs: Arrays) -> Arrays | None:
    """One golden case through an artifact, or None where its fixed sizes exclude the case.

    Args:
        execute: the artifact.
        case: how a sequence is cut in the recurrent form is chosen anew where an engine takes other chunks.
        inputs: by name, as recorded.
    """
    specs = [spec for spec in artifact.inputs if not is_state(spec.name)]
    rows = _rows(specs, artifact, inputs)
    chunks = _chunks(specs, artifact, case.chunks)
    if rows is None or (case.chunks and not chunks):
        return None
    total = inputs[specs[0].name].shape[BATCH_AXIS]
    if artifact.engine is None and (rows != total or chunks != case.chunks):
        return None
    case = case.model_copy(update={"chunks": chunks})
    if rows == total:
        return run_case(execute, artifact, case, inputs)
    parts = []
    for start in range(0, total, rows):
        part = {
            name: array[start : start + rows] if _has_batch(artifact, name, array, total) else array
            for name, array in inputs.items()
        }
        parts.append(run_case(execute, artifact, case, part))
    return {name: np.concatenate([part[name] for part in parts], axis=BATCH_AXIS) for name in parts[0]}


def _rows(specs: list[TensorSpec], artifact: Artifact, inputs: Arrays) -> int | None:
    """Samples at a time; None where the case does not fit."""
    rows = 1
    for spec in specs:
        array = inputs.get(spec.name)
        if array is None or array.ndim != len(spec.shape):
            return None
        for axis, (length, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
            if artifact.token_axes.get(spec.name) == axis and artifact.form == "recurrent":
                continue
            low, high = (dim, dim) if isinstance(dim, int) else spec.bounds.get(dim, (1, None))
            if axis == BATCH_AXIS and spec is specs[0]:
                rows = length if high is None else min(length, high)
                if length % rows or rows < low:
                    return None
            elif axis == BATCH_AXIS and length == inputs[specs[0].name].shape[BATCH_AXIS]:
                continue
            elif length < low or (high is not None and length > high) or length not in spec.lengths.get(str(dim), [length]):
                return None
    return rows


def _has_batch(artifact: Artifact, name: str, array: np.ndarray, total: int) -> bool:
    """Positions (N, 2) belong to all samples."""
    spec = next(each for each in artifact.inputs if each.name == name)
    return array.ndim > 0 and array.shape[BATCH_AXIS] == total and len(spec.shape) == array.ndim and "positions" not in name


def _chunks(specs: list[TensorSpec], artifact: Artifact, chunks: list[int]) -> list[int]:
    """The case's own chunks where the artifact takes them, else its longest; empty where neither works."""
    spec = next((each for each in specs if each.name in artifact.token_axes), None)
    if spec is None or not chunks:
        return []
    dim = spec.shape[artifact.token_axes[spec.name]]
    low, high = (dim, dim) if isinstance(dim, int) else spec.bounds.get(dim, (1, None))
    if isinstance(dim, str) and dim in spec.lengths:
        return chunks if set(chunks) <= set(spec.lengths[dim]) else []
    if all(low <= chunk and (high is None or chunk <= high) for chunk in chunks):
        return chunks
    if artifact.frames or high is None:  # a frame is seen as a whole
        return []
    cut = [high] * (sum(chunks) // high) + ([sum(chunks) % high] if sum(chunks) % high else [])
    return cut if cut[-1] >= low else []
