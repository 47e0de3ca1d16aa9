"""The recurrent form with its state inside the package: Core ML's own states, which are FP16.

A running mean in one FP16 number falls to a few dB, so each state is a pair whose sum is the value:

    high = half(v);  low = half(2048 (v - high));  v = high + low / 2048, to 22 bits

The factor keeps the low part of a small value among the normal numbers.

The count of tokens stays an input and an output.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.export.forms import Plan
from pom_edge.export.onnx_graph import Boundary, Traced, trace
from pom_edge.export.recurrent import COUNT, NEXT, STATE

SCALE = 2048.0
ALIGNED = 32  # widths that are no multiple of it fail on the Neural Engine (coremltools#2631)
LOW = "_low"  # the FP32 form's second tensor of a running mean

__all__ = ["StatefulBoundary", "stateful_plan", "trace_stateful"]


class Join(nn.Module):
    """Two FP16 parts to their value."""

    def forward(self, high: Tensor, low: Tensor, width: int) -> Tensor:
        """Twice (.., n) FP16 -> (.., width) FP32."""
        return (high.float() + low.float() * (1 / SCALE))[..., :width]


class Halves(nn.Module):
    """A value to its two FP16 parts."""

    def forward(self, value: Tensor, rest: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
        """(.., n) FP32, and what it lost to rounding -> twice (.., width) FP16, zeros behind."""
        value = value if rest is None else value + rest
        value = F.pad(value, (0, width - value.shape[-1]))
        high = value.half()
        return high, ((value - high.float()) * SCALE).half()


class StatefulBoundary(Boundary):
    """The traced module of a recurrent plan, with buffers for all state but the count.

    Args:
        plan: of the recurrent form, fixed shapes.
        mixers: module paths to tap.
    """

    def __init__(self, plan: Plan, mixers: list[str]) -> None:
        super().__init__(plan.model, mixers)
        # in FP32 by the name, see pom_edge.export.ranges.AGGREGATE
        self.pom_mean = nn.ModuleDict({"join": Join(), "halve": Halves()})
        example = {name: tensor for name, tensor in plan.example.items() if name.startswith(STATE) and name != COUNT}
        self.shapes = {name.removeprefix(STATE): tensor.shape for name, tensor in example.items()}
        for name in self.kept:
            shape = self.shapes[name]
            buffer = torch.zeros(*shape[:-1], -(-shape[-1] // ALIGNED) * ALIGNED, dtype=torch.float16)
            self.register_buffer(buffer_name(name, "high"), buffer)
            self.register_buffer(buffer_name(name, "low"), buffer.clone())

    @property
    def kept(self) -> list[str]:
        """States of the FP32 form that have a pair; the low part of a mean is in its mean's."""
        return [name for name in self.shapes if not (name.endswith(LOW) and name.removesuffix(LOW) in self.shapes)]

    def run(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        full = dict(inputs)
        for name, shape in self.shapes.items():
            if name in self.kept:
                high, low = (getattr(self, buffer_name(name, part)) for part in ("high", "low"))
                full[STATE + name] = self.pom_mean["join"](high, low, shape[-1])
            else:
                full[STATE + name] = torch.zeros(shape)
        outputs, taps = super().run(full)
        for name in self.kept:
            value, rest = outputs.pop(NEXT + name), outputs.pop(NEXT + name + LOW, None)
            buffer = getattr(self, buffer_name(name, "high"))
            high, low = self.pom_mean["halve"](value, rest, buffer.shape[-1])
            buffer.copy_(high)
            getattr(self, buffer_name(name, "low")).copy_(low)
        return outputs, taps


def buffer_name(state: str, part: str) -> str:
    """Name of a state inside the package: ``state_0_mean_high``."""
    return f"{STATE}{state}_{part}".replace(".", "_")


def stateful_plan(plan: Plan) -> tuple[Plan, dict[str, list[int]]]:
    """The plan whose state is that of the package, and the states' shapes by their names in the manifest."""
    boundary = StatefulBoundary(plan, [])
    shapes = {
        f"{STATE}{name}_{part}": list(getattr(boundary, buffer_name(name, part)).shape)
        for name in boundary.kept
        for part in ("high", "low")
    }
    own = {name: dims for name, dims in plan.axes.items() if not name.startswith(STATE) or name == COUNT}
    return dataclasses.replace(plan, axes={**own, **{name: list(shape) for name, shape in shapes.items()}}), shapes


def trace_stateful(plan: Plan) -> Traced:
    """The program of a recurrent plan with state of its own."""
    boundary = StatefulBoundary(plan, [plan.inside + name for name in plan.mixers if name])
    inputs = {name: tensor for name, tensor in plan.example.items() if not name.startswith(STATE) or name == COUNT}
    outputs, taps = boundary.names(inputs)
    for buffer in boundary.buffers():
        if buffer.dtype == torch.float16:
            buffer.zero_()
    arguments = (inputs,)
    return Traced(
        trace(boundary, arguments, None),
        list(inputs),
        outputs,
        [name.removeprefix(plan.inside) for name in taps],
        plan.axes,
        plan.mixers,
        [],
        f"model.{plan.inside}".rstrip("."),
        arguments,
        None,
    )
