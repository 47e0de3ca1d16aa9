"""The steps of pom-export, from a model file to a verified bundle.

    read -> examples -> lower -> graph -> lint -> golden -> gate -> write -> check

Each step either holds or ends the export with one error; the bundle appears at the end, whole, or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.budget import OverBudgetError, keep_budget
from pom_edge.building import Builder, Built, read_calibration
from pom_edge.bundle import PALETTES, PRECISIONS, Artifact, check_destination, finish_bundle, is_bundle, write_bundle
from pom_edge.coreml import build_coreml, check_coreml, check_torch, coreml_options, fix_axes, missing_coreml
from pom_edge.errors import GateError, InputError, require
from pom_edge.gates import hold_metric
from pom_edge.metric import Metric
from pom_edge.runtimes.checking import CheckReport, check_session
from pom_edge.runtimes.memory import SizeError, measure_peak
from pom_edge.runtimes.parity import GATES_DB, MAX_SNR_DB
from pom_edge.runtimes.session import open_session
from pom_edge.system import human_bytes, memory_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pom_edge.compiling import Compiled, EngineOptions
    from pom_edge.export.forms import Plan
    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Axes, Extent
    from pom_edge.export.made import Made
    from pom_edge.export.streamed import Split
    from pom_edge.quantize.calibration import Calibration
    from pom_edge.subject import Subject

TARGETS = ("onnx", "coreml", "trt", "rtx")
DEFAULT_PRECISION = {"onnx": "fp32", "coreml": "fp16", "trt": "fp16", "rtx": "fp16"}
REMAINDERS = ("fp32", "fp16")
FORMS = ("parallel", "recurrent", "streamed")
OBSERVERS = ("minmax", "percentile", "mse")
INT8_WEIGHTS = ("8bit", "7bit")

_ARGUMENTS = {"precisions": "precision", "example": "example_inputs", "targets": "targets"}  # fields -> export_bundle's names

MAX_CHUNK = 2**31 - 1
EVALUATED = "evaluated, every operator rounded to BF16; not run"
MEASURED = "chunk "  # how a note begins that says what was measured here: it would make two exports of one model differ
Step = Callable[[str], None]

__all__ = ["ArtifactReport", "ExportOptions", "ExportReport", "export_bundle", "export_file", "load_torch"]


@dataclass(frozen=True)
class ExportOptions:
    """What to make, as on the command line (see ``pom-export --help``)."""

    targets: Sequence[str] = ("onnx",)
    precisions: Sequence[str] = ()  # none: each target's own, see DEFAULT_PRECISION
    form: str | None = None
    tokens: str | int | None = None
    batch: str | int | None = None
    chunk: int | None = None
    mask: str = "none"
    factory: str | Callable[[], nn.Module] | None = None
    example: str | Mapping[str, Tensor] | None = None
    layout: str | None = None
    degree: int | None = None
    clamp: float | None = None
    unsafe_pickle: bool = False
    snr_db: float | None = None
    metric: str | Callable[..., float] | None = None
    max_drop: float | None = None
    calibration: Any = None
    observer: str = "percentile"
    int8_weights: str = "8bit"
    remainder: str = "fp32"
    deployment_target: str = "iOS17"
    stateful: bool = False
    author: str | None = None
    license: str | None = None
    memory_budget: int | None = None
    compute_capability: Sequence[str] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    refit: bool = False
    version_compatible: bool = False
    hardware_compatible: bool = False
    overwrite: bool = False

    def precisions_of(self, *targets: str) -> tuple[str, ...]:
        """What targets are made in: what was asked for, else what each of them has by default."""
        return tuple(dict.fromkeys(self.precisions or [DEFAULT_PRECISION.get(target, "fp32") for target in targets]))

    def check(self) -> None:
        """Refuse what this version does not make.

        Raises:
            InputError: an unknown target, precision or form, with the list of known ones.
        """
        if self.metric is not None:
            Metric.named(self.metric, self.max_drop)  # a typo is told before the work is done
        elif self.max_drop is not None:
            raise InputError("--max-drop needs --metric module:function, whose points may drop")
        for what, asked, known in (
            ("target", self.targets, TARGETS),
            ("precision", self.precisions_of(*self.targets), PRECISIONS),
            ("form", [self.form or FORMS[0]], FORMS),
            ("remainder", [self.remainder], REMAINDERS),
            ("observer", [self.observer], OBSERVERS),
            ("width of INT8 weights", [self.int8_weights], INT8_WEIGHTS),
        ):
            unknown = [value for value in asked if value not in known]
            if unknown or not asked:
                raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; this version makes: {', '.join(known)}")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise InputError(f"--optimization-level is {self.optimization_level}; expected 0 to 5")
        if self.calibration is not None and "int8" not in self.precisions:
            raise InputError("--calibration is for --precision int8; the other precisions need no data")
        if self.remainder != "fp32" and not set(self.precisions) & {"int8", "w8", "w4"}:
            raise InputError("--remainder is what is not INT8 or weights in int8, w8 and w4; ask for one of these precisions")
        if self.chunk is not None and self.form != "streamed":
            raise InputError(f"--chunk {self.chunk} is for --form streamed, found --form {self.form or FORMS[0]}; leave it out")
        if self.chunk is not None and not 1 <= self.chunk <= MAX_CHUNK:
            raise InputError(
                f"--chunk is {self.chunk}; expected 1 to {MAX_CHUNK} tokens, as many as tensors of a graph can have"
            )
        if self.mask == "frames" and self.form != "recurrent":
            raise InputError("--mask frames is for --form recurrent: each chunk is a frame that sees itself and the past")
        if self.stateful and "coreml" not in self.targets:
            raise InputError("--stateful is for --target coreml")
        if (palettes := set(self.precisions) & set(PALETTES)) and set(self.targets) != {"coreml"}:
            raise InputError(
                f"--precision {min(palettes)}, a palette of weights, is for --target coreml alone; others have w8, w4"
            )
        if "coreml" in self.targets:
            check_coreml(self)
        elif "," in str(self.tokens):
            raise InputError(f"--tokens is {self.tokens!r}; a list of lengths is for --target coreml: give N or MIN:OPT:MAX")
        lowest = min(GATES_DB[precision] for precision in self.precisions_of(*self.targets))
        if self.snr_db is not None and not lowest <= self.snr_db <= MAX_SNR_DB:
            raise InputError(f"--snr is {self.snr_db:g}; expected {lowest:g} to {MAX_SNR_DB:g} dB: the gate can only be raised")


@dataclass
class ArtifactReport:
    """One artifact that was made."""

    target: str
    form: str
    precision: str
    file: str
    bytes: int
    verified: str
    parity: dict[str, Any] | None
    nodes: int
    run_ms: float | None
    run_inputs: str
    memory: dict[str, int] | None
    speedup: float | None = None
    runtime: str = ""  # what ran it, and how: exact INT8 sums on processors whose own are not


@dataclass
class ExportReport(os.PathLike[str]):
    """What an export made; usable wherever a path to the bundle is."""

    bundle: Path
    artifacts: list[ArtifactReport]
    missing: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Every artifact held its gates (an export that misses one raises instead)."""
        return bool(self.artifacts)

    def __fspath__(self) -> str:
        return str(self.bundle)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        return {
            "bundle": str(self.bundle),
            "passed": self.passed,
            "artifacts": [vars(artifact) for artifact in self.artifacts],
            "missing": self.missing,
            "warnings": self.warnings,
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
        }


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
    return _with_engines(export_in_budget(subject_from_file(path, options), options, out, step), options, step)


def compile_file(path: Path, options: ExportOptions, out: Path | None = None, progress: Step | None = None) -> ExportReport:
    """Compile the ONNX artifacts of a bundle, in place; needs neither torch nor onnx.

    Raises:
        InputError: options that belong to an export, or an artifact that the bundle does not hold.
        GateError: the target does not take the graph, or what was built is not the model.
    """
    from pom_edge.compiling import COMPILED, compile_bundle

    options.check()
    start, step = time.perf_counter(), progress or (lambda _: None)
    if out is not None and out.resolve() != path.resolve():
        raise InputError(f"--out is {out}; a bundle gets its engines in place. Copy the folder first to keep it as it is")
    of_model = ("factory", "example", "layout", "degree", "clamp", "author", "license")
    of_export = (*of_model, "calibration", "metric", "memory_budget", "chunk")
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
    compiled = compile_bundle(path, options.targets, _engine_options(options, options.precisions_of(*options.targets)), step)
    return _add_compiled(ExportReport(path, []), compiled, start)


def _with_engines(report: ExportReport, options: ExportOptions, step: Step) -> ExportReport:
    """The targets that are compiled from the artifacts of a finished bundle."""
    from pom_edge.compiling import COMPILED, compile_bundle

    targets = [target for target in options.targets if target in COMPILED]
    if not targets:
        return report
    start = time.perf_counter()
    asked = options.precisions_of(*targets)
    others = tuple(precision for precision in asked if precision != "fp32")
    precisions = (others or asked) if "onnx" in options.targets else asked  # FP32 beside others is for ONNX Runtime
    return _add_compiled(report, compile_bundle(report.bundle, targets, _engine_options(options, precisions), step), start)


def _engine_options(options: ExportOptions, precisions: Sequence[str]) -> EngineOptions:
    from pom_edge.compiling import EngineOptions

    names = set(EngineOptions.__dataclass_fields__) - {"precisions"}
    return EngineOptions(tuple(precisions), **{name: getattr(options, name) for name in names})


def _add_compiled(report: ExportReport, compiled: Compiled, start: float) -> ExportReport:
    for artifact in compiled.artifacts:
        sizes = _bytes(report.bundle, artifact.files)
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
        precision: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"int8"``, ``"w8"``, ``"w4"``, for Core ML ``"p8"``, ``"p6"``, ``"p4"``,
            or several of them; by default FP32 for ONNX and FP16 for Core ML and engines.
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
        return _with_engines(export_in_budget(subject_from_model(model, made), made, Path(out), step), made, step)
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
    missing = missing_coreml(options, out)
    torch_notes = check_torch() if "coreml" in options.targets and not missing else []
    graphs = [target for target in options.targets if target != "coreml"]
    narrow = None  # beside graphs, the packages of fixed shapes have a form of their own
    if "coreml" in options.targets and not graphs:
        options = coreml_options(options, subject)
    elif "coreml" in options.targets and not missing:
        narrow = coreml_options(options, subject)
    metric = None if options.metric is None else Metric.named(options.metric, options.max_drop)
    batch, tokens = Extent.parse(options.batch, "--batch"), Extent.parse(options.tokens, "--tokens")
    if options.form == "streamed" and options.batch is None:
        batch = Extent(1, 1, 1)
    check_example(subject.example)
    calibration = read_calibration(subject, options)
    fixed_calibration = None if narrow is None else read_calibration(subject, narrow)

    step("trace and translate")
    made, notes = _make(subject, options, batch, tokens, step)
    plan = made.plan
    step("lint")
    notes += [*torch_notes, *made.lint()]

    if options.memory_budget is not None:
        step("predict its memory")
        length = None if options.tokens is None else tokens.maximum or tokens.minimum
        notes.append(keep_budget(made, options.memory_budget, length, batch.maximum or batch.minimum))

    step("record PyTorch's answers")
    cases, refused = record(_cases(subject, made, batch, tokens), plan.reference)
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
            artifacts = [_artifact(each, folder, [note for note in notes if not note.startswith(MEASURED)]) for each in built]
            finish_bundle(folder, {**fields, "artifacts": artifacts}, golden)

        finish()
        if metric is not None:
            step("measure the metric")
            for each in built:
                each.parity["metric"] = hold_metric(metric, folder, plan, each.made.file)
            finish()
        step("check the bundle")
        reports = [_check_artifact(folder, each, step) for each in built]
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
    made, _ = _make(subject, options, batch, tokens, step)
    cases, _ = record(_cases(subject, made, batch, tokens), made.plan.reference)
    for case in cases:
        case.name = f"fixed-{case.name}"
    fixed = scratch / "fixed"
    fixed.mkdir()
    none = dataclasses.replace(options, precisions=())
    builder = Builder(made, cases, folder, fixed, metadata, none, None, calibration, step)
    builder.hold_fp32()
    return builder, cases


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


def _plan(subject: Subject, options: ExportOptions, batch: Extent, tokens: Extent) -> Plan:
    """The model in the form that was asked for.

    Raises:
        InputError: it has no such form, or no PoM layer.
    """
    from pom_edge.export import forms
    from pom_edge.recognise import unrecognised

    if subject.program is not None:
        if options.form != "parallel":
            raise InputError(f"a .pt2 is exported as it is, in the parallel form; --form {options.form} needs the model itself")
        return forms.program(subject.module, subject.example, batch, tokens)
    if options.form == "recurrent":
        frames, ragged = options.mask == "frames", options.mask == "padding"
        plan = forms.recurrent(subject.module, subject.example, batch, tokens, frames, ragged)
    elif options.form == "streamed":
        plan = forms.streamed(subject.module, subject.example, batch)
    else:
        plan = forms.parallel(subject.module, subject.example, batch, tokens)
    if not plan.mixers and (changed := unrecognised(subject.module)):
        reasons = "; ".join(f"{path.removeprefix('layer') or 'it'}: {reason}" for path, reason in changed.items())
        raise InputError(f"the model contains no PoM layer that can be lowered ({reasons})")
    if not plan.mixers:
        raise InputError(
            f"{type(subject.module).__name__} contains no PoM layer; expected at least one (ours, or the published class). "
            "A model without PoM is exported by torch.onnx.export directly"
        )
    return plan


def _make(subject: Subject, options: ExportOptions, batch: Extent, tokens: Extent, step: Step) -> tuple[Made, list[str]]:
    """The graphs, and notes about how they were chosen."""
    from pom_edge.export import forms
    from pom_edge.export.inputs import BATCH, TOKENS, Extent
    from pom_edge.export.made import Passes, Single, choose_chunk
    from pom_edge.export.onnx_graph import Boundary, trace_graph, trace_pass, traced_program
    from pom_edge.export.streamed import Splitter

    if options.form != "streamed":
        plan = _plan(subject, options, batch, tokens)
        _check_tokens(plan, options, tokens)
        if subject.program is not None:
            return Single(plan, traced_program(subject.program, list(subject.example)), batch, tokens), []
        if set(options.targets) == {"coreml"}:
            fix_axes(plan, subject.example)
        if plan.form == "recurrent":
            forms.check_steps(plan)
        extents = {BATCH: batch, TOKENS: tokens}
        traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes, extents, plan.inside)
        return Single(plan, traced, batch, tokens), []
    if not batch.fixed:
        raise InputError(f"--batch is {options.batch!r}; the passes of the streamed form have fixed shapes: give one number")
    plan = _plan(subject, options, batch, Extent())
    _check_tokens(plan, options, tokens)
    longest = plan.tokens or tokens.maximum
    if options.chunk is not None and longest is not None and options.chunk > longest:
        source = "the model's own number" if plan.tokens else f"--tokens {options.tokens}"
        raise InputError(
            f"--chunk is {options.chunk}, and there are {longest} tokens at most ({source}): the rest of every chunk would be "
            f"padding; give --chunk {longest} or less"
        )
    boundary = Boundary(plan.model, [name for name in plan.mixers if name])
    outputs, taps = boundary.names(plan.example)
    if plan.image is not None and plan.image.pixels:  # what the passes give is not yet the model's output
        outputs = list(plan.image.pixels)
    try:
        splitter = Splitter(boundary, plan.example, plan.axes, outputs, taps)
    except InputError as error:
        if forms.is_causal(plan):
            raise InputError(
                f"{type(subject.module).__name__} is causal: each token sees those before it alone. Give --form recurrent, the "
                f"form of such models; the streamed form is for models whose tokens see all others (found: {error})"
            ) from error
        raise
    notes: list[str] = []
    chunk = options.chunk
    if chunk is None:
        step("measure chunk sizes")
        chunk, notes = choose_chunk(splitter, longest)
    step("translate the passes")
    split = splitter.split(chunk)
    _check_room(split, chunk)
    traced_passes = [trace_pass(each, split, plan.mixers) for each in split.passes]
    return Passes(plan, split, traced_passes, chunk, tokens), notes


def _check_tokens(plan: Plan, options: ExportOptions, tokens: Extent) -> None:
    """Refuse --tokens that say something else than the model's inputs, or that are missing.

    Raises:
        SizeError: the model has another number of tokens.
        InputError: images of any size: --tokens would bound nothing; or a budget without a length to keep it at.
    """
    from pom_edge.export.inputs import TOKENS

    free = plan.tokens is None and any(TOKENS in dims for dims in plan.axes.values())
    if free and options.memory_budget is not None and options.tokens is None and plan.mixers:  # a .pt2 has its own shapes
        raise InputError("--memory-budget needs --tokens N: memory is that of a run of some length")
    if plan.tokens is not None and not tokens.admits(plan.tokens):
        shapes = ", ".join(f"{name} {tuple(tensor.shape[1:])}" for name, tensor in plan.example.items())
        raise SizeError(
            f"--tokens is {options.tokens}; in the {plan.form} form this model has {plan.tokens} tokens (inputs of one size: "
            f"{shapes}). Leave --tokens out, or give an --example of another size where the model takes it."
        )
    if plan.image is not None and plan.tokens is None and options.tokens is not None and options.memory_budget is None:
        raise InputError("--tokens bounds sequences; this model takes images of any size in the streamed form: leave it out")


def _check_room(split: Split, chunk: int) -> None:
    """Refuse a chunk that is too large for this machine, before memory is asked for.

    Raises:
        InputError: the widest value of one chunk takes half of the memory there is.
    """
    sizes = {name: math.prod(split.shapes[name]) * split.dtypes[name].itemsize for name in split.token_axes}
    widest, memory = max(sizes.values(), default=0), memory_bytes()
    if memory is not None and widest > memory[1] // 2:
        raise InputError(
            f"--chunk is {chunk}: one value of so many tokens takes {human_bytes(widest)}, and {human_bytes(memory[1])} of "
            "memory are available; give a smaller one, for example 1024"
        )


def _cases(subject: Subject, made: Made, batch: Extent, tokens: Extent) -> list[Case]:
    from pom_edge.export.golden import golden_cases, image_sizes, stream_cases
    from pom_edge.export.inputs import Extent, plan_axes

    plan, samples, chunk = made.plan, subject.samples, made.chunk
    if plan.image is not None:
        sizes = image_sizes(subject.example, plan.image_axes, plan.image.patch, chunk)
        return golden_cases(subject.example, plan.image_axes, batch, tokens, samples, sizes=sizes)
    if plan.form == "streamed":  # two whole chunks and a part of one
        return golden_cases(subject.example, plan.axes, batch, tokens, samples, 2 * chunk + chunk // 3 + 1)
    if plan.form == "parallel":
        return golden_cases(subject.example, plan.axes, batch, tokens, samples)
    example = {name: tensor for name, tensor in plan.example.items() if not name.startswith("state.")}
    axes = plan_axes(example, batch, Extent())
    return stream_cases(example, axes, tokens, samples, plan.frame, plan.ragged)


def _check_artifact(folder: Path, built: Built, step: Step) -> ArtifactReport:
    """Open the finished folder as a device would and check it; then time (ms) and measure one run of its largest case.

    The figures go into the report and not into the manifest: they would make two exports of the same model differ.
    """
    made = built.made
    with open_session(folder, artifact=made.file) as session:
        report: CheckReport = check_session(session)
        if not report.passed:
            failed = [f"{name} {m.snr_db:.1f} dB" for name, m in report.artifacts[0].outputs.items()]
            raise GateError(
                f"the written bundle does not hold its gate of {report.artifacts[0].gate_db:g} dB: {', '.join(failed)}"
            )
        verified = session.artifact.verified
        fitting = [found for found in session.bundle.cases() if found[0].name in report.artifacts[0].cases]
        case, inputs, _ = max(fitting, key=lambda found: sum(array.nbytes for array in found[1].values()))
        start = time.perf_counter()
        session.run_named(inputs)
        run_ms = round(1e3 * (time.perf_counter() - start), 3)
    if made.target != "onnx" or verified == EVALUATED:
        timed, peak = None, None  # those of the evaluator are not the artifact's
    else:
        step("measure its memory")
        timed, peak = run_ms, measure_peak(folder, made.file, inputs)
    return ArtifactReport(
        made.target,
        made.plan.form,
        made.precision,
        made.file,
        _bytes(folder, built.files),
        verified,
        built.parity,
        made.nodes,
        timed,
        case.description,
        None if peak is None else peak.to_dict(),
        built.speedup,
        session.runtime,
    )


def _tools(options: ExportOptions) -> tuple[str, ...]:
    return ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", *(["coremltools"] if "coreml" in options.targets else []))


def _bytes(folder: Path, files: list[str]) -> int:
    return sum((folder / file).stat().st_size for file in files)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
