"""Which layer diverges first: the artifact with every mixer's output as a further output. Needs the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.errors import InputError, require
from pom_edge.runtimes.onnxruntime_session import native_session
from pom_edge.runtimes.parity import Metrics, measure, worst

__all__ = ["first_divergence", "run_tapped"]


def run_tapped(path: Path, taps: dict[str, str], inputs: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Run an ONNX file with further outputs.

    Args:
        path: the ``.onnx`` file.
        taps: module path -> name of the value inside the graph.
        inputs: sets of inputs.

    Returns:
        For each set, the tapped values by module path.
    """
    onnx = require("onnx", "export")
    model = onnx.load(str(path), load_external_data=False)
    known = {output.name for output in model.graph.output}
    for value in taps.values():
        if value not in known:
            model.graph.output.append(onnx.ValueInfoProto(name=value))
    native = native_session(model.SerializeToString(), weights_folder=path.parent)
    return [dict(zip(taps, native.run(list(taps.values()), arrays), strict=True)) for arrays in inputs]


def first_divergence(bundle: Bundle, artifact: Artifact) -> dict[str, Metrics]:
    """The worst figures of every mixer's own output over the golden cases that recorded them, in the model's order.

    Raises:
        InputError: the bundle recorded no layers.
        MissingExtraError: the onnx package is not installed.
    """
    cases = [(inputs, bundle.taps(case)) for case, inputs, _ in bundle.cases() if case.taps]
    if not cases or not artifact.mixers:
        raise InputError(f"{artifact.file} recorded no layers (a bare layer or a .pt2 program has none inside)")
    found: dict[str, list[Metrics]] = {name: [] for name in artifact.mixers}
    values = run_tapped(bundle.path / artifact.file, artifact.mixers, [inputs for inputs, _ in cases])
    for (_, reference), value in zip(cases, values, strict=True):
        for name in artifact.mixers:
            found[name].append(measure(reference[name], value[name]))
    return {name: worst(metrics) for name, metrics in found.items()}
