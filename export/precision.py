"""Typed half-precision graphs: FP16 or BF16 where it is safe, islands of FP32 where it is not, both written in the graph.

A node computes in half precision when every value that it touches stays within the type's range: by proof
(:mod:`pom_edge.export.ranges`) or, outside of mixers, by what samples showed, with a margin. Sums over tokens, powers, angles
and counts stay in FP32 whatever their values. Graph inputs and outputs stay FP32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx.defs
import onnx_ir as ir

from pom_edge.export.cost import graph_nodes
from pom_edge.export.observed import Seen
from pom_edge.export.ranges import AGGREGATE, UNKNOWN, Range, in_scope, is_float, is_positional

HALF_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
LARGEST = {"fp16": 65504.0, "bf16": 3.3e38}
OBSERVED_MARGIN = 16.0  # what samples showed may grow by this much on other inputs
# A value of normal magnitude loses 2^-11 of itself in FP16, 73 dB; one that falls among the subnormals loses more.
ROUNDING_DB = {"fp16": 60.0, "bf16": 45.0}
# x^2 of a value in range may be out of it, and a sum of many terms loses them in half precision.
ALWAYS_FP32 = {"Pow", "ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "CumSum", "Range"}
MOVING = {
    *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Pad", "Reshape", "Slice"),
    *("SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
}
GEMMS = {"MatMul", "Gemm", "Conv"}

__all__ = ["HALF_TYPES", "Typing", "to_half"]


@dataclass
class Typing:
    """What a graph became.

    Attributes:
        rows: the range table: for each module the largest magnitude, how it is known, and what stays in FP32 and why.
        half_nodes, nodes: floating-point nodes that compute in half precision, and all.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    half_nodes: int = 0
    nodes: int = 0


def to_half(
    model: ir.Model,
    precision: str,
    ranges: Mapping[str, Range],
    seen: Mapping[str, Seen],
    mixers: Collection[str],
    keep: Collection[str] = (),
) -> Typing:
    """Type a graph, in place.

    Args:
        model: in FP32.
        precision: ``"fp16"`` or ``"bf16"``.
        ranges: bounds by value name.
        seen: what samples showed, by value name.
        mixers: module paths whose ranges must be proved.
        keep: module paths that stay in FP32 altogether.
    """
    decision = _Decision(model, precision, ranges, seen, mixers, keep)
    reasons = decision.decide()
    typing = Typing(decision.table(reasons), sum(reason == "" for reason in reasons.values()), len(reasons))
    _apply(model, HALF_TYPES[precision], {node for node, reason in reasons.items() if not reason})
    return typing


class _Decision:
    """Which nodes compute in half precision, and why not the others."""

    def __init__(
        self,
        model: ir.Model,
        precision: str,
        ranges: Mapping[str, Range],
        seen: Mapping[str, Seen],
        mixers: Collection[str],
        keep: Collection[str],
    ) -> None:
        self._model, self._precision, self._ranges, self._seen = model, precision, ranges, seen
        self._mixers, self._keep = mixers, keep
        self._opset = model.opset_imports.get("") or 18

    def decide(self) -> dict[ir.Node, str]:
        """For every floating-point node the reason why it stays in FP32; empty where it does not."""
        positional = {str(v.name): not is_float(v) or "mask" in str(v.name) for v in self._model.graph.inputs}
        reasons: dict[ir.Node, str] = {}
        for node in graph_nodes(self._model):
            angles = is_positional(node, positional)
            positional |= {str(v.name): angles for v in node.outputs}
            if any(is_float(value) for value in node.outputs):
                reasons[node] = "angles, counts, weights" if angles else self._reason(node, reasons)
        return reasons

    def _reason(self, node: ir.Node, reasons: Mapping[ir.Node, str]) -> str:
        path = str(node.name).rpartition("/")[0]
        if any(_within(path, kept) for kept in self._keep):
            return "below its gate in half precision"
        if in_scope(node, AGGREGATE):
            return "sums over tokens"
        if node.op_type in ALWAYS_FP32:
            return "sums" if node.op_type.startswith(("Reduce", "CumSum")) else node.op_type
        if not _allows(node, HALF_TYPES[self._precision], self._opset):
            return f"{node.op_type} has no {self._precision}"
        before = [reasons[p] for v in node.inputs if is_float(v) and (p := _producer(v)) is not None and p in reasons]
        if before and node.op_type not in GEMMS and all(before):
            return before[0]  # what comes from FP32 alone is cast where a product needs it, not earlier
        for value in (*node.inputs, *node.outputs):
            if is_float(value) and value is not None and (why := self._unsafe(value, path)):
                return why
        return ""

    def _unsafe(self, value: ir.Value, path: str) -> str:
        limit = LARGEST[self._precision]
        if value.const_value is not None:
            return _rounding(value.const_value.numpy(), self._precision)
        bound, seen = self._ranges.get(str(value.name), UNKNOWN).largest, self._seen.get(str(value.name))
        if bound > limit:
            in_mixer = any(_within(path, mixer) for mixer in self._mixers)
            if seen is None or in_mixer or seen.largest * OBSERVED_MARGIN > limit:
                return f"reaches {bound:.3g}" if math.isfinite(bound) else "no bound"
        if seen is not None and seen.rounding_db[self._precision] < ROUNDING_DB[self._precision]:
            return f"too small for {self._precision}"
        return ""

    def table(self, reasons: Mapping[ir.Node, str]) -> list[dict[str, Any]]:
        """One row for each module, in order."""
        rows: dict[str, dict[str, Any]] = {}
        for node, reason in reasons.items():
            if reason.startswith("angles"):
                continue
            path = str(node.name).rpartition("/")[0]
            row = rows.setdefault(path, {"module": path, "largest": 0.0, "basis": "proved", "fp32": {}})
            for value in node.outputs:
                bound, seen = self._ranges.get(str(value.name), UNKNOWN).largest, self._seen.get(str(value.name))
                if math.isinf(bound) and in_scope(node, AGGREGATE):
                    continue  # a sum on its way to a mean, in FP32
                if math.isinf(bound) or (not reason and bound > LARGEST[self._precision]):
                    row["basis"] = "observed, not proved"
                    bound = seen.largest if seen else 0.0
                row["largest"] = max(row["largest"], float(f"{bound:.4g}"))
            if reason:
                row["fp32"][node.op_type] = reason
        return list(rows.values())


def _within(path: str, module: str) -> bool:
    return module == "" or path == module or path.startswith(module + ".")


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _rounding(array: np.ndarray, precision: str) -> str:
    """Why a constant cannot be rounded; empty where it can."""
    wide = array.astype(np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    if largest > LARGEST[precision]:
        return f"a constant of {largest:.3g}"
    error = float(np.square(rounded(array, precision).astype(np.float64) - wide).sum())
    signal = float(np.square(wide).sum())
    small = error > 0 and 10 * math.log10(signal / error) < ROUNDING_DB[precision]
    return f"a constant too small for {precision}" if small else ""


def rounded(array: np.ndarray, precision: str) -> np.ndarray:
    """To the half type and its nearest values."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16 if precision == "fp16" else ml_dtypes.bfloat16)


def _allows(node: ir.Node, half: ir.DataType, opset: int) -> bool:
    """Whether the operator's specification has the type (HardSigmoid has no BF16 before opset 22)."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    names = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    wanted = "tensor(float16)" if half == ir.DataType.FLOAT16 else "tensor(bfloat16)"
    return all(wanted in names.get(out.type_str, [wanted]) for out in schema.outputs[:1])


def _apply(model: ir.Model, half: ir.DataType, nodes: Collection[ir.Node]) -> None:
    """Write the types into the graph, with a Cast wherever they change."""
    graph = model.graph
    casts: dict[tuple[str, ir.DataType], ir.Value] = {}
    for node in graph_nodes(model):
        own = half if node in nodes else ir.DataType.FLOAT
        produces = any(is_float(value) for value in node.outputs)
        for i, value in enumerate(node.inputs):
            if value is None or not is_float(value):
                continue
            wanted = own if produces else (value.dtype or own)  # a comparison, a shape, a cast to integers takes what comes
            if node.op_type == "Cast" and produces:
                continue
            if value.dtype != wanted:
                node.replace_input_with(i, _cast(graph, value, wanted, casts, node))
        if node.op_type == "Cast" and produces:
            node.attributes["to"] = ir.AttrInt64("to", int(own))
        if produces and own == half:
            for value in node.outputs:
                if is_float(value):
                    value.type = ir.TensorType(half)  # a clone shares its types with the original
    for i, value in enumerate(graph.outputs):
        if value.dtype == half:
            producer = value.producer()
            assert producer is not None
            name = str(value.name)
            value.name = f"{name}.{_suffix(half)}"
            cast = _cast_node(value, ir.DataType.FLOAT, name, f"{producer.name}/Cast_output")
            graph.append(cast)
            graph.outputs[i] = cast.outputs[0]
    for name in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        del graph.initializers[name]


def _cast(
    graph: ir.Graph, value: ir.Value, wanted: ir.DataType, casts: dict[tuple[str, ir.DataType], ir.Value], user: ir.Node
) -> ir.Value:
    key = (str(value.name), wanted)
    if key not in casts:
        name = f"{value.name}.{_suffix(wanted)}"
        if value.const_value is not None and value.is_initializer():
            precision = "bf16" if wanted == ir.DataType.BFLOAT16 else "fp16"
            tensor = ir.tensor(rounded(value.const_value.numpy(), precision), name=name)
            casts[key] = ir.Value(name=name, type=ir.TensorType(wanted), shape=value.shape, const_value=tensor)
            graph.register_initializer(casts[key])
        else:
            producer = value.producer()
            where = (
                f"{producer.name}/Cast" if producer is not None else f"{str(user.name).rpartition('/')[0]}/Cast_{value.name}"
            )
            cast = _cast_node(value, wanted, name, f"{where}_{_suffix(wanted)}")
            if producer is None:
                graph.insert_before(graph[0], cast)
            else:
                graph.insert_after(producer, cast)
            casts[key] = cast.outputs[0]
    return casts[key]


def _cast_node(value: ir.Value, wanted: ir.DataType, name: str, node_name: str) -> ir.Node:
    output = ir.Value(name=name, type=ir.TensorType(wanted), shape=value.shape)
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(wanted))], outputs=[output], name=node_name)


def _suffix(dtype: ir.DataType) -> str:
    return {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}[dtype]
