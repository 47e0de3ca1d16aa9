"""Which layer diverges first: the artifact with every mixer's output as a further output. Needs the onnx package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.errors import InputError, require
from pom_edge.runtimes.fitting import run_fitting
from pom_edge.runtimes.onnxruntime_session import native_session
from pom_edge.runtimes.parity import Metrics, measure, worst
from pom_edge.runtimes.rounding import open_rounded
from pom_edge.runtimes.stepping import Execute, is_state
from pom_edge.runtimes.streamed import run_stream
from pom_edge.runtimes.tokens import Buffer

__all__ = ["first_divergence", "open_tapped"]


def open_tapped(
    path: Path, taps: dict[str, str], optimize: bool = True
) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """An ONNX file with further outputs, ready to run.

    Args:
        path: the ``.onnx`` file.
        taps: the names that are wanted (module paths, outputs) -> the values inside the graph.
        optimize: let the runtime rewrite the graph for speed.

    Returns:
        A function of inputs by name that returns the wanted values by name.
    """
    onnx = require("onnx", "export")
    model = onnx.load(str(path), load_external_data=False)
    known = {output.name for output in model.graph.output}
    for value in taps.values():
        if value not in known:
            model.graph.output.append(onnx.ValueInfoProto(name=value))
    native = native_session(model.SerializeToString(), weights_folder=path.parent, optimize=optimize)
    return lambda inputs: dict(zip(taps, native.run(list(taps.values()), inputs), strict=True))


def first_divergence(bundle: Bundle, artifact: Artifact) -> dict[str, Metrics]:
    """The worst figures of every mixer's own output over the golden cases that recorded them, in the model's order.

    Raises:
        InputError: the bundle recorded no layers.
        MissingExtraError: the onnx package is not installed.
    """
    cases = [(case, inputs, bundle.taps(case)) for case, inputs, _ in bundle.cases() if case.taps]
    names = list(artifact.mixers) if artifact.stream is None else [n for step in artifact.stream.passes for n in step.mixers]
    if not cases or not names:
        raise InputError(f"{artifact.file} recorded no layers (a bare layer or a .pt2 program has none inside)")
    found: dict[str, list[Metrics]] = {name: [] for name in names}
    execute = _tapped(bundle, artifact)
    for case, inputs, reference in cases:
        value = run_fitting(execute, artifact, case, inputs)
        if value is None:
            continue
        for name in names:
            found[name].append(measure(reference[name], value[name]))
    if not all(found.values()):
        raise InputError(f"{artifact.file} fits none of the cases whose layers were recorded")
    return {name: worst(metrics) for name, metrics in found.items()}


def _tapped(bundle: Bundle, artifact: Artifact) -> Execute:
    """The artifact with its mixers' outputs, whatever its form."""
    stream = artifact.stream
    open_graph: Callable[..., Execute] = open_rounded if artifact.precision == "bf16" else open_tapped
    if artifact.target == "coreml":
        from pom_edge.runtimes.coreml_session import open_package

        open_graph = open_package
    if stream is None:
        states = {spec.name: spec.name for spec in artifact.outputs if is_state(spec.name)}
        return open_graph(bundle.path / artifact.file, artifact.mixers | states)
    executes = []
    for step in stream.passes:
        own = {name: name for name in (*step.stores, *(each.name for each in step.sums), *step.results)}
        executes.append(open_graph(bundle.path / step.file, own | step.mixers))

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with Buffer() as buffer:
            return run_stream(stream, executes, inputs, buffer)

    return run
