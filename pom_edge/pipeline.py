"""The steps of pom-export, from a model file to a verified bundle.

    read -> examples -> lower -> graph -> lint -> golden -> gate -> write -> check

Each step either holds or ends the export with one error; the bundle appears at the end, whole, or not at all.
"""

from __future__ import annotations

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

from pom_edge.bundle import Artifact, TensorSpec, check_destination, finish_bundle, is_bundle, write_bundle
from pom_edge.errors import GateError, InputError, require
from pom_edge.exchange import writing_errors
from pom_edge.runtimes.checking import CheckReport, check_session
from pom_edge.runtimes.layers import run_tapped
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

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Axes, Extent
    from pom_edge.export.onnx_graph import Graph
    from pom_edge.subject import Subject

TARGETS = ("onnx",)
PRECISIONS = ("fp32",)
FORMS = ("parallel",)

_ARGUMENTS = {"precisions": "precision", "example": "example_inputs", "targets": "targets"}  # fields -> export_bundle's names

Step = Callable[[str], None]

__all__ = ["ArtifactReport", "ExportOptions", "ExportReport", "export_bundle", "export_file", "load_torch"]


@dataclass(frozen=True)
class ExportOptions:
    """What to make, as on the command line (see ``pom-export --help``)."""

    targets: Sequence[str] = ("onnx",)
    precisions: Sequence[str] = ("fp32",)
    form: str = "parallel"
    tokens: str | int | None = None
    batch: str | int | None = None
    mask: str = "none"
    factory: str | Callable[[], nn.Module] | None = None
    example: str | Mapping[str, Tensor] | None = None
    layout: str | None = None
    degree: int | None = None
    clamp: float | None = None
    unsafe_pickle: bool = False
    snr_db: float | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Refuse what this version does not make.

        Raises:
            InputError: an unknown target, precision or form, with the list of known ones.
        """
        for what, asked, known in (
            ("target", self.targets, TARGETS),
            ("precision", self.precisions, PRECISIONS),
            ("form", [self.form], FORMS),
        ):
            unknown = [value for value in asked if value not in known]
            if unknown or not asked:
                raise InputError(f"unknown {what} {', '.join(map(repr, unknown))}; this version makes: {', '.join(known)}")
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
    return export_subject(subject_from_file(path, options), options, out, step)


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
        return export_subject(subject_from_model(model, made), made, Path(out), progress or (lambda _: None))
    finally:
        for module, training in modes.items():  # traced in eval mode; the caller may be in the middle of a training
            module.training = training


def export_subject(subject: Subject, options: ExportOptions, out: Path, step: Step) -> ExportReport:
    """The steps after reading; see the module's docstring."""
    from pom_edge.export.golden import golden_cases, record, store
    from pom_edge.export.inputs import BATCH, TOKENS, Extent, check_example, plan_axes
    from pom_edge.export.lint import GraphContext, lint
    from pom_edge.export.reference import TorchSession

    start = time.perf_counter()
    batch, tokens = Extent.parse(options.batch, "--batch"), Extent.parse(options.tokens, "--tokens")
    check_example(subject.example)
    axes = plan_axes(subject.example, batch, tokens)

    step("trace and translate")
    graph, mixers, lowered = _graph(subject, axes, {BATCH: batch, TOKENS: tokens})
    step("lint")
    context = GraphContext(graph)
    notes = lint(context)

    step("record PyTorch's answers")
    reference = TorchSession(subject.module, mixers)
    cases, refused = record(golden_cases(subject.example, axes, batch, tokens, subject.samples), reference)
    notes += refused

    gate_db = options.snr_db or GATES_DB["fp32"]
    with write_bundle(out, options.overwrite) as folder:
        file = "parallel.fp32.onnx"
        step("write the graph")
        metadata = {"producer": "pom-edge", "version": _version("pom-edge"), "form": "parallel", "precision": "fp32"}
        config_hash = _hash({"model": subject.info, "mixers": mixers})
        files = _save(graph, folder / file, {**metadata, "config_hash": config_hash})
        step("compare with PyTorch")
        parity = hold_gates(folder / file, graph, cases, reference, lowered, gate_db)
        artifact = _artifact(graph, file, files, batch, tokens, parity, notes)
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
        "parallel",
        "fp32",
        file,
        _bytes(out, files),
        artifact.verified,
        parity,
        len(graph.model.graph),
        run_ms,
        run_inputs,
        memory,
    )
    return ExportReport(out, [report], warnings=subject.warnings, notes=notes, seconds=time.perf_counter() - start)


def _graph(subject: Subject, axes: Axes, extents: dict[str, Extent]) -> tuple[Graph, list[str], nn.Module | None]:
    """The ONNX graph, the module paths of its mixers, and the lowered module (None for an ExportedProgram)."""
    from pom_edge.export.inputs import axis_sizes, make_inputs
    from pom_edge.export.lowering import lower
    from pom_edge.export.onnx_graph import export_graph, export_program
    from pom_edge.recognise import unrecognised

    if subject.program is not None:
        return export_program(subject.program, list(subject.example)), [], None
    lowered, mixers = lower(subject.module)
    if not mixers and (changed := unrecognised(subject.module)):
        reasons = "; ".join(f"{path.removeprefix('layer') or 'it'}: {reason}" for path, reason in changed.items())
        raise InputError(f"the model contains no PoM layer that can be lowered ({reasons})")
    if not mixers:
        raise InputError(
            f"{type(subject.module).__name__} contains no PoM layer; expected at least one (ours, or the published class). "
            "A model without PoM is exported by torch.onnx.export directly"
        )
    # torch.export bakes in lengths of 0 and 1, so the traced lengths are at least 2
    sizes = {axis: max(length, 2) for axis, length in axis_sizes(subject.example, axes).items()}
    inputs = make_inputs(subject.example, axes, sizes, seed=0)
    return export_graph(lowered, mixers, inputs, axes, extents), mixers, lowered


def _save(graph: Graph, path: Path, metadata: dict[str, str]) -> list[str]:
    from pom_edge.export.onnx_graph import check_file, save_graph

    with writing_errors(path):
        files = save_graph(graph.model, path, metadata)
    check_file(path)
    return files


def hold_gates(
    path: Path,
    graph: Graph,
    cases: list[Case],
    reference: Any,
    lowered: nn.Module | None,
    gate_db: float,
) -> dict[str, Any]:
    """Compare every output and every mixer's own output with PyTorch, and prove that the comparison can fail.

    Returns:
        The parity entry of the artifact.

    Raises:
        GateError: a value misses the gate (with the first stage that does), or the gate is vacuous.
    """
    from pom_edge.export.reference import TorchSession

    values = {**{name: name for name in graph.outputs}, **{path: str(v.name) for path, v in graph.taps.items()}}
    found = _run_stage(path, values, cases)
    stages = {"onnx": _against(cases, found)}
    if lowered is not None:
        session = TorchSession(lowered, [name for name in graph.mixers if name])
        stages = {"lowered": _against(cases, [_merged(session.run(case.inputs)) for case in cases]), **stages}
    for stage, metrics in stages.items():
        missed = {name: m for name, m in metrics.items() if not m.passes(gate_db)}
        if missed and all(m.passes(GATES_DB["fp32"]) for m in missed.values()):
            lowest = min(missed.values(), key=lambda m: m.snr_db)
            raise GateError(
                f"--snr {gate_db:g} asks for more than FP32 rounding leaves here: {lowest.snr_db:.1f} dB. The FP32 gate of "
                f"{GATES_DB['fp32']:g} dB holds; give --snr {math.floor(lowest.snr_db)} or less"
            )
        if missed:
            raise GateError(_missed(stage, missed, gate_db, graph.outputs))
    vacuity = prove_gate(cases, reference, graph.mixers, gate_db)
    outputs = worst([stages["onnx"][name] for name in graph.outputs])
    layers = {name: m.snr_db for name, m in stages["onnx"].items() if name not in graph.outputs}
    name = min(layers, key=lambda key: layers[key]) if layers else None
    return {
        "snr_db": round(outputs.snr_db, 2),
        "gate_db": gate_db,
        "snr_db_eager": None,
        "worst_mixer": None if name is None else {"name": name, "snr_db": round(layers[name], 2)},
        "cosine": outputs.cosine,
        "max_rel": outputs.max_rel,
        "nonfinite": outputs.nonfinite,
        "top1": outputs.top1,
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
        taps = [true[key] for key in true if key.split("#")[0] == name] or list(case.outputs.values())
        if not any(np.any(tap) for tap in taps):
            results.append(Vacuity(f"zeroed mixer {name}", None, "its output is zero already"))
            continue
        dead = _merged(reference.run(case.inputs, zeroed=name))
        results.append(Vacuity(f"zeroed mixer {name}", not compare(true, dead, gate_db).passed))
    for each in cases:
        results += prove_not_vacuous(each.outputs, gate_db)
    results = summarise(results)
    missed = [result.test for result in results if result.caught is False]
    if missed:
        raise GateError(
            f"the parity gate of {gate_db:g} dB is vacuous: it does not notice {', '.join(missed)}. "
            "The example inputs do not exercise the model; give real ones with --example"
        )
    return results


def _run_stage(path: Path, values: dict[str, str], cases: list[Case]) -> list[Arrays]:
    try:
        return list(run_tapped(path, values, [case.inputs for case in cases]))
    except Exception as error:  # onnxruntime's own exceptions: the graph does not run at one of the sizes
        tried = "; ".join(case.description for case in cases)
        raise GateError(
            f"the graph does not run at every size ({tried}): {str(error).splitlines()[0]}. If the model fixes its token "
            "count, export with --tokens N"
        ) from error


def _against(cases: list[Case], found: list[Arrays]) -> dict[str, Metrics]:
    """The worst figures of every value over all cases."""
    collected: dict[str, list[Metrics]] = {}
    for case, values in zip(cases, found, strict=True):
        for name, expected in _merged((case.outputs, case.taps)).items():
            collected.setdefault(name, []).append(_measured(name, case, expected, values[name]))
    return {name: worst(metrics) for name, metrics in collected.items()}


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


def _artifact(
    graph: Graph,
    file: str,
    files: list[str],
    batch: Extent,
    tokens: Extent,
    parity: dict[str, Any],
    notes: list[str],
) -> Artifact:
    from pom_edge.export.inputs import BATCH, TOKENS

    bounds = {BATCH: batch, TOKENS: tokens}

    def spec(value: Any) -> TensorSpec:
        shape = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
        limits = {d: (bounds[d].minimum, bounds[d].maximum) for d in shape if d in bounds and bounds[d].maximum}
        return TensorSpec(name=value.name, dtype=str(value.dtype.numpy()), shape=shape, bounds=limits)

    return Artifact(
        target="onnx",
        form="parallel",
        precision="fp32",
        file=file,
        files=files,
        inputs=[spec(value) for value in graph.model.graph.inputs],
        outputs=[spec(value) for value in graph.model.graph.outputs],
        opset=graph.model.opset_imports[""],
        ir_version=graph.model.ir_version,
        census=_census(graph),
        mixers={path: str(value.name) for path, value in graph.taps.items()},
        notes=notes,
        verified="onnxruntime (CPU)",
        parity=parity,
    )


def _census(graph: Graph) -> dict[str, float]:
    """Share of the weights' elements by dtype, read back from the graph."""
    counts: dict[str, int] = {}
    for value in graph.model.graph.initializers.values():
        if value.const_value is not None:
            name = str(value.const_value.dtype.name).lower()
            counts[name] = counts.get(name, 0) + value.const_value.size
    total = sum(counts.values()) or 1
    return {name: round(count / total, 4) for name, count in sorted(counts.items())}


def _check_bundle(folder: Path, step: Step) -> tuple[float, str, dict[str, int] | None]:
    """Open the finished folder as a device would and check it; then time (ms) and measure one run of its largest case.

    The figures go into the report and not into the manifest: they would make two exports of the same model differ.
    """
    with open_session(folder) as session:
        report: CheckReport = check_session(session)
        if not report.passed:
            raise GateError(f"the written bundle does not hold its gate: {report.to_dict()}")
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
