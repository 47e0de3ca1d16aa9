"""The mean of a polynomial from the means of powers, a block of channels after the other: for FP32 graphs alone.

    mean_n (a_n (c_1 + a_n (c_2 + .. a_n c_k)))  ->  c_1 mean a + c_2 mean a^2 + .. + c_k mean a^k

A sum is taken apart the same way, and one over the tokens that a mask admits is one over m a: m^k = m where m is 0 or 1.

A product of two tensors writes a pass over (D, N); a mean only reads one. Horner's scheme writes 2 k - 1 passes, the powers
k - 1. Where a = act(W x^T) the rows of W are split in blocks: what one operator writes is still in the cache when the next
one reads it, and less memory serves; but each block reads x once more. Both were measured (docs/performance.md).

Half precision keeps Horner's scheme: every mean is an island of FP32 there, and one is cheaper than k; its range proof bounds
f itself, where the terms of a sum have wider bounds than the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pom_edge.export.onnx_graph import Graph
from pom_edge.export.streamed import VALID

CHANNEL_BLOCK = 384  # rows of W at a time, or up to twice as many in one block: over all lengths better than 256 and 768
_KEEPS_CHANNELS = {"LeakyRelu", "Clip", "Relu", "Gelu", "Sigmoid", "Add"}  # between the product and the powers

__all__ = ["with_moments"]


@dataclass
class _Mean:
    """Mean or sum over the last axis of a polynomial of ``a`` without a constant term, times 0 or 1 for each token."""

    reduce: ir.Node
    masks: list[ir.Value]  # each (B or 1, 1, N)
    a: ir.Value
    coefficients: list[np.ndarray]  # c_1 .. c_k, each (D, 1)
    chain: list[ir.Node]  # the product with W and what follows, up to ``a``; empty: it cannot be split


def with_moments(graph: Graph) -> Graph:
    """A copy of a graph in FP32 whose means and sums of polynomials are sums of moments; the same function."""
    changed = graph.clone()
    outputs, taps = {*changed.model.graph.outputs, *changed.taps.values()}, {*changed.taps.values()}
    for node in list(changed.model.graph):
        found = None if node.outputs[0] in taps else _find(node, outputs)
        if found is not None:
            _replace(changed.model, found)
    return changed


def _find(node: ir.Node, outputs: set[ir.Value]) -> _Mean | None:
    reduces = node.op_type in ("ReduceMean", "ReduceSum") and len(node.inputs) == 2
    axes = node.inputs[1].const_value if reduces and node.inputs[1] else None
    f = node.inputs[0] if reduces else None
    if axes is None or f is None or f.shape is None or len(f.shape) != 3 or node.attributes.get_int("keepdims", 1) != 1:
        return None
    if axes.numpy().tolist() not in ([-1], [2]):
        return None
    masks = []
    while mask := next((factor for factor in _product(f, outputs) if _is_mask(factor)), None):
        masks.append(mask)
        f = next(factor for factor in _product(f, outputs) if factor is not mask)
    for a in dict.fromkeys(_product(f, outputs)):
        coefficients = _horner(f, a, outputs)
        if coefficients is not None and len(coefficients) > 1:
            return _Mean(node, masks, a, coefficients, _chain(a, outputs))
    return None


def _is_mask(value: ir.Value) -> bool:
    """Whether it is 0 or 1 for each token, (B or 1, 1, N): truth values, or the streamed form's own ``valid``."""
    source: ir.Value | None = value
    while source is not None and (node := source.producer()) is not None and node.op_type in ("Unsqueeze", "Reshape", "Cast"):
        source = node.inputs[0]
        if node.op_type == "Cast" and (source is None or source.dtype != ir.DataType.BOOL):
            return False
    if source is None or source.shape is None or value.shape is None:
        return False
    # The streamed form's is (tokens of a chunk); an input of the user's that bears its name has a batch.
    valid = source.name == VALID and source.is_graph_input() and len(source.shape) == 1
    return (valid or source.dtype == ir.DataType.BOOL) and len(value.shape) == 3 and value.shape[1] == 1


def _product(value: ir.Value, outputs: set[ir.Value]) -> list[ir.Value]:
    """The factors of a product that nobody else reads."""
    node = value.producer()
    if node is None or node.op_type != "Mul" or len(value.uses()) != 1 or value in outputs:
        return []
    return [each for each in node.inputs if each is not None]


def _horner(f: ir.Value, a: ir.Value, outputs: set[ir.Value]) -> list[np.ndarray] | None:
    """c_1 .. c_k of f = a (c_1 + a (c_2 + ..)); None where f is something else."""
    factors = _product(f, outputs)
    if a not in factors:
        return None
    rest = factors[1 - factors.index(a)]
    constant = _column(rest)
    if constant is not None:
        return [constant]
    node = rest.producer()
    if node is None or node.op_type != "Add" or len(rest.uses()) != 1 or rest in outputs:
        return None
    for at, value in enumerate(node.inputs):
        c, other = _column(value), node.inputs[1 - at]
        inner = None if c is None or other is None else _horner(other, a, outputs)
        if c is not None and inner is not None:
            return [c, *inner]
    return None


def _column(value: ir.Value | None) -> np.ndarray | None:
    """A constant (D, 1) in FP32."""
    constant = None if value is None else value.const_value
    if constant is None or constant.dtype != ir.DataType.FLOAT or len(constant.shape) != 2 or constant.shape[1] != 1:
        return None
    return constant.numpy()


def _chain(a: ir.Value, outputs: set[ir.Value]) -> list[ir.Node]:
    """W x^T and the operators after it, in order, where each row of W can go its own way."""
    chain: list[ir.Node] = []
    value: ir.Value | None = a
    while value is not None and value.producer() is not None and value not in outputs:
        node = value.producer()
        assert node is not None
        if value is not a and len(value.uses()) != 1:
            return []
        chain.insert(0, node)
        if node.op_type == "MatMul":
            weight = None if node.inputs[0] is None else node.inputs[0].const_value
            whole = weight is not None and len(weight.shape) == 2 and a.shape is not None and weight.shape[0] == a.shape[1]
            return chain if whole else []
        if node.op_type not in _KEEPS_CHANNELS:
            return []
        moving = [each for each in node.inputs if each is not None and each.const_value is None]
        if len(moving) != 1 or (node.op_type == "Add" and not any(_column(each) is not None for each in node.inputs)):
            return []
        value = moving[0]
    return []


def _replace(model: ir.Model, found: _Mean) -> None:
    """Blocks of moments (B, D_b, k), joined to (B, D, k), weighted and summed to (B, D, 1)."""
    maker = _Maker(model, found)
    h = found.reduce.outputs[0]
    blocks = maker.blocks()
    joined = blocks[0] if len(blocks) == 1 else maker.add("Concat", blocks, maker.moments_shape(), axis=1)
    weights = maker.constant(np.concatenate(found.coefficients, axis=1), "coefficients")  # (D, k)
    weighted = maker.add("Mul", [joined, weights], maker.moments_shape())
    assert h.shape is not None
    total = maker.add("ReduceSum", [weighted, maker.axes], h.shape, keepdims=1)
    h.replace_all_uses_with(total, replace_graph_outputs=True)
    name, h.name = h.name, f"{h.name}.horner"
    total.name = name  # what reads it by name, a pass of the streamed form, still finds it
    model.graph.insert_before(found.reduce, maker.nodes)
    _drop_unused(model, found.reduce)


class _Maker:
    """Makes the nodes of one mean; all bear the scope of the mean that they replace."""

    def __init__(self, model: ir.Model, found: _Mean) -> None:
        self._model, self._found, self.nodes = model, found, list[ir.Node]()
        self._scope = str(found.reduce.name).rpartition("/")[0]
        self._name = f"{found.reduce.outputs[0].name}.moments"  # a layer that is called twice has two in its scope
        axes = found.reduce.inputs[1]
        assert axes is not None
        self.axes = axes

    def add(self, operator: str, inputs: Sequence[ir.Value | None], shape: ir.Shape, **attributes: int) -> ir.Value:
        """A node of one FP32 output."""
        number = len(self.nodes)
        made = ir.node(operator, inputs, attributes, name=f"{self._scope}/{self._name}/{operator}_{number}".lstrip("/"))
        output = made.outputs[0]
        output.name, output.shape, output.type = self._full(str(number)), shape, ir.TensorType(ir.DataType.FLOAT)
        self.nodes.append(made)
        return output

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """A weight of the graph."""
        full = self._full(name)
        value = ir.Value(name=full, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        value.const_value = ir.tensor(np.ascontiguousarray(array, np.float32), name=full)
        self._model.graph.register_initializer(value)
        return value

    def _full(self, name: str) -> str:
        return f"{self._scope}.{self._name}.{name}".lstrip(".")

    def moments_shape(self, channels: int | None = None) -> ir.Shape:
        """(B, D, k), or of some channels."""
        shape = self._found.a.shape
        assert shape is not None
        return ir.Shape([shape[0], channels or shape[1], len(self._found.coefficients)])

    def blocks(self) -> list[ir.Value]:
        """The moments of each block of channels."""
        chain, shape = self._found.chain, self._found.a.shape
        assert shape is not None
        channels = shape[1]
        if not chain or not isinstance(channels, int) or channels < 2 * CHANNEL_BLOCK:
            return [self._moments(self._found.a, None)]
        edges = [round(i * channels / (channels // CHANNEL_BLOCK)) for i in range(channels // CHANNEL_BLOCK + 1)]
        return [self._moments(self._rows(low, high), high - low) for low, high in itertools.pairwise(edges)]

    def _rows(self, low: int, high: int) -> ir.Value:
        """``a`` for some rows of W."""
        shape = self._found.a.shape
        assert shape is not None
        current: ir.Value | None = None
        for node in self._found.chain:
            inputs: list[ir.Value | None] = []
            for value in node.inputs:
                sliced = value is not None and value.const_value is not None and len(value.const_value.shape) == 2
                if value is not None and value.const_value is None:
                    inputs.append(value if current is None else current)
                elif sliced and value is not None and value.const_value is not None:
                    inputs.append(self.constant(value.const_value.numpy()[low:high], f"{value.name}.{low}"))
                else:
                    inputs.append(value)
            current = self.add(node.op_type, inputs, ir.Shape([shape[0], high - low, shape[2]]))
            current.producer().attributes.update(node.attributes)  # type: ignore[union-attr]
        assert current is not None
        return current

    def _moments(self, a: ir.Value, channels: int | None) -> ir.Value:
        """Mean or sum of a, a^2, .. side by side: (B, D_b, k)."""
        shape = a.shape
        assert shape is not None
        for mask in self._found.masks:
            a = self.add("Mul", [a, mask], shape)
        means, power = [], a
        for degree in range(1, len(self._found.coefficients) + 1):
            power = a if degree == 1 else self.add("Mul", [power, a], shape)
            short = ir.Shape([shape[0], shape[1], 1])
            means.append(self.add(self._found.reduce.op_type, [power, self.axes], short, keepdims=1))
        return self.add("Concat", means, self.moments_shape(channels), axis=2)


def _drop_unused(model: ir.Model, last: ir.Node) -> None:
    """Remove a node and what only it needed."""
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        inputs = [value for value in dict.fromkeys(node.inputs) if value is not None]
        model.graph.remove(node, safe=True)
        for value in inputs:
            producer = value.producer()
            if producer is not None and producer.graph is not None:
                waiting.append(producer)
            elif producer is None and value.is_initializer() and not value.uses():
                del model.graph.initializers[str(value.name)]
