"""Artifacts of every precision from one FP32 form, each held against PyTorch before it is kept.

fp32 -> typed (fp16, bf16)      what misses its gate stays in FP32
fp32 -> Q/DQ (int8)             the most sensitive layers go back to float
fp32 -> integer weights         the most costly weights get more bits
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.errors import GateError, InputError
from pom_edge.exchange import writing_errors
from pom_edge.gates import (
    Stage,
    against,
    against_graph,
    form_run,
    hold_stage,
    missed,
    parity_entry,
    prove_gate,
    torch_points,
)
from pom_edge.metric import Metric
from pom_edge.progress import Step
from pom_edge.runtimes.parity import GATES_DB, Arrays, measure
from pom_edge.runtimes.timing import timed

if TYPE_CHECKING:
    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Axes
    from pom_edge.export.made import Made
    from pom_edge.export.onnx_graph import Graph
    from pom_edge.export.packages import Packages
    from pom_edge.export.typed import Facts
    from pom_edge.options import ExportOptions
    from pom_edge.quantize.calibration import Calibration
    from pom_edge.quantize.forms import FormQuantizer, QuantizedForm
    from pom_edge.runtimes.stepping import Execute
    from pom_edge.subject import Subject

HALVES = ("fp16", "bf16")
NO_DATA = (
    "INT8 needs calibration data: inputs as they are in use, a hundred samples or so, and the checkpoint carries none. Save "
    "some (inputs {names}; numpy.savez('calibration.npz', {array})) and give --calibration calibration.npz, a folder of such "
    "files, or module:callable that yields batches. Weights alone need none: --precision w8"
)
EAGER_GATE_DB = 40.0  # the INT8 graph against the quantized model in PyTorch
SPEED_ROUNDS = 9

__all__ = ["Builder", "Built", "UnlikeEagerError", "read_calibration"]


@dataclass
class Built:
    """One artifact on its way into the manifest."""

    made: Any  # a Made, or the Packages of another target
    files: list[str]
    parity: dict[str, Any]
    ranges: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    speedup: float | None = None
    notes: list[str] = field(default_factory=list)
    verified: str = ""  # where it is not the usual


def read_calibration(subject: Subject, options: ExportOptions) -> tuple[Calibration, Axes] | None:
    """The calibration data, read and checked before any work is done; None where nothing asks for it.

    Raises:
        InputError: INT8 is asked for and there is none, or it does not fit the model.
    """
    if not options.calibrated:
        return None
    from pom_edge.export.inputs import Extent, plan_axes
    from pom_edge.quantize import load_calibration

    source, example = options.calibration, subject.example
    if source is None or source == "golden":
        source = subject.samples
        if not source:
            raise InputError(NO_DATA.format(names=", ".join(example), array=f"{next(iter(example))}=batch"))
    tokens = Extent.parse(options.tokens, "--tokens") if options.form in (None, "parallel") else Extent()
    axes = plan_axes(example, Extent(), tokens)
    masks = [name for name in ("mask",) if name in example and subject.info.get("kind") == "encoder"]  # optional there
    data = load_calibration(source, example, axes, masks)
    if source is subject.samples:
        data.source = "the checkpoint's own samples"
    return data, axes


class UnlikeEagerError(GateError):
    """An INT8 file computes something else than the quantized model in PyTorch."""

    def __init__(self, what: str, name: str, snr_db: float) -> None:
        super().__init__(
            f"{what} is not the quantized model of PyTorch: {name} {snr_db:.1f} dB; the gate is {EAGER_GATE_DB:g} dB. "
            "--precision w8 has no INT8 activations"
        )
        self.name, self.snr_db = name.split("#")[0], snr_db


class Builder:
    """Artifacts of several precisions from one FP32 form, each held against PyTorch.

    Args:
        made: in FP32.
        cases: recorded inputs and answers.
        folder: of the bundle in the making.
        scratch: a folder for what is not kept.
        metadata: of every graph.
        metric: of the user's task.
        calibration: data for INT8 and the axes of its inputs, from :func:`read_calibration`.
    """

    def __init__(
        self,
        made: Made,
        cases: list[Case],
        folder: Path,
        scratch: Path,
        metadata: dict[str, str],
        options: ExportOptions,
        metric: Metric | None,
        calibration: tuple[Calibration, Axes] | None,
        step: Step,
    ) -> None:
        self._calibration = calibration
        self._made, self._cases, self._folder = made, cases, folder
        self._metadata, self._options, self._metric, self._step = metadata, options, metric, step
        self._scratch = scratch
        self._fp32_folder = folder if "fp32" in options.precisions else scratch
        self._outputs = list(cases[0].outputs)
        self._fast = made
        self._stages: dict[str, Stage] = {}
        self._dead: dict[str, Arrays] = {}
        self._files: list[str] = []
        self._facts: Facts | None = None

    @property
    def made(self) -> Made:
        """In FP32."""
        return self._made

    @property
    def cases(self) -> list[Case]:
        """Recorded inputs and answers."""
        return self._cases

    @property
    def folder(self) -> Path:
        """Of the bundle in the making."""
        return self._folder

    @property
    def scratch(self) -> Path:
        """For what is not kept."""
        return self._scratch

    @property
    def outputs(self) -> list[str]:
        """Names of the model's outputs."""
        return self._outputs

    @property
    def stages(self) -> dict[str, Stage]:
        """Those that :meth:`hold_fp32` held."""
        return self._stages

    @property
    def step(self) -> Step:
        """Says what is done now."""
        return self._step

    def facts(self) -> Facts:
        """What is known of the values of the FP32 graphs; looked at once."""
        if self._facts is None:
            self._facts = self._look(self._made)
        return self._facts

    def _look(self, base: Made) -> Facts:
        from pom_edge.export.inputs import Extent
        from pom_edge.export.typed import look

        self._step("bound every value")
        return look(base, self._cases, Extent.parse(self._options.tokens, "--tokens").maximum)

    def write(self, packages: Packages) -> list[str]:
        """Write packages of another target into the bundle."""
        with writing_errors(self._folder / packages.file):
            return packages.save(self._folder, {**self._metadata, "form": packages.plan.form, "precision": packages.precision})

    def hold_fp32(self) -> None:
        """The lowered model and the FP32 graph are the model, whatever precision comes after.

        The graph that is written is faster than the one that other precisions are made from, see
        :mod:`pom_edge.export.moments`.
        """
        from pom_edge.export.moments import with_moments

        gate_db = self.gate_db("fp32") if "fp32" in self._options.precisions else GATES_DB["fp32"]
        traced = self._made.traced()
        if traced is not None:
            self._step("compare the lowered model with PyTorch")
            self._stages["lowered"] = against(self._cases, self._made.plan, traced)
            hold_stage("lowered", self._stages["lowered"], gate_db, self._made.plan, self._outputs)
        self._fast = self._made.typed([with_moments(graph) for graph in self._made.graphs], "fp32")
        self._fast.lint()
        self._files = self._save(self._fast, self._fp32_folder)
        self._stages["onnx"] = self._graph_stage(self._fast, self._fp32_folder)
        hold_stage("onnx", self._stages["onnx"], gate_db, self._made.plan, self._outputs)

    def build(self, precision: str) -> Built:
        """One artifact, its gates held.

        Raises:
            GateError: it misses one, whatever is kept in float.
        """
        if precision == "fp32":
            return Built(self._fast, self._files, self.parity(self._stages, precision))
        if precision in HALVES:
            return self._half(self._made, precision, precision)
        built = self._int8() if precision == "int8" else self._weights(precision)
        built.speedup = self._speedup(built.made)
        return built

    def _half(
        self,
        base: Made,
        half: str,
        precision: str,
        finish: Callable[[Graph], Graph] | None = None,
        folder: Path | None = None,
    ) -> Built:
        """``base`` with its floating-point nodes in half precision; mixers below their gate stay in FP32.

        Args:
            base: in FP32, or INT8 with the rest in FP32.
            half: ``"fp16"`` or ``"bf16"``.
            precision: whose gate is held.
            finish: applied to each typed graph.
            folder: where it is written; None: into the bundle.
        """
        from pom_edge.export.typed import typed

        folder = self._folder if folder is None else folder
        facts = self.facts() if base is self._made else self._look(base)
        keep: set[str] = set()
        gate_db = self.gate_db(precision)
        while True:
            made, ranges = typed(base, half, facts, keep)
            if finish is not None:
                for graph in made.graphs:
                    finish(graph)
            files, stage = self._written(made, folder)
            run = made.written(folder, rounded=True)
            rounded = stage if made.precision == "bf16" else against_graph(self._cases, made.plan, run)
            failed = missed(stage, gate_db) or missed(rounded, gate_db)
            if not failed:
                break
            name, stage = ("typed", stage) if missed(stage, gate_db) else ("rounded", rounded)
            mixers = {name: m.snr_db for name, m in stage.items() if name not in self._outputs}
            below = {name.split("#")[0] for name in failed if name in mixers}
            if not below and mixers:  # an output alone misses: the worst mixer is the likeliest cause
                below = {min(set(mixers) - keep or mixers, key=lambda name: mixers[name]).split("#")[0]}
            if not below - keep:
                hold_stage(name, stage, gate_db, made.plan, self._outputs)
            keep |= below
        notes = [f"{made.kind}: {', '.join(sorted(keep))} kept in FP32, below the gate of {gate_db:g} dB"] if keep else []
        stages = {**self._stages, "typed": stage, "rounded": rounded}
        return Built(made, files, self.parity(stages, precision), ranges, notes=notes)

    def _int8(self) -> Built:
        from pom_edge.quantize.quantizer import within

        quantizer, data, alone, kept = self._chosen()
        while True:
            self._step("make the INT8 graph")
            form = quantizer.convert(kept)
            try:
                return self._int8_of(form, data, alone, kept)
            except UnlikeEagerError as error:
                # The layers of what is unlike come first: a value between two integers was rounded the other way there.
                outside = {path: within(path, {error.name}) is None for path in alone if path not in kept}
                left = [path for _, _, path in sorted((outside[path], alone[path], path) for path in outside)]
                if len(left) <= 1:
                    raise
                self._step(f"{left[0]} back to float: {error.name} is at {error.snr_db:.1f} dB of PyTorch's quantized model")
                kept = [*kept, left[0]]

    def _int8_of(self, form: QuantizedForm, data: Calibration, alone: dict[str, float], kept: list[str]) -> Built:
        from pom_edge.quantize.graph import finish

        eager = against(self._cases, self._made.plan, form.eager)
        gate_db = self.gate_db("int8")
        if self._options.remainder == "fp32":
            for graph in form.made.graphs:
                finish(graph)
            files, stage = self._written(form.made)
            built = Built(form.made, files, {})
        else:
            built = self._half(form.made, self._options.remainder, "int8", finish)
            stage = self._graph_stage(built.made, self._folder)
        hold_stage("quantized", stage, gate_db, self._made.plan, self._outputs)
        gated = built.made.remainder == "fp32"
        eager_db = self.hold_eager(built.made.written(self._folder, optimize=False), form.eager, "the INT8 graph", gated)
        built.parity = self.parity({**self._stages, "eager": eager, "quantized": stage}, "int8", eager_db)
        built.quantization = self.quantization(form, data, alone, kept)
        built.notes += [*data.warnings, *form.warnings]
        if kept:
            built.notes.append(f"int8: {', '.join(kept)} kept in float, so that every gate holds")
        return built

    def quantized(self) -> tuple[QuantizedForm, Calibration, dict[str, float], list[str]]:
        """The form in INT8, its data, what each layer costs alone (dB), and those that stay in float."""
        quantizer, data, alone, kept = self._chosen()
        self._step("make the INT8 graph")
        return quantizer.convert(kept), data, alone, kept

    def _chosen(self) -> tuple[FormQuantizer, Calibration, dict[str, float], list[str]]:
        """As :meth:`quantized`, before the form is made."""
        quantizer = self._calibrated()
        assert self._calibration is not None
        alone = quantizer.sensitivity(self._cases[0], self._step)
        return quantizer, self._calibration[0], alone, self._fall_back(quantizer, alone)

    def quantization(self, form: QuantizedForm, data: Calibration, alone: dict[str, float], kept: list[str]) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "calibration": data.source,
            "samples": data.samples,
            "observer": self._options.observer,
            "weights": self._options.int8_weights,
            "kept_float": kept,
            "layers": [
                {
                    "layer": fact.path,
                    "kind": fact.kind,
                    "snr_db": alone[fact.path],
                    "activation_scale": fact.activation_scale,
                    "why": fact.why,
                }
                for fact in form.layers
            ],
        }

    def _calibrated(self) -> FormQuantizer:
        from pom_edge.export.inputs import Extent
        from pom_edge.quantize import Options
        from pom_edge.quantize.forms import FormQuantizer

        assert self._calibration is not None
        data, axes = self._calibration
        self._step(f"calibrate on {data.samples} samples")
        bits: Any = {"8bit": 8, "7bit": 7}[self._options.int8_weights]
        observer: Any = self._options.observer
        options, tokens = Options(method=observer, weight_bits=bits), Extent.parse(self._options.tokens, "--tokens")
        return FormQuantizer(self._made, data, axes, options, tokens)

    def _fall_back(self, quantizer: FormQuantizer, alone: dict[str, float]) -> list[str]:
        """Which layers go back to float, the most sensitive first, until every gate holds."""
        gate_db = self.gate_db("int8")
        ranked = sorted(alone, key=lambda path: alone[path])
        points = None if self._metric is None else torch_points(self._metric, self._made.plan)
        kept: list[str] = []
        while True:
            chosen = [path for path in ranked if path not in kept]
            with quantizer.quantizing(chosen) as run:
                failed = missed(against(self._cases, self._made.plan, run), gate_db)
                drop = 0.0
                if self._metric is not None and points is not None and not failed:
                    drop = points - self._metric.of(form_run(run, self._made.plan, self._outputs))
            if not failed and (self._metric is None or drop <= self._metric.max_drop):
                return kept
            if len(chosen) <= 1:
                why = ", ".join(f"{name} {m.snr_db:.1f} dB" for name, m in failed.items()) or f"the metric drops by {drop:g}"
                raise GateError(f"INT8 misses its gate of {gate_db:g} dB whatever stays in float ({why}); use --precision fp16")
            kept.append(chosen[0])
            self._step(f"{chosen[0]} back to float ({alone[chosen[0]]:.1f} dB alone)")

    def hold_eager(self, exact: Execute, eager: Execute, what: str, gated: bool = True) -> float:
        """The file means what the quantized model in PyTorch computes: its runtime's rewrites left aside.

        Q/DQ graphs are chaotic near 1e-3: a value at the middle between two integers goes one way or the other. So the gate is
        for a file whose rest computes in FP32.

        Args:
            exact: the file, outputs and mixers by name.
            eager: the quantized model in PyTorch.
            what: the file in words.
            gated: whether to hold the gate, beside measuring.

        Returns:
            The lowest SNR in dB of an output or a mixer.

        Raises:
            GateError: below the gate.
        """
        found = []
        for case in self._cases:
            truth, values = (self._made.plan.through(run, case.inputs, case.chunks) for run in (eager, exact))
            found += [(measure(truth[name], values[name]).snr_db, name) for name in (*case.outputs, *case.taps)]
        eager_db, name = min(found)
        if gated and not eager_db >= EAGER_GATE_DB:
            raise UnlikeEagerError(what, name, eager_db)
        return round(eager_db, 2)

    def _weights(self, precision: str) -> Built:
        from pom_edge.quantize.forms import WeightStore

        base, ranges, notes = self._made, None, []
        if self._options.remainder != "fp32":
            half = self._half(base, self._options.remainder, self._options.remainder, folder=self._scratch)
            base, ranges, notes = half.made, half.ranges, half.notes
        store, other, gate_db = WeightStore(base, precision), dict[str, int](), self.gate_db(precision)
        alone: dict[str, float] = {}
        while True:
            made, entries = store.store(other)
            files, stage = self._written(made)
            if not missed(stage, gate_db):
                break
            if not alone:
                with tempfile.TemporaryDirectory() as scratch:
                    alone = store.sensitivity(Path(scratch), self._cases[0], self._step)
            wider = store.more_bits(other, alone)
            if wider is None:
                hold_stage("quantized", stage, gate_db, self._made.plan, self._outputs)
            other = wider or other
        listed = [{**vars(entry), "snr_db_alone": alone.get(entry.name)} for entry in entries]
        floats = [name for name, bits in other.items() if bits == 32]
        if floats:
            notes.append(f"{precision}: {', '.join(floats)} kept in float, so that every gate holds")
        eight = [entry.name for entry in entries if entry.bits == 8]
        if precision == "w4" and eight:
            notes.append(
                f"w4: {len(eight)} of {len(entries)} weights in 8 bits: they do not fill blocks of 32, or cost too much"
            )
        parity = self.parity({**self._stages, "quantized": stage}, precision)
        return Built(made, files, parity, ranges, {"weights": listed, "kept_float": floats}, notes=notes)

    def _speedup(self, made: Made) -> float:
        """Time of the FP32 graph over that of this one, here, for the largest case."""
        case = max(self._cases, key=lambda each: each.nbytes)
        runs = [self._made.written(self._fp32_folder, tapped=False), made.written(self._folder, tapped=False)]
        self._step(f"time {made.kind} beside fp32")
        seconds: list[list[float]] = [[], []]
        for _ in range(SPEED_ROUNDS):
            for run, taken in zip(runs, seconds, strict=True):
                taken.append(timed(functools.partial(made.plan.through, run, case.inputs, case.chunks)))
        return round(statistics.median(seconds[0]) / statistics.median(seconds[1]), 2)

    def gate_db(self, precision: str) -> float:
        """The gate of a precision, raised by --snr."""
        return max(self._options.snr_db or 0.0, GATES_DB[precision])

    def parity(self, stages: dict[str, Stage], precision: str, eager_db: float | None = None) -> dict[str, Any]:
        """The manifest's entry; proves that the gate can fail."""
        gate_db = self.gate_db(precision)
        vacuity = prove_gate(self._cases, self._made.plan.reference, self._made.mixers, gate_db, self._dead)
        return parity_entry(stages, gate_db, self._outputs, vacuity, eager_db)

    def _written(self, made: Made, folder: Path | None = None) -> tuple[list[str], Stage]:
        """Lint, write (into the bundle, unless a folder is given) and run a form's graphs."""
        folder = self._folder if folder is None else folder
        made.lint()
        return self._save(made, folder), self._graph_stage(made, folder)

    def _graph_stage(self, made: Made, folder: Path) -> Stage:
        self._step(f"compare {made.kind} with PyTorch")
        return against_graph(self._cases, made.plan, made.written(folder))

    def _save(self, made: Made, folder: Path) -> list[str]:
        self._step(f"write the graph in {made.kind}")
        with writing_errors(folder / made.file):
            return made.save(folder, {**self._metadata, "form": made.plan.form, "precision": made.kind})
