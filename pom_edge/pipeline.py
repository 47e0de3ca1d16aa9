"""The steps of pom-export, from a model file to a verified bundle.

    read -> examples -> lower -> graph -> lint -> golden -> gate -> write -> check

Each step either holds or ends the export with one error; the bundle appears at the end, whole, or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.budget import OverBudgetError, keep_budget
from pom_edge.building import Builder, Built, read_calibration
from pom_edge.bundle import Artifact, check_destination, finish_bundle, is_bundle, write_bundle
from pom_edge.coreml import build_coreml, check_torch, coreml_options, missing_coreml
from pom_edge.coreml_shapes import shape_notes
from pom_edge.engine_options import COMPILED
from pom_edge.errors import GateError, InputError, require
from pom_edge.gates import hold_metric
from pom_edge.metric import Metric
from pom_edge.options import FORMS, ExportOptions
from pom_edge.outcome import EVALUATED, ArtifactReport, ExportReport, check_artifact
from pom_edge.planning import choose_cases, make_graphs
from pom_edge.progress import Step
from pom_edge.runtimes.memory import SizeError
from pom_edge.system import human_bytes

if TYPE_CHECKING:
    from torch import nn

    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Axes
    from pom_edge.quantize.calibration import Calibration
    from pom_edge.subject import Subject

_ARGUMENTS = {"precisions": "precision", "example": "example_inputs", "targets": "targets"}  # fields -> export_bundle's names

MEASURED = "chunk "  # how a note begins that says what was measured here: it would make two exports of one model differ

__all__ = ["ArtifactReport", "ExportOptions", "ExportReport", "export_bundle", "export_file", "load_torch"]


def load_torch() -> None:
    """Import what an export needs, or say how to install it.

    Raises:
        MissingExtraError: torch, onnx, onnxscript or onnxruntime is not installed.
    """
    for module in ("torch", "onnx", "onnxscript", "onnxruntime"):
        require(module, "export")


def export_file(path: Path, options: ExportOptions, out: Path | None = None, progress: Step | None = None) -> ExportReport:
    """Export a checkpoint file.

    Args:
        path: the model file.
        options: what to make.
        out: the bundle; default ``<stem>.pom`` beside the model.
        progress: called with the name of each step.

    Raises:
        InputError, CheckpointError, BundleError: bad input.
        GateError: the graph breaks a rule, or an artifact is not the model.
    """
    if path.is_dir() and is_bundle(path):
        from pom_edge.engines import compile_file

        return compile_file(path, options, out, progress)
    load_torch()
    options.check()
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected a model file: .pt, .pth, .ckpt, .safetensors or .pt2")
    out = out or path.with_suffix(".pom")
    check_destination(out, options.overwrite)
    from pom_edge.subject import subject_from_file

    step = progress or (lambda _: None)
    step(f"read {path.name}")
    return _with_engines(subject_from_file(path, options), options, out, step)


def _with_engines(subject: Subject, options: ExportOptions, out: Path, step: Step) -> ExportReport:
    """The export, and the targets that are compiled from its artifacts; both in place in one step, or neither."""
    from pom_edge.compiling import compile_bundle
    from pom_edge.engines import add_compiled, after_export, how_to_keep

    targets = [target for target in options.targets if target in COMPILED]
    if not targets:
        return export_in_budget(subject, options, out, step)
    with write_bundle(out, options.overwrite) as folder:
        report = export_in_budget(subject, options, folder / out.resolve().name, step)
        start = time.perf_counter()
        asked = after_export(options, targets, {artifact.form for artifact in report.artifacts})
        try:
            compiled = compile_bundle(report.bundle, targets, asked, step, whole=True)
        except GateError as error:
            raise GateError(f"{error}\n{how_to_keep(out, options, asked, targets)}") from error
        report = add_compiled(report, compiled, start)
        for made in report.bundle.iterdir():
            os.rename(made, folder / made.name)
        report.bundle.rmdir()
    report.bundle = out
    return report


def export_bundle(
    model: nn.Module,
    targets: Sequence[str] | str = ("onnx",),
    precision: Sequence[str] | str | None = None,
    *,
    example_inputs: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] = "model.pom",
    progress: Step | None = None,
    **options: Any,
) -> ExportReport:
    """Export a model from Python.

    Args:
        model: a reference model, a PoM layer, or any module that contains PoM layers.
        targets: ``"onnx"``, ``"coreml"``, ``"trt"``, ``"rtx"``, or several of them.
        precision: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"int8"``, ``"w8"``, ``"w4"``, ``"w8a8"``, for Core ML ``"p8"``,
            ``"p6"``, ``"p4"``, or several of them; by default FP32 for ONNX and FP16 for Core ML and engines. ``"w8a8"``,
            weights and activations, is what ``"int8"`` means for ONNX and engines; for Core ML ``"int8"`` is ``"w8"``,
            weights alone.
        example_inputs: tensors or arrays by the names of ``forward``'s arguments; optional for reference models and layers.
        out: the bundle to write.
        progress: called with the name of each step.
        options: further fields of :class:`ExportOptions` (``tokens``, ``batch``, ``mask``, ``overwrite``, ...).

    Returns:
        The report; ``pom_edge.open_session(report)`` opens the bundle.

    Example:
        >>> report = pom_edge.export_bundle(model, example_inputs={"x": x}, out="model.pom")
    """
    load_torch()
    _check_arguments(model, example_inputs)
    unknown = sorted(set(options) - set(ExportOptions.__dataclass_fields__) | set(options) & _ARGUMENTS.keys())
    if unknown:
        known = sorted(set(ExportOptions.__dataclass_fields__) - _ARGUMENTS.keys())
        instead = [f"{_ARGUMENTS[name]} for {name}" for name in unknown if name in _ARGUMENTS]
        hint = f" (use {', '.join(instead)})" if instead else ""
        raise InputError(f"export_bundle has no option {', '.join(unknown)}{hint}; it takes {', '.join(known)}")
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    precisions = (precision,) if isinstance(precision, str) else tuple(precision or ())
    made = ExportOptions(targets=targets, precisions=precisions, example=example_inputs, **options)
    made.check()
    check_destination(Path(out), made.overwrite)
    from pom_edge.subject import subject_from_model

    modes = {module: module.training for module in model.modules()}
    try:
        step = progress or (lambda _: None)
        return _with_engines(subject_from_model(model, made), made, Path(out), step)
    finally:
        for module, training in modes.items():  # traced in eval mode; the caller may be in the middle of a training
            module.training = training


def _check_arguments(model: Any, example_inputs: Any) -> None:
    """The mistakes that Python lets pass until deep inside.

    Raises:
        InputError: naming what was given.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = "; a file is exported by pom-export, or loaded by pom_edge.load" if isinstance(model, (str, os.PathLike)) else ""
        kind = f"the class {model.__name__}, not an instance" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"export_bundle was given {kind}; expected a torch.nn.Module{hint}")
    if example_inputs is not None and not isinstance(example_inputs, Mapping):
        raise InputError(
            f"example_inputs is a {type(example_inputs).__name__}; expected a dict of tensors by the names of forward's "
            "arguments, "
            'for example {"x": x}'
        )


def export_in_budget(subject: Subject, options: ExportOptions, out: Path, step: Step) -> ExportReport:
    """The form that was asked for; with a memory budget the first form and chunk whose prediction keeps it.

    Raises:
        GateError: none does; names the smallest budget that would.
        InputError: runtime and weights alone take more, in every form; or no form can run so many tokens.
    """
    if options.memory_budget is None:
        return export_subject(subject, dataclasses.replace(options, form=options.form or FORMS[0]), out, step)
    tried: list[OverBudgetError] = []
    refused: list[SizeError] = []
    for form in [options.form] if options.form else ["parallel", "streamed"]:
        chunk: int | None = options.chunk
        while True:
            try:
                return export_subject(subject, dataclasses.replace(options, form=form, chunk=chunk), out, step)
            except OverBudgetError as error:
                if options.memory_budget < error.prediction.runtime:
                    error.prediction.check_possible(options.memory_budget)
                tried.append(error)
                step(str(error))
                chunk = error.smaller(options.memory_budget) if options.chunk is None else None
                if chunk is None:
                    break
            except SizeError as error:  # the other form may take such a run
                refused.append(error)
                if options.form is not None:
                    raise
                step(f"no {form} form: {error}")
                break
            except InputError as error:
                if refused:
                    raise InputError(f"{refused[0]} The streamed form: {error}") from error
                if not tried:
                    raise
                step(f"no {form} form: {error}")  # the next best is to say what the other would take
                break
    if not tried:
        raise refused[-1]
    least = min(tried, key=lambda error: error.total)
    min((error.prediction for error in tried), key=lambda found: found.runtime + found.weights).check_possible(
        options.memory_budget
    )
    raise GateError(
        f"no form keeps the budget of {human_bytes(options.memory_budget)}; the smallest is {human_bytes(least.total)}: {least}"
    )


def export_subject(subject: Subject, options: ExportOptions, out: Path, step: Step) -> ExportReport:
    """The steps after reading; see the module's docstring."""
    from pom_edge.export.golden import record, store
    from pom_edge.export.inputs import Extent, check_example

    start = time.perf_counter()
    missing = missing_coreml(options, out, step)
    coreml_notes = check_torch() if "coreml" in options.targets and not missing else []
    graphs = [target for target in options.targets if target != "coreml"]
    asked, narrow = options, None  # beside graphs, the packages of fixed shapes have a form of their own
    if "coreml" in options.targets and not graphs:
        options = coreml_options(options, subject)
    elif "coreml" in options.targets and not missing:
        narrow = coreml_options(options, subject)
    if "coreml" in asked.targets and not missing:
        coreml_notes += shape_notes(asked, narrow or options, subject)
    metric = None if options.metric is None else Metric.named(options.metric, options.max_drop)
    batch, tokens = Extent.parse(options.batch, "--batch"), Extent.parse(options.tokens, "--tokens")
    if options.form == "streamed" and options.batch is None:
        batch = Extent(1, 1, 1)
    check_example(subject.example)
    calibration = read_calibration(subject, options)
    fixed_calibration = None if narrow is None else read_calibration(subject, narrow)

    step("trace and translate")
    made, notes = make_graphs(subject, options, batch, tokens, step)
    plan = made.plan
    step("lint")
    lint_notes = made.lint()
    notes += [*coreml_notes, *(lint_notes if graphs else [])]

    if options.memory_budget is not None:
        step("predict its memory")
        length = None if options.tokens is None else tokens.maximum or tokens.minimum
        notes.append(keep_budget(made, options.memory_budget, length, batch.maximum or batch.minimum))

    step("record PyTorch's answers")
    cases, refused = record(choose_cases(subject, made, batch, tokens), plan.reference)
    notes += refused

    config_hash = _hash({"model": subject.info, "mixers": plan.mixers})
    metadata = {"producer": "pom-edge", "version": _version("pom-edge"), "config_hash": config_hash}
    metadata |= {name: text for name in ("author", "license") if (text := getattr(options, name))}
    with write_bundle(out, options.overwrite) as folder:
        with tempfile.TemporaryDirectory() as scratch:
            own = options.precisions_of(*graphs) if graphs else ()
            chosen = dataclasses.replace(options, precisions=own)
            builder = Builder(made, cases, folder, Path(scratch), metadata, chosen, metric, calibration, step)
            builder.hold_fp32()
            built = [builder.build(precision) for precision in own]
            if narrow is not None:
                builder, more = _fixed_builder(subject, narrow, folder, Path(scratch), metadata, fixed_calibration, step)
                cases += more
            if "coreml" in options.targets and not missing:
                built += build_coreml(builder, options)
        shared = list(notes)
        notes += [note for each in built for note in each.notes]
        golden, entries = store(cases)
        fields = {
            "name": out.stem,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "producer": f"pom-edge {_version('pom-edge')}",
            "tools": {name: _version(name) for name in _tools(options)},
            "model": subject.info,
            "published_layout": subject.published_layout,
            "config_hash": config_hash,
            "class_names": subject.class_names,
            "warnings": subject.warnings,
            "golden": entries,
        }

        def finish() -> None:
            artifacts = [_artifact(each, folder, _own_notes(each, shared, lint_notes)) for each in built]
            finish_bundle(folder, {**fields, "artifacts": artifacts}, golden)

        finish()
        if metric is not None:
            step("measure the metric")
            for each in built:
                each.parity["metric"] = hold_metric(metric, folder, plan, each.made.file)
            finish()
        step("check the bundle")
        reports = [check_artifact(folder, each, step) for each in built]
    seconds = time.perf_counter() - start
    return ExportReport(out, reports, missing, subject.warnings, notes, seconds)


def _fixed_builder(
    subject: Subject,
    options: ExportOptions,
    folder: Path,
    scratch: Path,
    metadata: dict[str, str],
    calibration: tuple[Calibration, Axes] | None,
    step: Step,
) -> tuple[Builder, list[Case]]:
    """A form of fixed shapes beside one of free shapes, with recorded cases of its own."""
    from pom_edge.export.golden import record
    from pom_edge.export.inputs import Extent

    batch, tokens = Extent.parse(options.batch, "--batch"), Extent.parse(options.tokens, "--tokens")
    step("trace it with fixed shapes")
    made, _ = make_graphs(subject, options, batch, tokens, step)
    cases, _ = record(choose_cases(subject, made, batch, tokens), made.plan.reference)
    for case in cases:
        case.name = f"fixed-{case.name}"
    fixed = scratch / "fixed"
    fixed.mkdir()
    none = dataclasses.replace(options, precisions=())
    builder = Builder(made, cases, folder, fixed, metadata, none, None, calibration, step)
    builder.hold_fp32()
    return builder, cases


def _own_notes(built: Built, notes: list[str], of_graphs: list[str]) -> list[str]:
    """What the manifest says of an artifact: its own notes, and those of the export that are about its kind.

    Rules of ONNX graphs are none of a package's, and the other way round.
    """
    package, notes = built.made.target == "coreml", list(dict.fromkeys([*notes, *built.notes]))
    own = [note for note in notes if note not in of_graphs] if package else [n for n in notes if not n.startswith("coreml")]
    return [note for note in own if not note.startswith(MEASURED)]


def _artifact(built: Built, folder: Path, notes: list[str]) -> Artifact:
    """The manifest's entry."""
    from pom_edge.export.arena import arena_plan
    from pom_edge.export.tensorrt_lint import tensorrt_facts

    made = built.made
    runs = made.target == "onnx" and made.precision != "bf16"  # ONNX Runtime has no BF16 kernels on the CPU
    return Artifact(
        target=made.target,
        form=made.plan.form,
        precision=made.precision,
        remainder=made.remainder,
        file=made.file,
        files=built.files,
        notes=notes,
        verified=built.verified or ("onnxruntime (CPU)" if runs else EVALUATED),
        parity=built.parity,
        ranges=built.ranges,
        quantization=built.quantization,
        **made.fields(),
        tensorrt=tensorrt_facts(made.graphs) if made.target == "onnx" else None,
        arena=[arena_plan(folder / file) if runs else None for file in made.files()],
    )


def _tools(options: ExportOptions) -> tuple[str, ...]:
    return ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", *(["coremltools"] if "coreml" in options.targets else []))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
