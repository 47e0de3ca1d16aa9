"""What a graph costs, as formulas: operations and bytes of every node from the symbolic shapes, evaluated at any size.

No run, no timing: torch leaves a symbolic shape on every value (``32*(tokens//32) + 64``), so the cost at a million tokens
is arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from pom_edge.errors import GateError, InputError
from pom_edge.formula import evaluate

__all__ = ["Cost", "elements_at", "gemm_flops", "graph_cost", "graph_nodes", "has_shape", "shape_at"]


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved."""

    flops: float
    bytes: float


def shape_at(value: ir.Value, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a value when the free axes have the given lengths.

    Raises:
        GateError: the shape is not known from the inputs: it depends on data, or the exporter left none.
    """
    if not has_shape(value):
        raise GateError(f"value {value.name!r} has no shape: its cost cannot be bounded")
    return [dim if isinstance(dim, int) else _evaluate(str(dim.value), sizes, value) for dim in value.shape or ()]


def has_shape(value: ir.Value) -> bool:
    """Whether every dimension is a number or a formula. torch 2.13 leaves none inside decomposed attention."""
    return value.shape is not None and all(isinstance(dim, int) or dim.value is not None for dim in value.shape)


def _evaluate(expression: str, sizes: Mapping[str, int], value: ir.Value) -> int:
    try:
        return evaluate(expression, sizes)
    except InputError:
        raise GateError(f"value {value.name!r} has a shape that is not known from the inputs: {expression}") from None


def graph_cost(model: ir.Model, sizes: Mapping[str, int]) -> Cost:
    """Sum over the nodes of a graph.

    Matrix products count 2 M N K; every other operator one operation for each element it writes (Erf and its like cost
    more, but by a constant that no growth depends on). Bytes are those of all inputs and outputs. Values without a shape
    (see :func:`has_shape`) are left out; the lint says where they are.
    """
    flops = moved = 0.0
    for node in graph_nodes(model):
        written = sum(_elements(value, sizes) for value in node.outputs)
        inner = _inner_length(node, sizes)
        flops += written * (2 * inner if inner else 1)
        moved += sum(_elements(v, sizes) * _itemsize(v) for v in (*node.inputs, *node.outputs) if v is not None)
    return Cost(flops, moved)


def gemm_flops(model: ir.Model) -> str:
    """Operations of a graph's matrix products, 2 M N K each, as a formula of its free axes."""
    terms: dict[str, int] = {}
    for node in graph_nodes(model):
        inner = _inner(node)
        shape = node.outputs[0].shape if inner is not None else None
        if shape is None or not has_shape(node.outputs[0]):
            continue
        parts = [dim for dim in (*shape, inner) if dim is not None]
        fixed = 2 * math.prod(int(dim) for dim in parts if isinstance(dim, int))
        free = "*".join(sorted(f"({dim.value})" for dim in parts if isinstance(dim, ir.SymbolicDim))) or "1"
        terms[free] = terms.get(free, 0) + fixed
    return " + ".join(f"{count}*{free}" for free, count in sorted(terms.items())) or "0"


def _inner(node: ir.Node) -> int | ir.SymbolicDim | None:
    """K of a matrix product; None for any other operator."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type in ("MatMul", "Gemm") and first is not None and first.shape is not None and has_shape(first):
        shape = list(first.shape)
        return shape[0 if node.op_type == "Gemm" and bool(node.attributes.get_int("transA", 0)) else -1]
    kernel = node.inputs[1] if node.op_type == "Conv" else None
    if kernel is not None and kernel.const_value is not None:
        return math.prod(kernel.const_value.shape.numpy()[1:])
    return None


def graph_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes in order, as a list."""
    return list(model.graph)


def elements_at(value: ir.Value, sizes: Mapping[str, int]) -> int:
    """How many elements a value has at these sizes."""
    return math.prod(shape_at(value, sizes))


def _elements(value: ir.Value | None, sizes: Mapping[str, int]) -> int:
    return 0 if value is None or not has_shape(value) else elements_at(value, sizes)


def _itemsize(value: ir.Value) -> float:
    return 4.0 if value.dtype is None else float(value.dtype.itemsize)


def _inner_length(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """K of a matrix product (0 for any other operator)."""
    if node.op_type in ("MatMul", "Gemm") and node.inputs[0] is not None and has_shape(node.inputs[0]):
        shape = shape_at(node.inputs[0], sizes)
        transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transA", 0))
        return shape[0] if transposed else shape[-1]
    if node.op_type == "Conv" and node.inputs[1] is not None:
        return math.prod(shape_at(node.inputs[1], sizes)[1:])
    return 0
