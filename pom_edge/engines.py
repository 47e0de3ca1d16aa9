"""Engines as pom-export asks for them: from a bundle alone, or beside what an export made. Imports no torch and no onnx."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pom_edge.compiling import COMPILED, Compiled, EngineOptions, compile_bundle
from pom_edge.errors import InputError
from pom_edge.options import ExportOptions
from pom_edge.outcome import ArtifactReport, ExportReport, Step, size_of

__all__ = ["add_compiled", "compile_file", "engine_options"]


def compile_file(path: Path, options: ExportOptions, out: Path | None = None, progress: Step | None = None) -> ExportReport:
    """Compile the ONNX artifacts of a bundle, in place; needs neither torch nor onnx.

    Raises:
        InputError: options that belong to an export, or an artifact that the bundle does not hold.
        GateError: the target does not take the graph, or what was built is not the model.
    """
    options.check()
    start, step = time.perf_counter(), progress or (lambda _: None)
    if out is not None and out.resolve() != path.resolve():
        raise InputError(f"--out is {out}; a bundle gets its engines in place. Copy the folder first to keep it as it is")
    of_export = ("factory", "example", "layout", "degree", "clamp", "calibration", "metric", "memory_budget", "chunk")
    given = [name for name in of_export if getattr(options, name) is not None]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} belongs to the export of a model; {path} is a bundle: its graphs stay"
        )
    unmade = [target for target in options.targets if target not in COMPILED]
    if unmade:
        raise InputError(
            f"{path} is a bundle already; what is compiled from one is --target {' or '.join(COMPILED)}, not {unmade[0]}"
        )
    compiled = compile_bundle(path, options.targets, engine_options(options, options.precisions_of(*options.targets)), step)
    return add_compiled(ExportReport(path, []), compiled, start)


def engine_options(options: ExportOptions, precisions: Sequence[str]) -> EngineOptions:
    """Those of an export that engines have, too."""
    names = set(EngineOptions.__dataclass_fields__) - {"precisions"}
    values = {name: getattr(options, name) for name in names}
    if options.workspace is None:  # kernels may not take more than the process may
        values["workspace"] = options.memory_budget
    return EngineOptions(tuple(precisions), **values)


def add_compiled(report: ExportReport, compiled: Compiled, start: float) -> ExportReport:
    """The report with what came of compiling; ``start`` is when that began."""
    for artifact in compiled.artifacts:
        sizes = size_of(report.bundle, [file for file in artifact.files if file.endswith(".engine")])
        layers = sum((artifact.engine or {})["layers"])
        facts = (
            artifact.target,
            artifact.form,
            artifact.precision,
            artifact.file,
            sizes,
            artifact.verified,
            artifact.parity,
            layers,
        )
        report.artifacts.append(ArtifactReport(*facts, None, "", None))
    report.missing += compiled.missing
    report.notes += compiled.notes
    report.seconds += time.perf_counter() - start
    return report
