"""What is traced for each form, and what its answers are compared with.

parallel    x -> y
recurrent   (chunk, state) -> (y, next state)
streamed    x -> y, cut into passes afterwards; the model over patches where x is an image
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from pom_edge.bundle import ImageSpec
from pom_edge.errors import InputError
from pom_edge.export import patches
from pom_edge.export.inputs import BATCH, TOKENS, Axes, Extent, axis_sizes, fixed_tokens, make_inputs, plan_axes
from pom_edge.export.lowering import Aggregate, lower
from pom_edge.export.onnx_graph import Boundary, accepting
from pom_edge.export.recurrent import NEXT, STATE, make_recurrent
from pom_edge.export.reference import Arrays, FrameSession, RaggedSession, Reference, TorchSession, named_outputs
from pom_edge.export.streamed import StepCheck
from pom_edge.mixer import CumulativePoM, PoM
from pom_edge.runtimes.stepping import NO_AXIS, run_chunks

FRAME_TOKENS = 6  # of the recorded frames
LayerMask = Literal["none", "padding", "causal", "frames"]
LAYER_MASKS: tuple[LayerMask, ...] = ("none", "padding", "causal", "frames")
EXAMPLE_BATCH, EXAMPLE_TOKENS = 2, 24

__all__ = [
    "LAYER_MASKS",
    "LayerMask",
    "LayerModel",
    "Plan",
    "is_causal",
    "layer_example",
    "layer_mask",
    "parallel",
    "program",
    "recurrent",
    "streamed",
]


@dataclass
class Plan:
    """A model in one form, ready to be traced.

    Attributes:
        form: its name.
        model: lowered; takes its inputs by name.
        mixers: module paths of the original's mixers.
        example: inputs to trace with, free axes at least 2 long.
        axes: of these inputs.
        reference: what the answers are compared with.
        token_axes: recurrent: token axis of each input and output, -1 for an output without one.
        frame: recurrent: tokens of a frame in the recorded cases; 0 for causal models.
        ragged: recurrent: an input says which tokens are real.
        image: streamed: how the image becomes the patches that ``model`` takes.
        image_axes: streamed: of the image, which is what the reference takes.
        tokens: of every run, where the sizes of the inputs leave no other number.
    """

    form: str
    model: nn.Module
    mixers: list[str]
    example: dict[str, Tensor]
    axes: Axes
    reference: Reference
    token_axes: dict[str, int] = field(default_factory=dict)
    frame: int = 0
    ragged: bool = False
    inside: str = ""  # module path of the original within ``model``
    image: ImageSpec | None = None
    image_axes: Axes = field(default_factory=dict)
    tokens: int | None = None

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the inputs that a user gives, by name."""
        if self.image is not None:
            return dict.fromkeys(self.image_axes, "float32")
        own = {name: tensor for name, tensor in self.example.items() if not name.startswith(STATE)}
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in own.items()}

    def named(self, values: Arrays) -> Arrays:
        """Values by the module paths of the original."""
        return {name.removeprefix(self.inside): value for name, value in values.items()}

    def through(self, execute: Callable[[Arrays], Mapping[str, np.ndarray]], inputs: Arrays, chunks: list[int]) -> Arrays:
        """Outputs and mixers of a whole case, however this form runs it."""
        if self.form != "recurrent":
            return dict(execute(inputs))
        batch = inputs[next(iter(self.axes))].shape[0]
        shapes = {name: [batch if dim == BATCH else dim for dim in dims] for name, dims in self.axes.items()}
        state = {
            name: np.zeros([int(n) for n in shape], np.int64 if name == f"{STATE}count" else np.float32)
            for name, shape in shapes.items()
            if name.startswith(STATE)
        }
        found = run_chunks(execute, inputs, self.token_axes, chunks, state)
        if self.ragged:  # mixers answer for padded tokens too; nobody looks at them
            outside = {name for name in found if name not in self.token_axes}
            mask = inputs["mask"][..., None]
            found |= {name: found[name] * mask for name in outside}
        return found


def parallel(model: nn.Module, example: dict[str, Tensor], batch: Extent, tokens: Extent) -> Plan:
    """x -> y."""
    axes = plan_axes(example, batch, tokens)
    lowered, mixers = lower(model)
    own = patches.count(model, next(iter(example.values()))) if patches.takes_images(model) else fixed_tokens(example, axes)
    traceable = _traceable(example, axes, batch, tokens)
    return Plan("parallel", lowered, mixers, traceable, axes, TorchSession(model, mixers), tokens=own)


def streamed(model: nn.Module, example: dict[str, Tensor], batch: Extent) -> Plan:
    """x -> y of a fixed batch, over patches where x is the image of a reference model."""
    plan = dataclasses.replace(parallel(model, example, batch, Extent()), form="streamed")
    if not patches.takes_images(model):
        return plan
    ((name, image),) = plan.example.items()
    spec = patches.image_spec(plan.model, name)  # type: ignore[arg-type]  # lowered, but of the same class
    cut, axes = patches.cut(image, spec)
    image_axes = patches.image_axes(plan.model, image, name)  # type: ignore[arg-type]
    return dataclasses.replace(
        plan,
        model=patches.PatchModel(plan.model).eval(),  # type: ignore[arg-type]
        example=_traceable(cut, axes, batch, Extent()),
        axes=axes,
        image=spec,
        image_axes=image_axes,
        tokens=None if patches.HEIGHT in image_axes[name] else plan.tokens,
    )


def is_causal(plan: Plan) -> bool:
    """Whether a mixer of the model sees the tokens before its own alone; finds out by running the example."""
    found: list[bool] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: found.append(bool(args[2])))
        for module in plan.model.modules()
        if isinstance(module, Aggregate)
    ]
    try:
        with torch.no_grad():
            plan.model(**plan.example)
    finally:
        for hook in hooks:
            hook.remove()
    return any(found)


def recurrent(
    model: nn.Module, example: dict[str, Tensor], batch: Extent, tokens: Extent, frames: bool = False, ragged: bool = False
) -> Plan:
    """(chunk, state) -> (y, next state).

    Args:
        model: whose mixers are causal, or with ``frames`` see all tokens of a chunk.
        example: inputs of the model.
        batch, tokens: extents; ``tokens`` of a chunk.
        frames, ragged: see :func:`pom_edge.export.recurrent.make_recurrent`.

    Raises:
        InputError: the model's tokens interact in another way.
    """
    example = dict(example)
    if ragged:
        if "mask" in example:
            raise InputError("the model has an input 'mask' of its own; leave out --mask padding, which would add another")
        first = next(iter(example.values()))
        example["mask"] = torch.ones(first.shape[:2])
    free = plan_axes(example, Extent(), Extent())
    token_axes = {name: dims.index(TOKENS) for name, dims in free.items() if TOKENS in dims}
    input_axes = dict(token_axes)
    if not token_axes:
        raise InputError("no input has a token axis (batch, tokens, ..); a model that takes whole images has no recurrent form")
    stepped, mixers = make_recurrent(model, frames, ragged)
    axes = plan_axes(example, batch, tokens)
    traced = _traceable(example, axes, batch, tokens)
    with accepting(traced):
        outputs = named_outputs(stepped(**traced))
    rows = {name: axis_sizes(traced, free)[TOKENS] for name in outputs}
    for name, value in outputs.items():
        if name.startswith(NEXT):
            state = STATE + name.removeprefix(NEXT)
            batch_dim = next(dims[0] for dims in axes.values())
            traced[state] = torch.zeros_like(value)
            axes[state] = [batch_dim, *value.shape[1:]]
        else:
            token_axes[name] = 1 if value.ndim >= 2 and value.shape[1] == rows[name] else NO_AXIS
    reference: Reference = TorchSession(model, mixers)
    if frames:
        reference = FrameSession(model, mixers, FRAME_TOKENS, input_axes)
    elif ragged:
        reference = RaggedSession(model, mixers)
    return Plan(
        "recurrent",
        stepped,
        mixers,
        traced,
        axes,
        reference,
        token_axes,
        frame=FRAME_TOKENS if frames else 0,
        ragged=ragged,
        inside="model.",
    )


def check_steps(plan: Plan) -> None:
    """What a gate on some inputs cannot see: a mean over tokens or a count of them that does nothing on those inputs.

    Raises:
        InputError: the model of a recurrent plan mixes or counts tokens outside of its stepped layers.
    """
    axes: Axes = {}
    example = dict(plan.example)
    for name, tensor in plan.example.items():
        axes[name] = list(tensor.shape)
        if name in plan.token_axes:
            axis = plan.token_axes[name]
            axes[name][axis] = TOKENS
            if tensor.shape[axis] == 1:  # torch.export bakes a length of 1 in
                example[name] = tensor.repeat_interleave(2, axis)
    boundary = Boundary(plan.model, [])
    with torch.no_grad():
        outputs = list(boundary.run(example)[0])
    StepCheck(boundary, example, axes, outputs, ("SteppedMixer", "SteppedLocalAttention", "SteppedPositions"))


def program(module: nn.Module, example: dict[str, Tensor], batch: Extent, tokens: Extent) -> Plan:
    """An ExportedProgram, as it is: no mixers are known."""
    return Plan("parallel", module, [], example, plan_axes(example, batch, tokens), TorchSession(module))


def _traceable(example: dict[str, Tensor], axes: Axes, batch: Extent, tokens: Extent) -> dict[str, Tensor]:
    """Inputs within the extents whose free axes are at least 2 long: torch.export bakes in lengths of 0 and 1."""
    sizes = {axis: max(length, 2) for axis, length in axis_sizes(example, axes).items()}
    for axis, extent in ((BATCH, batch), (TOKENS, tokens)):
        if axis in sizes:
            sizes[axis] = max(extent.minimum, 2, min(sizes[axis], extent.maximum or sizes[axis]))
    return make_inputs(example, axes, sizes, seed=0)


class LayerModel(nn.Module):
    """A bare mixer as a model: a layer's checkpoint does not say how the model around it called the layer.

    Args:
        layer: the mixer.
        mask: ``"causal"`` makes the graph causal; a padding mask is an input and needs nothing here.
    """

    def __init__(self, layer: PoM | CumulativePoM, mask: LayerMask = "none") -> None:
        super().__init__()
        self.layer = layer
        self.causal = mask == "causal"

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`pom_edge.mixer.PoM.forward`, with the causal flag fixed."""
        return self.layer(  # type: ignore[no-any-return]
            x, context=context, mask=mask, positions=positions, context_positions=context_positions, causal=self.causal
        )


def layer_mask(text: str) -> LayerMask:
    """The kind of mask that ``--mask`` names.

    Raises:
        InputError: none of the known kinds.
    """
    for mask in LAYER_MASKS:
        if text == mask:
            return mask
    raise InputError(f"--mask is {text!r}; expected one of {', '.join(LAYER_MASKS)}")


def layer_example(layer: PoM | CumulativePoM, padded: bool, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs for a bare layer: x, a padding mask if asked for, a grid of positions for 2-D rotary."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(EXAMPLE_BATCH, EXAMPLE_TOKENS, layer.dim, generator=generator)}
    if padded:
        lengths = torch.tensor([EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2])
        inputs["mask"] = (torch.arange(EXAMPLE_TOKENS) < lengths.unsqueeze(-1)).float()
    if layer.rotary == "2d":
        index = torch.arange(EXAMPLE_TOKENS)
        inputs["positions"] = torch.stack((index // 6, index % 6), dim=-1)
    return inputs
