"""A traced model to the same model in INT8: torchao's PT2E steps, between tracing and ONNX.

    prepare (observers on the inputs of weighted GEMMs) -> calibrate -> convert (integer weights in the program) -> trace again

What comes out runs eagerly in PyTorch with the arithmetic of the file, and :func:`pom_edge.export.onnx_graph.translate` makes
QuantizeLinear and DequantizeLinear of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, fx, nn

from pom_edge.errors import InputError
from pom_edge.export.onnx_graph import Traced, trace
from pom_edge.export.quiet import quiet
from pom_edge.quantize.libraries import imported_quietly
from pom_edge.quantize.observers import METHODS, PERCENTILE, ActivationObserver, Method, Observer, WeightObserver
from pom_edge.quantize.quantizer import Edge, Layer, PoMQuantizer, check_paths, within

with imported_quietly():
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

LIMITS = {8: 127, 7: 63}
# A range this many times wider than what 99.99 % of the values need is the work of a few outliers.
OUTLYING = 20.0

_DEQUANTIZE = (
    torch.ops.quantized_decomposed.dequantize_per_tensor.default,
    torch.ops.quantized_decomposed.dequantize_per_channel.default,
)

__all__ = ["LayerFacts", "Options", "Prepared", "Quantized", "prepare", "quantize"]


@dataclass(frozen=True)
class Options:
    """How a model is quantized.

    Attributes:
        method: where an activation is clipped, see :mod:`pom_edge.quantize.observers`.
        percentile: for that method.
        weight_bits: 8, or 7 for processors whose INT8 kernels saturate (x86 without VNNI).
        clip_weights: clip each channel of a weight where its squared error is least; otherwise nothing of it is clipped.
        keep_float: module paths that stay in float, with all that lies in them.

    Raises:
        InputError: another method, percentile or number of bits.
    """

    method: Method = "percentile"
    percentile: float = PERCENTILE
    weight_bits: Literal[7, 8] = 8
    clip_weights: bool = False
    keep_float: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"the calibration method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.weight_bits not in LIMITS:
            raise InputError(f"INT8 weights of {self.weight_bits} bits; expected 8, or 7 for processors whose kernels saturate")
        if not 50 < self.percentile <= 100:
            raise InputError(f"the percentile is {self.percentile:g}; expected more than 50, at most 100")


@dataclass(frozen=True)
class LayerFacts:
    """One layer, for reports and manifests.

    Attributes:
        path: module path in the PyTorch model.
        kind: "gemm", "weight" (the weight alone) or "float".
        method: where the activation was clipped; None where there is none.
        activation_scale: of the input; None for kinds other than "gemm".
        weight_scales: smallest and largest of the channels.
        channels, elements: of the weight.
        why: for kind "float".
    """

    path: str
    kind: Literal["gemm", "weight", "float"]
    method: str | None
    activation_scale: float | None
    weight_scales: tuple[float, float] | None
    channels: int
    elements: int
    why: str = ""


@dataclass
class Quantized:
    """What came out.

    Attributes:
        traced: as the float one, with a quantized program.
        module: the quantized model in PyTorch; called as the traced program.
        layers: in the order in which they run.
        warnings: what the user should know, one sentence each.
    """

    traced: Traced
    module: nn.Module
    layers: list[LayerFacts]
    warnings: list[str] = field(default_factory=list)


class Prepared:
    """A traced model with observers: calibrated once, then converted as often as wanted, with other layers in float.

    Attributes:
        module: called as the traced program; watches what runs through it.
        layers: that can be INT8.
    """

    def __init__(self, traced: Traced, options: Options) -> None:
        module = traced.program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        quantizer = PoMQuantizer(
            set(traced.program.state_dict),
            traced.prefix,
            lambda _: ActivationObserver(options.method, options.percentile),
            lambda layer: WeightObserver(layer.axis, LIMITS[options.weight_bits], options.clip_weights),
            options.keep_float,
        )
        with quiet():
            prepared = prepare_pt2e(module, quantizer)
        assert isinstance(prepared, fx.GraphModule)
        if not quantizer.layers:
            kept = f" beside those kept in float ({', '.join(options.keep_float)})" if options.keep_float else ""
            raise InputError(
                f"the model has no layer with a weight that could be INT8{kept}; export it with --precision fp32 or fp16"
            )
        self._traced, self._options = traced, options
        self.module: fx.GraphModule = prepared
        self.layers = quantizer.layers
        self._observers = quantizer.observers

    # -- what is where ------------------------------------------------------------------------------------------------

    @property
    def observers(self) -> dict[str, Observer]:
        """Of the activations, by the layer's path."""
        return {layer.path: self._observers[layer.activation] for layer in self.layers if layer.activation is not None}

    def _of(self, layer: Layer) -> list[Observer]:
        return [self._observers[edge] for edge in layer.edges]

    def _blind(self, layer: Layer) -> bool:
        """Whether the calibration data never reached a layer, or only with zeros: its scale would be 0."""
        return not all(observer.seen for observer in self._of(layer))

    @contextlib.contextmanager
    def quantizing(self, paths: Collection[str] | None = None) -> Iterator[nn.Module]:
        """The model as its INT8 version would answer, with these layers quantized (default all) and the others in float."""
        chosen = [observer for layer in self.layers if paths is None or layer.path in paths for observer in self._of(layer)]
        chosen = [observer for observer in chosen if observer.seen]
        everything = [observer for layer in self.layers for observer in self._of(layer)]
        watching = [observer.watching for observer in everything]
        for observer in everything:
            observer.watching = False
        for observer in chosen:
            observer.quantize(True)
        try:
            yield self.module
        finally:
            for observer, before in zip(everything, watching, strict=True):
                observer.quantize(False)
                observer.watching = before

    def stop_watching(self) -> None:
        """Calibration is over: what runs now leaves no trace."""
        for observer in self._observers.values():
            observer.watching = False

    def kept_facts(self) -> list[LayerFacts]:
        """Facts of a graph that stays in float as a whole."""
        return [self._facts(layer, "kept in float") for layer in self.layers]

    # -- the result ---------------------------------------------------------------------------------------------------

    def convert(self, keep_float: Collection[str] = ()) -> Quantized:
        """The quantized model.

        Args:
            keep_float: module paths to leave in float, beside those of the options.

        Raises:
            InputError: one of them names no layer, or no layer is left.
        """
        check_paths(keep_float, self.layers)
        why: dict[str, str] = {}
        for layer in self.layers:
            if within(layer.path, keep_float) is not None:
                why[layer.path] = "kept in float"
            elif self._blind(layer):
                why[layer.path] = "the calibration data gave it nothing but zeros, so it has no scale"
        kept = {edge for layer in self.layers if layer.path not in why for edge in layer.edges}
        if not kept:
            blind = [path for path, reason in why.items() if "zeros" in reason]
            raise InputError(
                f"no layer is left for INT8: {len(blind)} of {len(self.layers)} saw nothing but zeros in the calibration data, "
                f"{len(why) - len(blind)} are kept in float. Give real inputs as calibration data, or use --precision fp16"
            )
        module = self._copy(kept)
        with quiet():
            converted = convert_pt2e(module)
        _name_constants(converted)
        program = trace(converted, self._traced.arguments, self._traced.dynamic_shapes)
        facts = [self._facts(layer, why.get(layer.path)) for layer in self.layers]
        return Quantized(replace(self._traced, program=program), converted, facts, self._warnings(why))

    def _copy(self, kept: set[Edge]) -> fx.GraphModule:
        with quiet():
            module = copy.deepcopy(self.module)
        names = {id(observer): name for name, observer in self.module.named_modules()}
        for edge, observer in self._observers.items():
            if edge not in kept:
                copied = module.get_submodule(names[id(observer)])
                assert isinstance(copied, Observer)
                copied.float_again()
        return module

    def _facts(self, layer: Layer, why: str | None) -> LayerFacts:
        if why is not None:
            return LayerFacts(layer.path, "float", None, None, None, layer.channels, layer.elements, why)
        scales: Tensor = self._observers[layer.weight].scale
        activation = None if layer.activation is None else self._observers[layer.activation]
        return LayerFacts(
            layer.path,
            layer.kind,
            None if activation is None else activation.method,
            None if activation is None else float(activation.scale),
            (float(scales.min()), float(scales.max())),
            layer.channels,
            layer.elements,
        )

    def _warnings(self, why: dict[str, str]) -> list[str]:
        found = [f"{path} stays in float: {reason}" for path, reason in why.items() if reason != "kept in float"]
        wide = [
            f"{layer.path} ({observer.outlying:.0f}x)"
            for layer in self.layers
            if layer.path not in why and layer.activation is not None
            for observer in [self._observers[layer.activation]]
            if observer.outlying > OUTLYING
        ]
        if wide:
            found.append(
                f"a few values far outside the rest set the range of {', '.join(wide[:4])}"
                f"{f' and {len(wide) - 4} more' if len(wide) > 4 else ''}: look at the calibration data for outliers"
            )
        return found


def prepare(traced: Traced, calibrate: Callable[[nn.Module], None], options: Options | None = None) -> Prepared:
    """Put observers into a traced model and let the caller run data through it.

    Args:
        traced: float model.
        calibrate: runs the module that it is given on calibration data, calling it as the traced program is called:
            ``module(inputs)`` with a dict of tensors for the parallel and the recurrent form (its outputs, and the next state,
            come back as one flat tuple in the order of ``traced.outputs``), ``module(*feeds)`` for a pass.
        options: see there.

    Raises:
        InputError: the model has no layer to quantize, or the data does not run through it.
    """
    prepared = Prepared(traced, options or Options())
    try:
        with torch.no_grad():
            calibrate(prepared.module)
    except (IndexError, RuntimeError) as error:  # token ids beyond the table, lengths beyond the model's
        raise InputError(f"the calibration data does not run through the model: {error}") from error
    return prepared


def quantize(traced: Traced, calibrate: Callable[[nn.Module], None], options: Options | None = None) -> Quantized:
    """:func:`prepare` and :meth:`Prepared.convert`."""
    return prepare(traced, calibrate, options).convert()


def _name_constants(module: fx.GraphModule) -> None:
    """Integer weights and scales under the name that the float weight had, and every new node in its layer's module."""
    for node in module.graph.nodes:
        if node.target not in _DEQUANTIZE:
            continue
        user = next(iter(node.users))
        while "nn_module_stack" not in user.meta and user.users:
            user = next(iter(user.users))
        for made in (node, node.args[0]):
            if "nn_module_stack" in user.meta and made.op == "call_function":
                made.meta["nn_module_stack"] = user.meta["nn_module_stack"]
