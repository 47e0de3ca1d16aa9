"""Hand-over to trtexec: the command line with every flag said, and golden data as raw files.

trtexec is not in the pip wheels, and version 11 turned its benchmark defaults around (CUDA graph on, transfers off, spinning),
so nothing is left to a default. An engine file of ours carries no prefix: trtexec loads it as it is (ultralytics#22910).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import MANIFEST, Artifact, Bundle, GoldenCase
from pom_edge.engine_sizes import choose_sizes, engine_spec, profile
from pom_edge.errors import InputError
from pom_edge.exchange import writing_errors
from pom_edge.extent import Extent
from pom_edge.runtimes.stepping import NO_AXIS, Arrays, empty_state

COMMON = "--iterations=100 --warmUp=500 --duration=10 --useCudaGraph --noDataTransfers --useSpinWait --separateProfileRun"

__all__ = ["trtexec_lines", "write_raw"]


def trtexec_lines(bundle: Bundle, artifact: Artifact, loaded: str = "") -> dict[str, str]:
    """Command lines, to be run inside the bundle: building and timing a graph, or timing an engine.

    Args:
        bundle, artifact: what to run.
        loaded: the flags that :func:`write_raw` gave for its data; without them trtexec makes inputs up.

    Returns:
        By TensorRT version, ``"10"`` and ``"11"``: 10 types strongly when told, 11 always does and has no such flag.

    Raises:
        InputError: an artifact in several files.
    """
    if artifact.stream is not None:
        raise InputError(f"{artifact.file} is one of several passes; trtexec runs one graph: choose the parallel form")
    shapes = profile(artifact.inputs, _sizes(bundle, artifact))
    common = f"{loaded} {COMMON}" if loaded else COMMON
    if artifact.engine is not None:
        usual = f" --shapes={_shapes(shapes, 1)}" if shapes and not loaded else ""
        return dict.fromkeys(("10", "11"), f"trtexec --loadEngine={shlex.quote(artifact.file)}{usual} {common}")
    engine = artifact.file.replace(".onnx", ".engine")
    flags = [f"--onnx={artifact.file}", f"--saveEngine={engine}", "--noTF32"]
    for index, option in enumerate(("minShapes", "optShapes", "maxShapes")):
        flags += [f"--{option}={_shapes(shapes, index)}"] if shapes else []
    base = shlex.join(["trtexec", *flags])
    return {"10": f"{base} --stronglyTyped {common}", "11": f"{base} {common}"}


def _sizes(bundle: Bundle, artifact: Artifact) -> dict[str, Extent]:
    """Of a graph those that an engine of it gets by default; of an engine its own."""
    if artifact.engine is None:
        return choose_sizes(bundle, artifact, None, None)[0]
    return {axis: Extent(*lengths) for axis, lengths in artifact.engine["shapes"].items()}


def _shapes(shapes: dict[str, tuple[list[int], list[int], list[int]]], index: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, each[index]))}" for name, each in shapes.items())


def write_raw(bundle: Bundle, artifact: Artifact, folder: Path) -> tuple[list[str], str]:
    """Golden inputs and PyTorch's outputs as raw little-endian arrays, as ``--loadInputs`` takes them, and their shapes.

    Of a recurrent artifact they are a case's first chunk, with the empty state that goes in. (The state that comes out is not
    among PyTorch's answers.)

    Args:
        folder: is made; holds ``<case>.<tensor>.bin`` and ``raw.json``.

    Returns:
        Names of the files, and the flags that load the first case that fits; empty where none does.

    Raises:
        InputError: the folder lies inside a bundle, whose files are hashed, or cannot be written.
    """
    place = folder.resolve()
    if any((each / MANIFEST).is_file() for each in (place, *place.parents)):
        raise InputError(f"--raw {folder} lies inside a bundle, whose files are hashed; expected a folder outside")
    listed: dict[str, dict[str, Any]] = {}
    sizes, loaded = _sizes(bundle, artifact), ""
    with writing_errors(folder, "choose another folder for --raw"):
        folder.mkdir(parents=True, exist_ok=True)
        for case, inputs, outputs in bundle.cases():
            if artifact.form == "recurrent":
                inputs, outputs = _first_chunk(artifact, case, inputs, outputs, sizes)
            fits = _fits(artifact, inputs, sizes)
            for kind, arrays in (("input", inputs), ("output", outputs)):
                for name, array in arrays.items():
                    file = f"{case.name}.{name}.bin"
                    (folder / file).write_bytes(np.ascontiguousarray(array).tobytes())
                    about = {"case": case.name, "tensor": name, "kind": kind, "dtype": str(array.dtype)}
                    rows = {"rows": case.rows[name]} if kind == "output" and name in case.rows else {}
                    listed[file] = {**about, "shape": list(array.shape), "fits": fits, **rows}
            if fits and not loaded:
                loaded = _load_flags(artifact, case.name, inputs, place)
        (folder / "raw.json").write_text(json.dumps(listed, indent=2) + "\n")
    return [*listed, "raw.json"], loaded


def _load_flags(artifact: Artifact, case: str, inputs: Arrays, place: Path) -> str:
    names = [spec.name for spec in artifact.inputs]
    shapes = ",".join(f"{name}:{'x'.join(map(str, inputs[name].shape))}" for name in names if inputs[name].ndim)
    files = ",".join(f"{name}:{place / f'{case}.{name}.bin'}" for name in names)
    free = any(isinstance(dim, str) for spec in artifact.inputs for dim in spec.shape)
    return shlex.join([*([f"--shapes={shapes}"] if free else []), f"--loadInputs={files}"])


def _first_chunk(
    artifact: Artifact, case: GoldenCase, inputs: Arrays, outputs: Arrays, sizes: dict[str, Extent]
) -> tuple[Arrays, Arrays]:
    """A stream's first step: the state is empty, and the answer is that of its tokens."""
    longest = sizes["tokens"].maximum if "tokens" in sizes else None
    axes = artifact.token_axes
    length = case.chunks[0] if case.chunks else next(inputs[name].shape[axis] for name, axis in axes.items() if name in inputs)
    if not artifact.frames:  # a frame is seen as a whole
        fixed = next((spec.shape[axes[spec.name]] for spec in artifact.inputs if spec.name in axes), None)
        length = min(length, fixed if isinstance(fixed, int) else longest or length)
    batch = inputs[artifact.inputs[0].name].shape[0]
    cut = {name: np.take(array, range(length), axes[name]) if name in axes else array for name, array in inputs.items()}
    whole = {name for name in outputs if axes.get(name, NO_AXIS) == NO_AXIS or name in case.rows}  # of the whole sequence
    answers = {name: np.take(array, range(length), axes[name]) for name, array in outputs.items() if name not in whole}
    return {**cut, **empty_state(artifact.inputs, batch)}, answers


def _fits(artifact: Artifact, inputs: Arrays, sizes: dict[str, Extent]) -> bool:
    """Whether what is built in these sizes takes a case as it is."""
    for spec in (engine_spec(spec, sizes) for spec in artifact.inputs):
        array = inputs.get(spec.name)
        if array is None or array.ndim != len(spec.shape):
            return False
        for length, dim in zip(array.shape, spec.shape, strict=True):
            low, high = (dim, dim) if isinstance(dim, int) else spec.bounds.get(dim, (1, None))
            if length < low or (high is not None and length > high):
                return False
    return True
