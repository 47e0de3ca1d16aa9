"""From a model and what is asked of it to graphs in FP32, and to the cases that they are held against."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pom_edge.coreml import fix_axes
from pom_edge.engine_options import COMPILED
from pom_edge.errors import InputError
from pom_edge.options import ExportOptions
from pom_edge.progress import Step
from pom_edge.runtimes.memory import SizeError
from pom_edge.system import human_bytes, memory_bytes

if TYPE_CHECKING:
    from pom_edge.export.forms import Plan
    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import Extent
    from pom_edge.export.made import Made
    from pom_edge.export.streamed import Split
    from pom_edge.subject import Subject

__all__ = ["choose_cases", "make_graphs"]


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


def make_graphs(subject: Subject, options: ExportOptions, batch: Extent, tokens: Extent, step: Step) -> tuple[Made, list[str]]:
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
    if plan.tokens is not None and not tokens.fixed and options.tokens is not None and set(options.targets) & set(COMPILED):
        raise InputError(
            f"--tokens is {options.tokens}; this model has {plan.tokens} tokens, whatever the engine: leave --tokens out"
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


def choose_cases(subject: Subject, made: Made, batch: Extent, tokens: Extent) -> list[Case]:
    """Inputs of several sizes, as the form takes them; nothing is recorded yet."""
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
