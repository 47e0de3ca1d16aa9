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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pom_edge.budget import OverBudgetError, keep_budget
from pom_edge.bundle import Artifact, check_destination, finish_bundle, is_bundle, write_bundle
from pom_edge.errors import GateError, InputError, PomError, require
from pom_edge.exchange import writing_errors
from pom_edge.runtimes.checking import CheckReport, check_session
from pom_edge.runtimes.memory import measure_peak
from pom_edge.runtimes.parity import (
    GATES_DB,
    MAX_SNR_DB,
    Arrays,
    Metrics,
    Vacuity,
    compare,
    measure,
    prove_not_vacuous,
    summarise,
    worst,
)
from pom_edge.runtimes.session import open_session
from pom_edge.runtimes.stepping import Execute
from pom_edge.system import human_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pom_edge.export.forms import Plan
    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Extent
    from pom_edge.export.made import Made
    from pom_edge.subject import Subject

TARGETS = ("onnx",)
PRECISIONS = ("fp32",)
FORMS = ("parallel", "recurrent", "streamed")

_ARGUMENTS = {"precisions": "precision", "example": "example_inputs", "targets": "targets"}  # fields -> export_bundle's names

MEASURED = "chunk "  # how a note begins that says what was measured here: it would make two exports of one model differ
Step = Callable[[str], None]

__all__ = ["ArtifactReport", "ExportOptions", "ExportReport", "export_bundle", "export_file", "load_torch"]


@dataclass(frozen=True)
class ExportOptions:
    """What to make, as on the command line (see ``pom-export --help``)."""

    targets: Sequence[str] = ("onnx",)
    precisions: Sequence[str] = ("fp32",)
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
    memory_budget: int | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Refuse what this version does not make.

        Raises:
            InputError: an unknown target, precision or form, with the list of known ones.
        """
        for what, asked, known in (
            ("target", self.targets, TARGETS),
            ("precision", self.precisions, PRECISIONS),
            ("form", [self.form or FORMS[0]], FORMS),
        ):
            unknown = [value for value in asked if value not in known]
            if unknown or not asked:
                raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; this version makes: {', '.join(known)}")
        if self.chunk is not None and (self.form != "streamed" or self.chunk < 1):
            raise InputError(f"--chunk is {self.chunk}; expected at least 1, and --form streamed")
        if self.memory_budget is not None and self.tokens is None:
            raise InputError("--memory-budget needs --tokens N: memory is that of a run of some length")
        if self.mask == "frames" and self.form != "recurrent":
            raise InputError("--mask frames is for --form recurrent: each chunk is a frame that sees itself and the past")
        if self.snr_db is not None and not GATES_DB["fp32"] <= self.snr_db <= MAX_SNR_DB:
            raise InputError(
                f"--snr is {self.snr_db:g}; expected {GATES_DB['fp32']:g} to {MAX_SNR_DB:g} dB: the gate can only be raised"
            )


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
    run_ms: float
    run_inputs: str
    memory: dict[str, int] | None


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
    load_torch()
    options.check()
    if path.is_dir() and is_bundle(path):
        raise InputError(f"{path} is a bundle already; this version makes {', '.join(TARGETS)}, which it holds")
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected a model file: .pt, .pth, .ckpt, .safetensors or .pt2")
    out = out or path.with_suffix(".pom")
    check_destination(out, options.overwrite)
    from pom_edge.subject import subject_from_file

    step = progress or (lambda _: None)
    step(f"read {path.name}")
    return export_in_budget(subject_from_file(path, options), options, out, step)


def export_bundle(
    model: nn.Module,
    targets: Sequence[str] | str = ("onnx",),
    precision: str = "fp32",
    *,
    example_inputs: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] = "model.pom",
    progress: Step | None = None,
    **options: Any,
) -> ExportReport:
    """Export a model from Python.

    Args:
        model: a reference model, a PoM layer, or any module that contains PoM layers.
        targets: ``"onnx"``.
        precision: ``"fp32"``.
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
    made = ExportOptions(targets=targets, precisions=(precision,), example=example_inputs, **options)
    made.check()
    check_destination(Path(out), made.overwrite)
    from pom_edge.subject import subject_from_model

    modes = {module: module.training for module in model.modules()}
    try:
        return export_in_budget(subject_from_model(model, made), made, Path(out), progress or (lambda _: None))
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
    """
    if options.memory_budget is None:
        return export_subject(subject, dataclasses.replace(options, form=options.form or FORMS[0]), out, step)
    tried: list[OverBudgetError] = []
    for form in [options.form] if options.form else ["parallel", "streamed"]:
        chunk: int | None = options.chunk
        while True:
            try:
                return export_subject(subject, dataclasses.replace(options, form=form, chunk=chunk), out, step)
            except OverBudgetError as error:
                if options.memory_budget < error.prediction.runtime:
                    raise InputError(
                        f"--memory-budget is {human_bytes(options.memory_budget)}, and the runtime alone takes "
                        f"{human_bytes(error.prediction.runtime)}; no form can keep it"
                    ) from error
                tried.append(error)
                step(str(error))
                chunk = error.smaller(options.memory_budget) if options.chunk is None else None
                if chunk is None:
                    break
            except InputError as error:
                if not tried:
                    raise
                step(f"no {form} form: {error}")  # the next best is to say what the other would take
                break
    least = min(tried, key=lambda error: error.total)
    raise GateError(
        f"no form keeps the budget of {human_bytes(options.memory_budget)}; the smallest is {human_bytes(least.total)}: {least}"
    )


def export_subject(subject: Subject, options: ExportOptions, out: Path, step: Step) -> ExportReport:
    """The steps after reading; see the module's docstring."""
    from pom_edge.export.arena import arena_plan
    from pom_edge.export.golden import record, store
    from pom_edge.export.inputs import Extent, check_example

    start = time.perf_counter()
    batch, tokens = Extent.parse(options.batch, "--batch"), Extent.parse(options.tokens, "--tokens")
    check_example(subject.example)

    step("trace and translate")
    made, notes = _make(subject, options, batch, tokens, step)
    plan = made.plan
    step("lint")
    notes += made.lint()

    if options.memory_budget is not None:
        step("predict its memory")
        notes.append(keep_budget(made, options.memory_budget, tokens.maximum or tokens.minimum, batch.maximum or 1))

    step("record PyTorch's answers")
    cases, refused = record(_cases(subject, made, batch, tokens), plan.reference)
    notes += refused

    gate_db = options.snr_db or GATES_DB["fp32"]
    with write_bundle(out, options.overwrite) as folder:
        step("write the graph")
        metadata = {"producer": "pom-edge", "version": _version("pom-edge"), "form": plan.form, "precision": "fp32"}
        config_hash = _hash({"model": subject.info, "mixers": plan.mixers})
        with writing_errors(folder / made.file):
            files = made.save(folder, {**metadata, "config_hash": config_hash})
        step("compare with PyTorch")
        parity = hold_gates(made, folder, cases, gate_db)
        artifact = Artifact(
            target="onnx",
            form=plan.form,
            precision="fp32",
            file=made.file,
            files=files,
            notes=[note for note in notes if not note.startswith(MEASURED)],
            verified="onnxruntime (CPU)",
            parity=parity,
            **made.fields(),
            arena=[arena_plan(folder / file) for file in files if file.endswith(".onnx")],
        )
        golden, entries = store(cases)
        fields = {
            "name": out.stem,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "producer": f"pom-edge {_version('pom-edge')}",
            "tools": {name: _version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime", "numpy")},
            "model": subject.info,
            "published_layout": subject.published_layout,
            "config_hash": config_hash,
            "class_names": subject.class_names,
            "warnings": subject.warnings,
            "artifacts": [artifact],
            "golden": entries,
        }
        finish_bundle(folder, fields, golden)
        step("check the bundle")
        run_ms, run_inputs, memory = _check_bundle(folder, step)
    report = ArtifactReport(
        "onnx",
        plan.form,
        "fp32",
        made.file,
        _bytes(out, files),
        artifact.verified,
        parity,
        made.nodes,
        run_ms,
        run_inputs,
        memory,
    )
    return ExportReport(out, [report], warnings=subject.warnings, notes=notes, seconds=time.perf_counter() - start)


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
    from pom_edge.export.onnx_graph import Boundary, export_graph, export_pass, export_program
    from pom_edge.export.streamed import Splitter

    if options.form != "streamed":
        plan = _plan(subject, options, batch, tokens)
        if subject.program is not None:
            return Single(plan, export_program(subject.program, list(subject.example)), batch, tokens), []
        if plan.form == "recurrent":
            forms.check_steps(plan)
        extents = {BATCH: batch, TOKENS: tokens}
        graph = export_graph(plan.model, plan.mixers, plan.example, plan.axes, extents, plan.inside)
        return Single(plan, graph, batch, tokens), []
    batch = Extent(1, 1, 1) if options.batch is None else batch
    if not batch.fixed:
        raise InputError(f"--batch is {options.batch!r}; the passes of the streamed form have fixed shapes: give one number")
    plan = dataclasses.replace(_plan(subject, options, batch, Extent()), form="streamed")
    boundary = Boundary(plan.model, [name for name in plan.mixers if name])
    outputs, taps = (list(found) for found in boundary.run(plan.example))
    splitter = Splitter(boundary, plan.example, plan.axes, outputs, taps)
    notes: list[str] = []
    chunk = options.chunk
    if chunk is None:
        step("measure chunk sizes")
        chunk, notes = choose_chunk(splitter)
    step("translate the passes")
    split = splitter.split(chunk)
    graphs = [export_pass(each, split, plan.mixers) for each in split.passes]
    return Passes(plan, split, graphs, chunk, tokens), notes


def _cases(subject: Subject, made: Made, batch: Extent, tokens: Extent) -> list[Case]:
    from pom_edge.export.golden import golden_cases, stream_cases
    from pom_edge.export.inputs import Extent, plan_axes

    plan, samples, chunk = made.plan, subject.samples, made.chunk
    if plan.form == "streamed":  # two whole chunks and a part of one
        return golden_cases(subject.example, plan.axes, batch, tokens, samples, 2 * chunk + chunk // 3 + 1)
    if plan.form == "parallel":
        return golden_cases(subject.example, plan.axes, batch, tokens, samples)
    example = {name: tensor for name, tensor in plan.example.items() if not name.startswith("state.")}
    axes = plan_axes(example, batch, Extent())
    return stream_cases(example, axes, tokens, samples, plan.frame, plan.ragged)


def hold_gates(made: Made, folder: Path, cases: list[Case], gate_db: float) -> dict[str, Any]:
    """Compare every output and every mixer's own output with PyTorch, and prove that the comparison can fail.

    Returns:
        The parity entry of the artifact.

    Raises:
        InputError: the traced model is not the model, so it has no such form.
        GateError: a value misses the gate (with the first stage that does), or the gate is vacuous.
    """
    plan = made.plan
    stages: dict[str, dict[str, Metrics]] = {}
    traced = made.traced()
    if traced is not None:
        stages["lowered"] = _against(cases, plan, traced)
    stages["onnx"] = _against_graph(cases, plan, made.written(folder))
    outputs = list(cases[0].outputs)
    for stage, metrics in stages.items():
        missed = {name: m for name, m in metrics.items() if not m.passes(gate_db)}
        if missed and all(m.passes(GATES_DB["fp32"]) for m in missed.values()):
            lowest = min(missed.values(), key=lambda m: m.snr_db)
            raise GateError(
                f"--snr {gate_db:g} asks for more than FP32 rounding leaves here: {lowest.snr_db:.1f} dB. The FP32 gate of "
                f"{GATES_DB['fp32']:g} dB holds; give --snr {math.floor(lowest.snr_db)} or less"
            )
        if missed and stage == "lowered" and plan.form != "parallel":
            raise InputError(_other_interaction(plan.form, missed))
        if missed:
            raise GateError(_missed(stage, missed, gate_db, outputs))
    vacuity = prove_gate(cases, plan.reference, made.mixers, gate_db)
    found = worst([stages["onnx"][name] for name in outputs])
    layers = {name: m.snr_db for name, m in stages["onnx"].items() if name not in outputs}
    name = min(layers, key=lambda key: layers[key]) if layers else None
    return {
        "snr_db": round(found.snr_db, 2),
        "gate_db": gate_db,
        "snr_db_eager": None,
        "worst_mixer": None if name is None else {"name": name, "snr_db": round(layers[name], 2)},
        "cosine": found.cosine,
        "max_rel": found.max_rel,
        "nonfinite": found.nonfinite,
        "top1": found.top1,
        "stages": {stage: round(worst(list(metrics.values())).snr_db, 2) for stage, metrics in stages.items()},
        "vacuity": [{"test": v.test, "caught": v.caught, "note": v.note} for v in vacuity],
        "passed": True,
    }


def prove_gate(cases: list[Case], reference: Any, mixers: list[str], gate_db: float) -> list[Vacuity]:
    """Zero each mixer in turn, zero and permute the outputs: the gate must notice every one.

    Raises:
        GateError: it does not; the gate would pass a broken model.
    """
    case = min(cases, key=lambda c: c.nbytes)
    true = _merged((case.outputs, case.taps))
    results: list[Vacuity] = []
    for name in mixers:
        taps = [true[key] for key in true if key.split("#")[0] == name]
        if name and not taps:
            results.append(Vacuity(f"zeroed mixer {name}", None, "it does not run for these inputs"))
            continue
        taps = taps or list(case.outputs.values())
        if not any(np.any(tap) for tap in taps):
            results.append(Vacuity(f"zeroed mixer {name}", None, "its output is zero already"))
            continue
        dead = _merged(reference.run(case.inputs, zeroed=name))
        results.append(Vacuity(f"zeroed mixer {name}", not compare(true, dead, gate_db).passed))
    of_outputs = [result for each in cases for result in prove_not_vacuous(each.outputs, gate_db)]
    results = summarise([*results, *of_outputs])
    if not any(result.caught for result in of_outputs):
        raise GateError(
            "PyTorch's own answers are zero, or the same for every token and sample, so no comparison could fail and none "
            "proves "
            "anything. Is the model trained, and does its output depend on its input?"
        )
    missed = [result.test for result in results if result.caught is False]
    if missed:
        raise GateError(
            f"the parity gate of {gate_db:g} dB is vacuous: it does not notice {', '.join(missed)}. "
            "The example inputs do not exercise the model; give real ones with --example"
        )
    return results


def _against_graph(cases: list[Case], plan: Plan, execute: Execute) -> dict[str, Metrics]:
    try:
        return _against(cases, plan, execute)
    except PomError:
        raise
    except Exception as error:  # onnxruntime's own exceptions: the graph does not run at one of the sizes
        tried = "; ".join(case.description for case in cases)
        raise GateError(
            f"the graph does not run at every size ({tried}): {str(error).splitlines()[0]}. If the model fixes its token "
            "count, export with --tokens N"
        ) from error


def _against(cases: list[Case], plan: Plan, execute: Execute) -> dict[str, Metrics]:
    """The worst figures of every value over all cases."""
    collected: dict[str, list[Metrics]] = {}
    for case in cases:
        values = plan.through(execute, case.inputs, case.chunks)
        for name, expected in _merged((case.outputs, case.taps)).items():
            collected.setdefault(name, []).append(_measured(name, case, expected, values[name]))
    return {name: worst(metrics) for name, metrics in collected.items()}


def _other_interaction(form: str, missed: dict[str, Metrics]) -> str:
    name, metrics = next(iter(missed.items()))
    found = f"{metrics.nonfinite} NaN or infinity" if metrics.nonfinite else f"{metrics.snr_db:.1f} dB"
    return (
        f"chunk by chunk the model computes something else ({name}: {found}), so its tokens interact in "
        "another way than through PoM: an attention, a convolution or a mean over tokens, or positions that it counts from 0. "
        f"It has no {form} form; --form parallel exports it as it is"
    )


def _measured(name: str, case: Case, expected: np.ndarray, value: np.ndarray) -> Metrics:
    if expected.shape != value.shape:
        raise GateError(
            f"{name} has shape {value.shape} for {case.description}, PyTorch answers {expected.shape}: a free axis is not "
            "free in this model. Fix it with --tokens N or --batch N"
        )
    return measure(expected, value)


def _merged(pair: tuple[Arrays, Arrays]) -> dict[str, np.ndarray]:
    return {**pair[0], **pair[1]}


def _missed(stage: str, missed: dict[str, Metrics], gate_db: float, outputs: list[str]) -> str:
    listed = ", ".join(
        f"{'output' if name in outputs else 'mixer'} {name} {m.snr_db:.1f} dB"
        + (f" ({m.nonfinite} NaN/Inf)" if m.nonfinite else "")
        for name, m in list(missed.items())[:6]
    )
    what = {"lowered": "the lowered PyTorch model", "onnx": "the ONNX graph in ONNX Runtime"}[stage]
    return f"{what} is not the model: {listed}; the gate is {gate_db:g} dB. First stage that differs: {stage}"


def _check_bundle(folder: Path, step: Step) -> tuple[float, str, dict[str, int] | None]:
    """Open the finished folder as a device would and check it; then time (ms) and measure one run of its largest case.

    The figures go into the report and not into the manifest: they would make two exports of the same model differ.
    """
    with open_session(folder) as session:
        report: CheckReport = check_session(session)
        if not report.passed:
            failed = [f"{name} {m.snr_db:.1f} dB" for name, m in report.artifacts[0].outputs.items()]
            raise GateError(
                f"the written bundle does not hold its gate of {report.artifacts[0].gate_db:g} dB: {', '.join(failed)}"
            )
        case, inputs, _ = max(session.bundle.cases(), key=lambda found: sum(array.nbytes for array in found[1].values()))
        start = time.perf_counter()
        session.run_named(inputs)
        run_ms = round(1e3 * (time.perf_counter() - start), 3)
    step("measure its memory")
    peak = measure_peak(folder, None, inputs)
    return run_ms, case.description, None if peak is None else peak.to_dict()


def _bytes(folder: Path, files: list[str]) -> int:
    return sum((folder / file).stat().st_size for file in files)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
