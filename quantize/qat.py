"""Quantization-aware training: INT8's rounding in the loop, so that the weights learn to live with it.

The model as it was trained is traced, torchao's PT2E puts quantizers where :class:`PoMQuantizer` would quantize, and what is
trained are the model's own parameters. So the result is a checkpoint like any other, and goes the same way to INT8:

    training = prepare_qat(model, {"x": batch})
    for x, target in data:                                  # an ordinary loop
        loss(training(x), target).backward()
    save_checkpoint("model.pt", training.finished(), config, samples=...)    # pom-export model.pt --precision int8
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pom_edge.errors import InputError
from pom_edge.export.inputs import Extent, check_example, plan_axes
from pom_edge.export.onnx_graph import trace_graph
from pom_edge.export.quiet import quiet
from pom_edge.quantize.libraries import imported_quietly
from pom_edge.quantize.observers import ACTIVATION_LIMIT, as_int8
from pom_edge.quantize.quantize import LIMITS, Options
from pom_edge.quantize.quantizer import PoMQuantizer

with imported_quietly():
    from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

MEMORY = 0.99  # of an activation's range from step to step

__all__ = ["Training", "prepare_qat"]


class TrainingQuantizer(FakeQuantizeBase):  # type: ignore[misc]  # torchao is untyped
    """Rounds a tensor as INT8 would; gradients go straight through.

    Args:
        limit, low: largest and smallest integer.
        ch_axis: axis of a weight's channels, whose scales follow the weight; None for an activation, whose scale follows the
            largest magnitudes of the batches seen in training.
    """

    largest: Tensor

    def __init__(self, limit: int, low: int, ch_axis: int | None) -> None:
        super().__init__()
        self.dtype, self.is_dynamic = torch.int8, False
        self.quant_min, self.quant_max, self.ch_axis = low, limit, ch_axis
        self.qscheme = torch.per_tensor_symmetric if ch_axis is None else torch.per_channel_symmetric
        self.watching = True
        self.register_buffer("largest", torch.zeros(()))

    def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
        """For torchao."""
        scale = self.largest / self.quant_max
        return scale, torch.zeros(scale.shape, dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        """x as INT8 holds it."""
        with torch.no_grad():
            if self.ch_axis is not None:
                self.largest = x.movedim(self.ch_axis, 0).flatten(1).abs().amax(1)
            elif self.watching or not bool(self.largest):  # without a range yet, even in eval mode
                now = x.abs().max()
                self.largest = now if not bool(self.largest) else MEMORY * self.largest + (1 - MEMORY) * now
            scale = (self.largest / self.quant_max).clamp(min=torch.finfo(torch.float32).tiny)
        return as_int8(x, scale, self)


class Training(nn.Module):
    """A model to train with INT8 in the loop; made by :func:`prepare_qat`.

    It takes the model's inputs by name, or the first one alone, and returns what the model returns (several outputs as a
    tuple). Dropout is off. In eval mode ranges stay as they are.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], options: Options) -> None:
        super().__init__()
        own = copy.deepcopy(model).eval()
        _freeze_norms(own)
        traced = trace_graph(own, [], dict(inputs), plan_axes(dict(inputs), Extent(), Extent()))
        module = traced.program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        limit = LIMITS[options.weight_bits]
        quantizer = PoMQuantizer(
            set(traced.program.state_dict),
            traced.prefix,
            lambda _: TrainingQuantizer(ACTIVATION_LIMIT, -ACTIVATION_LIMIT - 1, None),
            lambda layer: TrainingQuantizer(limit, -limit, layer.axis),
            options.keep_float,
        )
        with quiet():
            self.graph: fx.GraphModule = prepare_qat_pt2e(module, quantizer)
        if not quantizer.layers:
            raise InputError("the model has no layer with a weight that could be INT8; there is nothing to train for")
        self.layers = [layer.path for layer in quantizer.layers]
        self._original, self._inputs, self._prefix = [copy.deepcopy(model).eval()], list(inputs), traced.prefix

    def train(self, mode: bool = True) -> Training:
        """Ranges follow the data in training mode only."""
        self.training = mode
        for module in self.graph.modules():
            if isinstance(module, TrainingQuantizer):
                module.watching = mode
        return self

    def forward(self, x: Tensor | None = None, /, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The model's outputs."""
        named = inputs if x is None else {self._inputs[0]: x, **inputs}
        if set(named) != set(self._inputs):
            raise InputError(f"inputs {', '.join(named) or 'none'} were given; expected {', '.join(self._inputs)}")
        outputs = self.graph({name: named[name] for name in self._inputs})
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def finished(self) -> nn.Module:
        """A copy of the original model with the trained weights, in eval mode."""
        model = copy.deepcopy(self._original[0])
        trained = {name.removeprefix(f"{self._prefix}."): value.detach() for name, value in self.graph.named_parameters()}
        unknown = model.load_state_dict(trained, strict=False).unexpected_keys
        assert not unknown, f"traced parameters {unknown} are none of the model's"
        return model.eval()


class FrozenBatchNorm(nn.Module):
    """A batch norm with the statistics it has: (x - mean) / sqrt(var + eps) * weight + bias, channels on axis 1."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        """As the norm in eval mode."""
        shape = (1, -1, *[1] * (x.ndim - 2))
        scale = torch.rsqrt(self.running_var + self.eps)  # type: ignore[operator]
        y = (x - self.running_mean.reshape(shape)) * scale.reshape(shape)  # type: ignore[operator]
        if self.weight is not None:
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)  # type: ignore[operator]
        return y


def _freeze_norms(model: nn.Module) -> None:
    """torchao's graph would train batch statistics on, and the INT8 file has those of the checkpoint: they stay as they are."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is None:
                raise InputError(f"{name} is a batch norm without running statistics, which has no INT8; use another norm")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, FrozenBatchNorm(module))


def prepare_qat(
    model: nn.Module,
    example_inputs: Mapping[str, Tensor],
    *,
    weight_bits: int = 8,
    keep_float: Collection[str] = (),
) -> Training:
    """Make a model ready for quantization-aware training.

    Args:
        model: any model, left unchanged.
        example_inputs: by name, batch and token axes at least 2 long.
        weight_bits: 8, or 7 for processors whose INT8 kernels saturate.
        keep_float: module paths that will stay in float.

    Returns:
        A module to train; :meth:`Training.finished` gives the trained model.

    Raises:
        InputError: unusable inputs, a model that cannot be traced or has nothing to quantize, a path that names no layer.
    """
    if not isinstance(example_inputs, Mapping):
        raise InputError(f'example_inputs is a {type(example_inputs).__name__}; expected a dict, for example {{"x": batch}}')
    check_example(dict(example_inputs))
    return Training(model, example_inputs, Options(weight_bits=weight_bits, keep_float=tuple(keep_float)))  # type: ignore[arg-type]
