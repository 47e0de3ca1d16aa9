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

from pom_edge.bundle import Artifact, Bundle
from pom_edge.engine_sizes import choose_sizes, profile
from pom_edge.errors import InputError
from pom_edge.exchange import writing_errors
from pom_edge.runtimes.stepping import is_state

COMMON = "--iterations=100 --warmUp=500 --duration=10 --useCudaGraph --noDataTransfers --useSpinWait --separateProfileRun"

__all__ = ["trtexec_lines", "write_raw"]


def trtexec_lines(bundle: Bundle, artifact: Artifact) -> dict[str, str]:
    """Command lines, to be run inside the bundle: building and timing a graph, or timing an engine.

    Returns:
        By TensorRT version, ``"10"`` and ``"11"``: 10 types strongly when told, 11 always does and has no such flag.

    Raises:
        InputError: an artifact in several files.
    """
    if artifact.stream is not None:
        raise InputError(f"{artifact.file} is one of several passes; trtexec runs one graph: choose the parallel form")
    if artifact.engine is not None:
        fixed = _shapes({spec.name: spec.shape for spec in artifact.inputs if all(isinstance(dim, int) for dim in spec.shape)})
        base = f"trtexec --loadEngine={shlex.quote(artifact.file)}{fixed}"
        return dict.fromkeys(("10", "11"), f"{base} {COMMON}")
    shapes = profile(artifact.inputs, choose_sizes(bundle, artifact, None, None)[0])
    engine = artifact.file.replace(".onnx", ".engine")
    flags = [f"--onnx={artifact.file}", f"--saveEngine={engine}", "--noTF32"]
    for index, option in enumerate(("minShapes", "optShapes", "maxShapes")):
        if shapes:
            flags.append(
                f"--{option}=" + ",".join(f"{name}:{'x'.join(map(str, each[index]))}" for name, each in shapes.items())
            )
    base = shlex.join(["trtexec", *flags])
    return {"10": f"{base} --stronglyTyped {COMMON}", "11": f"{base} {COMMON}"}


def _shapes(fixed: dict[str, list[Any]]) -> str:
    return " --shapes=" + ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in fixed.items()) if fixed else ""


def write_raw(bundle: Bundle, artifact: Artifact, folder: Path) -> list[str]:
    """Golden inputs and PyTorch's outputs as raw little-endian arrays, as ``--loadInputs`` takes them, and their shapes.

    Args:
        folder: is made; holds ``<case>.<tensor>.bin`` and ``raw.json``.

    Returns:
        Names of the files.
    """
    listed: dict[str, dict[str, Any]] = {}
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for case, inputs, outputs in bundle.cases():
            for kind, arrays in (("input", inputs), ("output", outputs)):
                for name, array in arrays.items():
                    file = f"{case.name}.{name}.bin"
                    (folder / file).write_bytes(np.ascontiguousarray(array).tobytes())
                    listed[file] = {
                        "case": case.name,
                        "tensor": name,
                        "kind": kind,
                        "dtype": str(array.dtype),
                        "shape": list(array.shape),
                        "fits": _fits(artifact, inputs),
                    }
        (folder / "raw.json").write_text(json.dumps(listed, indent=2) + "\n")
    return [*listed, "raw.json"]


def _fits(artifact: Artifact, inputs: dict[str, np.ndarray]) -> bool:
    """Whether the artifact takes a case as it is."""
    return all(
        spec.name in inputs
        and all(isinstance(dim, str) or dim == n for dim, n in zip(spec.shape, inputs[spec.name].shape, strict=True))
        for spec in artifact.inputs
        if not is_state(spec.name)
    )
