"""Engines as pom-export asks for them: from a bundle alone, or beside what an export made. Imports no torch and no onnx."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from pom_edge.compiling import Compiled, compile_bundle
from pom_edge.engine_options import COMPILED, EngineOptions
from pom_edge.errors import InputError
from pom_edge.options import ExportOptions
from pom_edge.outcome import ArtifactReport, ExportReport, size_of
from pom_edge.progress import Step

_OPTIONS = {"snr_db": "snr", "deployment_target": "minimum-deployment-target"}  # fields whose options have other names

__all__ = ["add_compiled", "after_export", "compile_file", "how_to_keep"]


def compile_file(path: Path, options: ExportOptions, out: Path | None = None, progress: Step | None = None) -> ExportReport:
    """Compile the ONNX artifacts of a bundle, in place; needs neither torch nor onnx.

    Raises:
        InputError: options that belong to an export, or an artifact that the bundle does not hold.
        GateError: the target does not take the graph, or what was built is not the model.
    """
    start, step = time.perf_counter(), progress or (lambda _: None)
    if out is not None and out.resolve() != path.resolve():
        raise InputError(f"--out is {out}; a bundle gets its engines in place. Copy the folder first to keep it as it is")
    _check_of_export(path, options)
    unmade = [target for target in options.targets if target not in COMPILED]
    if unmade:
        raise InputError(
            f"{path} is a bundle already; what is compiled from one is --target {' or '.join(COMPILED)}, not {unmade[0]}"
        )
    options.check()
    compiled = compile_bundle(path, options.targets, options.engines(options.precisions_of(*options.targets)), step)
    return add_compiled(ExportReport(path, []), compiled, start)


def _check_of_export(path: Path, options: ExportOptions) -> None:
    """In place graphs stay as they are: whatever would make others is refused.

    Raises:
        InputError: naming the option.
    """
    of_engines = {"targets", *EngineOptions.__dataclass_fields__}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in of_engines and value is not field.default and value != field.default:
            option = _OPTIONS.get(field.name, field.name.replace("_", "-"))
            raise InputError(f"--{option} belongs to the export of a model; {path} is a bundle: its graphs stay")


def after_export(options: ExportOptions, targets: Sequence[str], forms: set[str]) -> EngineOptions:
    """How engines are built after the export of graphs in these forms.

    Kernels are part of the process that a memory budget is for.
    """
    asked = options.engines(options.precisions_of(*targets))
    asked = dataclasses.replace(asked, workspace=options.workspace or options.memory_budget, overwrite=False)
    if forms == {"streamed"}:  # --tokens and --batch were for the export; the passes are of one size
        return dataclasses.replace(asked, tokens=None, batch=None)
    return asked


def how_to_keep(out: Path, options: ExportOptions, asked: EngineOptions, targets: Sequence[str]) -> str:
    """After an engine that failed: what there is now, and how to keep the graphs next time."""
    state = "is as it was" if out.exists() else "was not written"
    precisions = " ".join(f"--precision {each}" for each in options.precisions or options.precisions_of(*options.targets))
    kept = " ".join(f"--target {each}" for each in dict.fromkeys(("onnx", *options.targets)) if each not in targets)
    engines = " and ".join(f"pom-export {shlex.quote(out.name)} {asked.command(each)}" for each in targets)
    return (
        f"{out.name} {state}. To keep the graphs and try engines again without exporting anew: export with {kept} "
        f"{precisions}, then {engines}"
    )


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
