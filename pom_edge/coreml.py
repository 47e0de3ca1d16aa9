"""The Core ML target: which shapes it fixes, and its artifacts, each held against PyTorch by evaluating the saved package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.building import Builder, Built
from pom_edge.coreml_shapes import own_batch
from pom_edge.errors import BrokenExtraError, InputError, MissingExtraError
from pom_edge.extent import Extent
from pom_edge.gates import Stage, against, against_graph, hold_stage, missed
from pom_edge.manifest import PALETTES
from pom_edge.progress import Step
from pom_edge.runtimes.coreml_library import OLDEST_TORCH, TESTED_TORCH, load_coremltools
from pom_edge.runtimes.coreml_session import EVALUATED

if TYPE_CHECKING:
    from pom_edge.export.forms import Plan
    from pom_edge.export.onnx_graph import Traced
    from pom_edge.export.packages import Islands, Packages
    from pom_edge.options import ExportOptions
    from pom_edge.quantize.forms import QuantizedForm
    from pom_edge.subject import Subject

INSTALL = "pip install 'pom-edge[coreml]'"
CHUNK = 1024  # of the streamed form: what is fastest on ONNX Runtime here says nothing about a phone
DEFAULT_TARGET = "iOS17"  # the oldest with INT8 activations
MAX_LISTED = 128  # enumerated shapes of a model (Apple's documentation)
IOS = {"iOS16": 16, "iOS17": 17, "iOS18": 18, "macOS13": 16, "macOS14": 17, "macOS15": 18}
SLOW_INT8 = (
    "coreml w8a8: activations in INT8 have run many times slower than floats on some devices (coremltools#2410); time it "
    "beside --precision w8"
)
ONE_ROW = "coreml w8a8: no activation is INT8, for a product of one row gains nothing by it: weights alone are, as in w8"
WEIGHTS_ALONE = (
    "coreml: --precision int8 is w8 here, weights alone with a scale for each channel; --precision w8a8 quantizes the "
    "activations too (from iOS17)"
)
STEP_TOKENS = 1  # of the recurrent form: one token at a time takes a stream of any length

__all__ = ["build_coreml", "check_coreml", "check_torch", "coreml_options", "fix_axes", "missing_coreml"]


def known_target(options: ExportOptions) -> str:
    """``--minimum-deployment-target``, written in any case, as a key of :data:`IOS`.

    Raises:
        InputError: an unknown one.
    """
    asked = options.deployment_target or DEFAULT_TARGET
    found = next((target for target in IOS if target.lower() == asked.lower()), None)
    if found is None:
        raise InputError(f"--minimum-deployment-target is {asked!r}; expected one of {', '.join(IOS)}")
    return found


def check_coreml(options: ExportOptions) -> None:
    """Refuse what Core ML does not have.

    Raises:
        InputError: BF16, an unknown deployment target, or one too old for what is asked for.
    """
    ios, precisions = IOS[known_target(options)], options.precisions_of("coreml")
    if "bf16" in precisions:
        raise InputError("Core ML has no BF16; use --precision fp16, its own default, or fp32")
    for precision, oldest in (("w8a8", 17), ("w4", 18)):
        if precision in precisions and ios < oldest:
            raise InputError(
                f"--precision {precision} needs iOS{oldest} or macOS{oldest - 3} on Core ML; give --minimum-deployment-target "
                f"iOS{oldest}"
            )
    if options.stateful and (against := _against_stateful(options)):
        raise InputError(
            f"--stateful does not go with {'; nor with '.join(against)}. Without --stateful the state goes in and out as FP32 "
            "tensors, from iOS16 on"
        )
    if options.memory_budget is not None:
        raise InputError("--memory-budget is for ONNX Runtime, whose memory can be predicted; Core ML's cannot: leave it out")
    if options.remainder != "fp32" and set(options.targets) == {"coreml"}:
        raise InputError(
            f"--remainder {options.remainder} is for the other targets: on Core ML what is not INT8 computes in FP16, with "
            "islands of FP32; leave it out"
        )
    _check_lengths(options)


def _against_stateful(options: ExportOptions) -> list[str]:
    """Each thing asked for that a package with a state of its own cannot be, and what it can."""
    target, tokens, batch = known_target(options), str(options.tokens), options.batch
    asked = target if options.deployment_target is not None else f"{target}, the default"
    conditions = (
        (options.form != "recurrent", f"--form {options.form or 'parallel'}, which has no state: give --form recurrent"),
        (IOS[target] < 18, f"--minimum-deployment-target {asked}: give iOS18 or macOS15"),
        ("w8a8" in options.precisions_of("coreml"), "--precision w8a8: give fp16, fp32 or w8"),
        ("," in tokens, f"--tokens {tokens}, a list of lengths: give one number"),
        (batch is not None and not Extent.parse(batch, "--batch").fixed, f"--batch {batch}, a range: give one number"),
    )
    return [text for found, text in conditions if found]


def _check_lengths(options: ExportOptions) -> None:
    text = str(options.tokens)
    if ":" in text and options.form == "recurrent":
        raise InputError(
            f"--tokens is {text!r}; a chunk of the recurrent form has one length on Core ML, or a list of them: give N, or N,M"
        )
    listed = Extent.parse(options.tokens, "--tokens").lengths
    if len(listed) > MAX_LISTED:
        raise InputError(f"--tokens lists {len(listed)} lengths; Core ML takes {MAX_LISTED}")
    if listed and not Extent.parse(options.batch or 1, "--batch").fixed:
        raise InputError(
            f"--tokens is {text!r}, a list of lengths, which does not go with a range of --batch; found --batch "
            f"{options.batch}: give N, or leave it out"
        )
    if listed and options.form == "streamed":
        raise InputError(f"--tokens is {text!r}; the passes of the streamed form take any length: give MIN:OPT:MAX, or nothing")
    if listed and set(options.targets) != {"coreml"}:
        raise InputError(f"--tokens is {text!r}; only --target coreml takes a list of lengths: export it alone, or give N")


def missing_coreml(options: ExportOptions, out: Path, step: Step) -> list[dict[str, str]]:
    """What the report says where coremltools is not installed, or cannot be imported.

    Raises:
        MissingExtraError: nothing else was asked for.
    """
    if "coreml" not in options.targets:
        return []
    alone, again = set(options.targets) == {"coreml"}, f"then export {out.name} again"
    if find_spec("coremltools") is None:
        if alone:
            raise MissingExtraError(f"coremltools is not installed, and --target coreml needs it. Run: {INSTALL}")
        return [{"target": "coreml", "reason": "coremltools is not installed", "run": f"{INSTALL}, {again}"}]
    step("load coremltools")  # here, so that a broken one is told before minutes of work
    try:
        load_coremltools()
    except BrokenExtraError as error:
        if alone:
            raise
        return [{"target": "coreml", "reason": error.reason, "run": f"{error.install}, {again}"}]
    return []


def check_torch() -> list[str]:
    """A note where this torch is not the tested one.

    Raises:
        InputError: it is too old.
    """
    import torch

    found = torch.__version__
    version = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    oldest, tested = (".".join(map(str, each)) for each in (OLDEST_TORCH, TESTED_TORCH))
    if version < OLDEST_TORCH:
        raise InputError(
            f"torch {found} is too old for --target coreml: {oldest} is the oldest, {tested} is tested. Run: pip install "
            "--upgrade 'pom-edge[export,coreml]'"
        )
    if version == TESTED_TORCH:
        return []
    return [
        f"coreml: torch {found} is not tested with coremltools, {tested} is; what was converted is evaluated beside PyTorch"
    ]


def coreml_options(options: ExportOptions, subject: Subject) -> ExportOptions:
    """Shapes as the Neural Engine takes them: one sequence, and one token count unless lengths were given.

    Raises:
        InputError: several inputs of listed lengths for a target that takes one.
    """
    from pom_edge.export.inputs import TOKENS, axis_sizes, plan_axes

    example = subject.example
    changes: dict[str, Any] = {
        "batch": options.batch or own_batch(subject),
        "targets": ("coreml",),
        "deployment_target": known_target(options),
    }
    if "," in str(options.tokens):
        changing = [name for name, dims in plan_axes(dict(example), Extent(1, 1, 1), Extent()).items() if TOKENS in dims]
        if len(changing) > 1 and IOS[known_target(options)] < 18:
            raise InputError(
                f"--tokens is {options.tokens!r}, and {', '.join(changing)} have these lengths together, which needs iOS18 or "
                "macOS15: give --minimum-deployment-target iOS18, or one number"
            )
    if options.form == "streamed":
        if options.chunk is None:
            changes["chunk"] = min(CHUNK, Extent.parse(options.tokens, "--tokens").maximum or CHUNK)
    elif options.tokens is None and (
        length := axis_sizes(dict(example), plan_axes(dict(example), Extent(), Extent())).get(TOKENS)
    ):
        changes["tokens"] = STEP_TOKENS if options.form == "recurrent" else length
    return dataclasses.replace(options, **changes)


def fix_axes(plan: Plan, example: Mapping[str, Any]) -> None:
    """Fix what neither --batch nor --tokens names, the length of a context: as long as the example's. Changes the plan."""
    from pom_edge.export.inputs import BATCH, TOKENS, axis_sizes, make_inputs

    own = {name: dims for name, dims in plan.axes.items() if name in example}
    lengths, sizes = axis_sizes(dict(example), own), axis_sizes(plan.example, plan.axes)
    if not set(lengths) - {BATCH, TOKENS}:
        return
    for dims in plan.axes.values():
        dims[:] = [lengths[dim] if isinstance(dim, str) and dim not in (BATCH, TOKENS) else dim for dim in dims]
    plan.example = make_inputs(plan.example, plan.axes, sizes, seed=0)


def build_coreml(builder: Builder, options: ExportOptions) -> list[Built]:
    """The artifacts of every precision that was asked for.

    Raises:
        GateError: one misses its gate, whatever stays in FP32.
    """
    return [_CoreML(builder, options, precision).build() for precision in options.precisions_of("coreml")]


class _CoreML:
    """One artifact on its way."""

    def __init__(self, builder: Builder, options: ExportOptions, precision: str) -> None:
        self._builder, self._options, self._precision = builder, options, precision
        self._made, self._cases = builder.made, builder.cases
        self._gate_db = builder.gate_db(precision)
        self._target = known_target(options)
        self._weights_only = precision in ("w8", "w4", *PALETTES)

    def build(self) -> Built:
        keep: set[str] = set()
        form = quantization = exact = eager = None
        if self._precision == "w8a8":
            form, data, alone, floats = self._builder.quantized()
            quantization = self._builder.quantization(form, data, alone, floats)
        ranges: dict[str, Any] | None = None
        while True:
            islands = None
            if self._precision != "fp32":
                islands, ranges = self._islands(keep)
            packages, files, stage = self._convert(islands, None if form is None else form.made.traced_graphs)
            failed = missed(stage, self._gate_db)
            if not failed or self._weights_only:
                break
            mixers = {name.split("#")[0] for name in stage if name not in self._builder.outputs}
            below = {name.split("#")[0] for name in failed} & mixers
            if not below:  # an output alone misses: the worst mixer is the likeliest cause
                left = {name: stage[name].snr_db for name in stage if name.split("#")[0] in mixers - keep}
                below = {min(left, key=lambda name: left[name]).split("#")[0]} if left else set()
            if self._precision == "fp32" or not below - keep:
                hold_stage("coreml", stage, self._gate_db, self._made.plan, self._builder.outputs)
            keep |= below
        notes = [f"coreml {self._precision}: {', '.join(sorted(keep))} kept in FP32, for the gate"] if keep else []
        if failed:
            kept, stage = self._with_floats(packages)
            notes = [f"coreml {self._precision}: {', '.join(kept)} kept with float weights, for the gate"]
        if self._precision == "w8" and "int8" in self._options.precisions:
            notes = [WEIGHTS_ALONE, *notes]
        notes += [f"coreml {self._precision}: coremltools says: {text}" for text in packages.warnings]
        if ranges is not None:
            ranges["half_share"] = packages.half_share
        stages = dict(self._builder.stages)
        if form is not None:
            notes += [f"coreml w8a8: {text}" for text in (*data.warnings, *form.warnings)]
            notes += [f"coreml w8a8: {', '.join(floats)} kept in float, so that every gate holds"] if floats else []
            notes.append(SLOW_INT8 if "quantize" in packages.operators() else ONE_ROW)
            stages["eager"] = against(self._cases, self._made.plan, form.eager)
            exact, eager = self._beside_eager(packages, form)
        parity = self._builder.parity({**stages, "coreml": stage}, self._precision, eager)
        parity["operators"] = packages.operators()
        if form is not None:
            parity["snr_db_eager_fp32"] = exact
        return Built(packages, files, parity, ranges, quantization, notes=notes, verified=EVALUATED)

    def _beside_eager(self, packages: Packages, form: QuantizedForm) -> tuple[float, float]:
        """SNR against the quantized model of PyTorch: of the program with FP32 between its integers, and of the package.

        The gate is held on the first: the conversion means what PyTorch computes. The second is a figure, for FP16 between the
        integers sends values halfway between two of them either way.
        """
        from pom_edge.export.packages import Packages

        step, scratch = self._builder.step, self._builder.scratch
        step("convert to Core ML in w8a8 and FP32, and compare with the quantized model")
        exact = Packages(self._made, self._precision, None, self._target, form.made.traced_graphs)
        exact.save(scratch, {})
        held = self._builder.hold_eager(exact.written(scratch), form.eager, "the Core ML program")
        run = packages.written(self._builder.folder)
        return held, self._builder.hold_eager(run, form.eager, "the package", gated=False)

    def _with_floats(self, packages: Packages) -> tuple[list[str], Stage]:
        """Some weights back to floats, for the gate, and written; which, and what was evaluated."""
        from pom_edge.coreml_choice import Exchange, choose
        from pom_edge.export.coreml_weights import weight_label

        weights, scratch, integers = packages.weights, self._builder.scratch, packages.programs
        packages.store(keep=None)
        packages.save(scratch, {})
        run = packages.executing(packages.programs)
        kept = choose(
            Exchange(packages.programs, integers, weights),
            lambda: against_graph(self._cases, packages.plan, run),
            self._gate_db,
            self._precision,
            self._builder.step,
        )
        packages.store(kept)
        _, stage = self._written(packages)
        hold_stage("coreml", stage, self._gate_db, self._made.plan, self._builder.outputs)
        return sorted(weight_label(name, weights[name]) for name in kept), stage

    def _islands(self, keep: set[str]) -> tuple[list[Islands], dict[str, Any]]:
        from pom_edge.export.packages import Islands
        from pom_edge.export.typed import typed

        made, ranges = typed(self._made, "fp16", self._builder.facts(), keep)
        return [Islands.of(graph, keep) for graph in made.graphs], ranges

    def _convert(self, islands: list[Islands] | None, traced: list[Traced] | None) -> tuple[Packages, list[str], Stage]:
        from pom_edge.export.packages import Packages

        self._builder.step(f"convert to Core ML in {self._precision}")
        packages = Packages(self._made, self._precision, islands, self._target, traced, self._options.stateful)
        return packages, *self._written(packages)

    def _written(self, packages: Packages) -> tuple[list[str], Stage]:
        files = self._builder.write(packages)
        self._builder.step(f"evaluate Core ML in {self._precision} beside PyTorch")
        return files, against_graph(self._cases, packages.plan, packages.written(self._builder.folder))
