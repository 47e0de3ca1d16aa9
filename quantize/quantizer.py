"""Which tensors become INT8: the inputs of GEMMs with trained weights, and nothing else.

    y = W x  ->  y = dequantize(W_q) dequantize(quantize(x)):   x one scale, W one scale for each output channel, bias float

Polynomials, gates, means, running sums, rotations, softmax and products of two activations stay in float: quantizing the
polynomials alone costs ten times the error in every tool that was tried. A GEMM of a single row (the collapsed readout) reads
more weights than it computes: there the weight alone is INT8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from pom_edge.errors import InputError
from pom_edge.quantize.libraries import imported_quietly

with imported_quietly():
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

aten = torch.ops.aten
Edge = tuple[fx.Node, fx.Node]
Kind = Literal["gemm", "weight"]

_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
_PRODUCTS = {aten.matmul.default: 0, aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}  # first operand
# Views of a weight: they move or leave out its elements and keep their values.
_VIEWS = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.view.default, aten.reshape.default,
    aten._unsafe_view.default, aten.unflatten.int, aten.flatten.using_ints, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.expand.default, aten.contiguous.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.slice.Tensor,
}  # fmt: skip
# Buffers of a lowered mixer and the projection of the trained layer that they are parts of.
_PARTS = {
    "qc_weight": "qc_proj", "po_weight": "qc_proj.po", "se_weight": "qc_proj.se", "ag_weight": "ag_proj",
}  # fmt: skip

__all__ = ["Kind", "Layer", "PoMQuantizer", "find_layers", "within"]


@dataclass
class Layer:
    """A GEMM with a trained weight.

    Attributes:
        path: module path in the PyTorch model; a part of a mixer's fused projection has the part's name behind it.
        kind: "gemm" quantizes both inputs, "weight" the weight alone.
        weight_name: of the parameter or buffer in the traced module.
        weight: where the weight is quantized: the value and its user.
        activation: the same for the other input; None for kind "weight".
        axis: of the weight's channels, in the value that is quantized.
        channels: how many there are.
        elements: of the weight.
    """

    path: str
    kind: Kind
    weight_name: str
    weight: Edge
    activation: Edge | None
    axis: int
    channels: int
    elements: int

    @property
    def edges(self) -> list[Edge]:
        """All places that are quantized."""
        return [self.weight] if self.activation is None else [self.activation, self.weight]


def within(path: str, chosen: Collection[str]) -> str | None:
    """The chosen module path that a path is, or lies in; None where it lies in none."""
    return next((name for name in chosen if path == name or path.startswith(name + ".")), None)


def find_layers(module: fx.GraphModule, trained: Collection[str], prefix: str = "") -> list[Layer]:
    """Every GEMM with a trained weight, in the order in which they run.

    Args:
        module: of an exported program.
        trained: names of its parameters and buffers; other constants are no weights.
        prefix: module path of the model in what was traced.
    """
    layers: list[Layer] = []
    for node in module.graph.nodes:
        for activation, weight, reduced in _operands(node):
            found = _weight_of(module, node, weight, reduced, trained)
            if found is None or _weight_of(module, node, activation, reduced, trained) is not None:
                continue
            name, edge, axis, channels, elements = found
            kind: Kind = "weight" if _single_row(activation) else "gemm"
            path = layer_path(name, prefix)
            read = (activation, node) if kind == "gemm" else None
            layers.append(Layer(path, kind, name, edge, read, axis, channels, elements))
            break
    return _numbered(layers)


def layer_path(weight_name: str, prefix: str) -> str:
    """The module path in the user's model of a weight in the traced one."""
    path = weight_name.removeprefix(prefix + ".") if prefix else weight_name
    parts = [part for part in path.split(".") if part != "lowered"]  # our wrapper around a published layer
    return ".".join([*parts[:-1], *filter(None, [_PARTS.get(parts[-1], "" if parts[-1] == "weight" else parts[-1])])])


def _numbered(layers: list[Layer]) -> list[Layer]:
    """A module that runs several times is several layers: its later runs are ``path#1``, ``path#2``."""
    counts: dict[str, int] = {}
    for layer in layers:
        runs = counts.get(layer.path, 0)
        counts[layer.path] = runs + 1
        if runs:
            layer.path = f"{layer.path}#{runs}"
    return layers


def _operands(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """(activation, weight, the weight's reduced axis) for each way to read a node as a GEMM; -1 .. 1 stands for all but one."""
    if node.op != "call_function":
        return
    if node.target is aten.linear.default or node.target in _CONVOLUTIONS:
        yield node.args[0], node.args[1], -1  # type: ignore[misc]
    elif node.target in _PRODUCTS:
        first = _PRODUCTS[node.target]
        left, right = node.args[first], node.args[first + 1]
        yield left, right, -2  # type: ignore[misc]
        yield right, left, -1  # type: ignore[misc]


def _single_row(activation: fx.Node) -> bool:
    value = activation.meta["val"]
    return value.ndim >= 3 and isinstance(value.shape[-2], int) and value.shape[-2] == 1


def _weight_of(
    module: fx.GraphModule, gemm: fx.Node, operand: fx.Node, reduced: int, trained: Collection[str]
) -> tuple[str, Edge, int, int, int] | None:
    """Where to quantize a constant operand: of the places between parameter and GEMM, the one with most channels.

    A channel axis is one whose index does not change along the reduced axis of the GEMM: found by sending the indices
    through the views. So a grouped weight (D, d/G), which the GEMM sees as (G, D/G, d/G), is quantized by its D rows.

    Returns:
        Name of the parameter, edge, channel axis, channels, elements; None for an operand that is no trained weight.
    """
    chain: list[fx.Node] = []  # views, from the GEMM up
    node = operand
    while node.target in _VIEWS and len(node.all_input_nodes) == 1:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "get_attr" or str(node.target) not in trained:
        return None
    weight = _attribute(module, str(node.target))
    if weight is None or not weight.is_floating_point() or weight.ndim < 2:
        return None
    best: tuple[int, Edge, int] | None = None
    for depth in range(len(chain) + 1):  # nearest to the GEMM first: no view is left behind there
        value = chain[depth] if depth < len(chain) else node
        user = chain[depth - 1] if depth else gemm
        if depth and len(chain[depth - 1].users) > 1:
            break  # somebody else reads this view in float
        views = chain[:depth]
        shape = tuple(value.meta["val"].shape) if depth < len(chain) else tuple(weight.shape)
        axis = _channel_axis(shape, views, gemm, reduced)
        if axis is not None and (best is None or shape[axis] > best[0]):
            best = (shape[axis], (value, user), axis)
    return None if best is None else (str(node.target), best[1], best[2], best[0], weight.numel())


def _channel_axis(shape: tuple[int, ...], views: list[fx.Node], gemm: fx.Node, reduced: int) -> int | None:
    found: int | None = None
    for axis, length in enumerate(shape):
        index = torch.arange(length).reshape([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape).contiguous()
        for view in reversed(views):
            index = view.target(index, *view.args[1:], **view.kwargs)  # type: ignore[operator]
        if gemm.target in _CONVOLUTIONS:
            index = index.flatten(1)
        along = index.select(reduced, 0).unsqueeze(reduced)
        if bool((index == along).all()) and (found is None or length > shape[found]):
            found = axis
    return found


def _attribute(module: fx.GraphModule, name: str) -> Tensor | None:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else None


class _Observe:
    """An observer's constructor in the shape that torchao asks for."""

    __name__ = "PoMObserver"

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def with_args(self, **_: Any) -> Callable[[], Any]:
        return self._make

    def __deepcopy__(self, _: Any) -> _Observe:
        return self


class PoMQuantizer(Quantizer):  # type: ignore[misc]  # torchao is untyped
    """torchao's view of :func:`find_layers`: symmetric INT8, per-channel weights, per-tensor activations.

    Args:
        trained, prefix: see :func:`find_layers`.
        activation: makes the observer of an activation, told the layer.
        weight: makes the observer of a weight, told the layer.
        keep_float: module paths that are left in float, with all that lies in them.

    Attributes:
        layers: that are quantized, once annotated.
        observers: by edge, once prepared.

    Raises:
        InputError: from :meth:`annotate`: a path of ``keep_float`` names no layer.
    """

    def __init__(
        self,
        trained: Collection[str],
        prefix: str,
        activation: Callable[[Layer], Any],
        weight: Callable[[Layer], Any],
        keep_float: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._trained, self._prefix = trained, prefix
        self._activation, self._weight, self._keep_float = activation, weight, keep_float
        self.layers: list[Layer] = []
        self.observers: dict[Edge, Any] = {}

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """See :func:`weights_second`."""
        weights_second(model, self._trained)
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Mark the edges that are quantized."""
        found = find_layers(model, self._trained, self._prefix)
        check_paths(self._keep_float, found)
        self.layers = [layer for layer in found if within(layer.path, self._keep_float) is None]
        for layer in self.layers:
            _mark(layer.weight, _spec(self._weight, layer))
            if layer.activation is not None:
                _mark(layer.activation, _spec(self._activation, layer))
        return model

    def validate(self, model: fx.GraphModule) -> None:  # the base's signature
        """Nothing to check: every target takes what is marked here."""

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: Mapping[Any, Any]) -> None:  # noqa: ARG002
        """Remember which observer watches which edge."""
        self.observers = dict(edge_or_node_to_obs_or_fq)


def weights_second(module: fx.GraphModule, trained: Collection[str]) -> None:
    """W x^T = (x W^T)^T: a weight is a GEMM's second operand, the only place where runtimes take a scale for each channel.

    ONNX Runtime 1.32 fuses the other order too and then refuses to run it: "input a zero point must be a scalar".
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.matmul.default, aten.mm.default):
            continue
        weight, columns = node.args
        if (
            weight.op != "get_attr"
            or str(weight.target) not in trained
            or weight.meta["val"].ndim != 2
            or columns.meta["val"].ndim < 2
        ):
            continue

        def call(target: Any, *args: Any, of: fx.Node = node) -> fx.Node:
            made = module.graph.call_function(target, args)
            made.meta = {key: of.meta[key] for key in ("nn_module_stack", "source_fn_stack") if key in of.meta}
            made.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
            return made

        with module.graph.inserting_before(node):
            rows = columns.args[0] if _swaps_last(columns) else call(aten.transpose.int, columns, -2, -1)
            turned = call(aten.transpose.int, call(aten.linear.default, rows, weight), -2, -1)
        node.replace_all_uses_with(turned)
        module.graph.erase_node(node)
        if not columns.users:
            module.graph.erase_node(columns)
    module.recompile()


def _swaps_last(node: fx.Node) -> bool:
    rank = node.meta["val"].ndim
    return node.target is aten.transpose.int and {int(d) % rank for d in node.args[1:3]} == {rank - 2, rank - 1}  # type: ignore[arg-type]


def check_paths(paths: Collection[str], layers: Collection[Layer]) -> None:
    """Refuse names of no layer.

    Raises:
        InputError: with the layers that there are.
    """
    for path in paths:
        if not any(within(layer.path, [path]) for layer in layers):
            listed = ", ".join(layer.path for layer in layers)
            raise InputError(f"{path!r} is none of the layers that can be INT8, nor a module around one; expected of {listed}")


def _spec(make: Callable[[Layer], Any], layer: Layer) -> Any:
    return QuantizationSpec(dtype=torch.int8, observer_or_fake_quant_ctr=_Observe(lambda: make(layer)))


def _mark(edge: Edge, spec: Any) -> None:
    value, user = edge
    # Not shared with other readers of the value: each layer can go back to float by itself.
    annotation = user.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation(allow_implicit_sharing=False, _annotated=True))
    annotation.input_qspec_map[value] = spec
