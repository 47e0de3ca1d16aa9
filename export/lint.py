"""Rules that every exported graph keeps. Each is an error that names the node, and with it the module path.

A graph that breaks one of them converts without complaint and then fails far from here: an engine that does not load, a
layer that returns NaN in FP16, a million tokens that need a terabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from pom_edge.errors import GateError
from pom_edge.export.cost import elements_at, graph_cost, graph_nodes, has_shape
from pom_edge.export.inputs import BATCH, CONTEXT, TOKENS
from pom_edge.export.onnx_graph import MAX_IR_VERSION, OPSET, Graph

FORBIDDEN = frozenset({"Loop", "Scan", "If", "NonZero", "SequenceMap"})
HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
INTEGERS = frozenset({ir.DataType.INT8, ir.DataType.INT4})
FP16_MAX = 65504.0
SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL2", "ReduceSumSquare", "CumSum"})
SQUARE_TOKENS = 65536  # far beyond any model width, so that an N x N tensor cannot be mistaken for N x D
GROWTH_TOKENS = 4096
MAX_GROWTH = 4.2  # from N to 4 N: linear, with room for what does not depend on N

__all__ = ["Finding", "GraphContext", "find_faults", "lint"]


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.message}"


@dataclass
class GraphContext:
    """What the rules need to know beside the graph.

    Attributes:
        graph: the exported graph.
        opset: expected version of the standard domain.
        for_tensorrt: forbids CumSum altogether.
        notes: filled by rules that could not apply, with the reason.
    """

    graph: Graph
    opset: int = OPSET
    for_tensorrt: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> ir.Model:
        """The graph's model."""
        return self.graph.model


Rule = Callable[[GraphContext], Iterator[Finding]]


def standard_domain(context: GraphContext) -> Iterator[Finding]:
    """Only operators of the ONNX standard, at the expected opset and a file version that runtimes know."""
    for node in graph_nodes(context.model):
        if node.domain not in ("", "ai.onnx"):
            yield Finding("standard-domain", str(node.name), f"operator {node.domain}::{node.op_type} is not standard ONNX")
    extra = sorted(set(context.model.opset_imports) - {"", "ai.onnx"})
    if extra or context.model.functions:
        yield Finding("standard-domain", "graph", f"imports {extra or 'local functions'}; expected the standard domain alone")
    found = context.model.opset_imports.get("")
    if found != context.opset:
        yield Finding("opset", "graph", f"opset {found}, expected {context.opset}")
    if context.model.ir_version > MAX_IR_VERSION:
        yield Finding("ir-version", "graph", f"IR version {context.model.ir_version}, expected at most {MAX_IR_VERSION}")


def no_control_flow(context: GraphContext) -> Iterator[Finding]:
    """No loops, branches or data-dependent shapes."""
    for node in graph_nodes(context.model):
        if node.op_type in FORBIDDEN:
            yield Finding("control-flow", str(node.name), f"{node.op_type} does not compile to every target")


def no_half_pow(context: GraphContext) -> Iterator[Finding]:
    """Pow overflows in half precision where the product would not (onnxsim#1742)."""
    for node in graph_nodes(context.model):
        if node.op_type == "Pow" and any(value is not None and value.dtype in HALF for value in node.inputs):
            yield Finding("half-pow", str(node.name), "Pow in half precision; write the power as Mul, or keep it FP32")


def no_half_sums(context: GraphContext) -> Iterator[Finding]:
    """A sum of many terms loses or overflows in half precision, even where its result would fit."""
    for node in graph_nodes(context.model):
        if node.op_type in SUMS and any(value is not None and value.dtype in HALF for value in node.inputs[:1]):
            yield Finding("half-sum", str(node.name), f"{node.op_type} in half precision; keep sums FP32")


def one_scale_for_a_pair(context: GraphContext) -> Iterator[Finding]:
    """What QuantizeLinear divides by, DequantizeLinear multiplies with."""
    for node in graph_nodes(context.model):
        source = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
        if source is None or source.op_type != "QuantizeLinear":
            continue
        scales = [
            v.const_value.numpy() for v in (source.inputs[1], node.inputs[1]) if v is not None and v.const_value is not None
        ]
        if len(scales) == 2 and not np.array_equal(scales[0], scales[1]):
            yield Finding(
                "int8-scale", str(node.name), f"scale {scales[1]} after a QuantizeLinear of {scales[0]}; expected one"
            )


def finite_half_constants(context: GraphContext) -> Iterator[Finding]:
    """No FP16 constant that is infinite: mask sentinels become -inf and then NaN (coremltools#2669)."""
    for value, users in _constants(context.model):
        if value.dtype in HALF and value.const_value is not None:
            largest = np.abs(value.const_value.numpy().astype(np.float64)).max(initial=0.0)
            if not largest <= FP16_MAX:
                yield Finding("half-constant", users, f"constant {value.name!r} reaches {largest}; FP16 ends at {FP16_MAX}")
    for node in graph_nodes(context.model):
        made = node.outputs[0].dtype in HALF
        if made and node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].const_value is not None:
            array = node.inputs[0].const_value.numpy()
        elif made and node.op_type == "ConstantOfShape" and "value" in node.attributes:
            array = node.attributes["value"].as_tensor().numpy()
        else:
            continue
        largest = np.abs(array.astype(np.float64)).max(initial=0.0)
        if not largest <= FP16_MAX:
            yield Finding("half-constant", str(node.name), f"makes a constant of {largest}; FP16 ends at {FP16_MAX}")


def cumsum_is_portable(context: GraphContext) -> Iterator[Finding]:
    """CumSum forward, inclusive, on one axis, and not at all for TensorRT (TensorRT#4513, onnx-tensorrt#1034)."""
    axes = set()
    for node in graph_nodes(context.model):
        if node.op_type != "CumSum":
            continue
        if context.for_tensorrt:
            yield Finding("cumsum", str(node.name), "CumSum in a graph meant for TensorRT too; use the MatMul running sum")
        if node.attributes.get_int("reverse", 0) or node.attributes.get_int("exclusive", 0):
            yield Finding("cumsum", str(node.name), "reverse or exclusive CumSum; only the forward, inclusive one is portable")
        axis = node.inputs[1]
        axes.add(str(axis.const_value.numpy()) if axis is not None and axis.const_value is not None else "variable")
        if len(axes) > 1:
            yield Finding("cumsum", str(node.name), f"CumSum on several axes ({', '.join(sorted(axes))}) in one graph")


def symmetric_int8(context: GraphContext) -> Iterator[Finding]:
    """QuantizeLinear has an int8 zero point of 0: TensorRT reads anything else as that, silently."""
    for node in _quantizers(context):
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        source = node.inputs[0]
        if node.op_type == "DequantizeLinear" and source is not None and source.dtype not in INTEGERS:
            yield Finding(
                "int8-type",
                str(node.name),
                f"DequantizeLinear reads {source.dtype}; expected int8 (int32 biases are refused by TensorRT: keep them float)",
            )
        if node.op_type == "QuantizeLinear" and (zero is None or zero.dtype != ir.DataType.INT8):
            kind = "no zero point (uint8 in ONNX, INT8 in TensorRT)" if zero is None else f"a zero point of {zero.dtype}"
            yield Finding("int8-zero-point", str(node.name), f"QuantizeLinear has {kind}; expected int8 0")
        elif zero is not None and (zero.const_value is None or zero.const_value.numpy().any()):
            yield Finding("int8-zero-point", str(node.name), f"{node.op_type} has a zero point other than 0")


def int8_scales(context: GraphContext) -> Iterator[Finding]:
    """Scales are positive constants: one for an activation; for a weight one, or one for each output channel or block."""
    for node in _quantizers(context):
        scale, source = node.inputs[1], node.inputs[0]
        if scale is None or scale.const_value is None:
            yield Finding(
                "int8-scale", str(node.name), f"{node.op_type} has a scale that is computed at run time; expected a constant"
            )
            continue
        numbers = scale.const_value.numpy().astype(np.float64)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            yield Finding(
                "int8-scale", str(node.name), f"{node.op_type} has a scale of {numbers.min()}; expected finite, above 0"
            )
        if numbers.size == 1 and numbers.ndim <= 1:
            continue
        if source is None or source.const_value is None:
            yield Finding(
                "int8-scale", str(node.name), f"an activation has {numbers.size} scales; TensorRT takes one for the tensor"
            )
        else:
            yield from _channel_axis(node, source.const_value.shape.numpy(), numbers.shape)


def _channel_axis(node: ir.Node, weight: Sequence[int], scales: tuple[int, ...]) -> Iterator[Finding]:
    """Whether a weight's scales lie along its output channels, and its blocks along what its GEMM adds up."""
    axis, block = node.attributes.get_int("axis", 1) % len(weight), node.attributes.get_int("block_size", 0)
    expected: tuple[int, ...] = (weight[axis],)
    if block:
        expected = tuple(-(-length // block) if i == axis else length for i, length in enumerate(weight))
    if scales != expected:
        yield Finding(
            "int8-axis", str(node.name), f"scales {scales} for a weight {weight} along axis {axis}; expected {expected}"
        )
    for usage in node.outputs[0].uses():
        gemm, index = usage.node, usage.idx
        added = _added_axis(gemm, index, len(weight))
        if added is not None and (axis == added) != bool(block):
            yield Finding("int8-axis", str(node.name), f"axis {axis} is {'not ' if block else ''}what {gemm.name} adds up")
        other = gemm.inputs[1 - index] if gemm.op_type == "MatMul" else None
        made_by = None if other is None else other.producer()
        if index == 0 and not block and made_by is not None and made_by.op_type == "DequantizeLinear":
            yield Finding(
                "int8-operand",
                str(gemm.name),
                "its weight is the first operand; ONNX Runtime takes scales for channels only on the second",
            )


def _added_axis(gemm: ir.Node, index: int, rank: int) -> int | None:
    """The axis of a weight along which a GEMM sums; None for other nodes."""
    if gemm.op_type == "MatMul":
        return rank - (1 if index == 0 else 2)
    if gemm.op_type == "Gemm" and index < 2:
        turned = bool(gemm.attributes.get_int("transB" if index else "transA", 0))
        return 1 if turned == bool(index) else 0
    return 1 if gemm.op_type == "Conv" and index == 1 else None


def _quantizers(context: GraphContext) -> Iterator[ir.Node]:
    return (node for node in graph_nodes(context.model) if node.op_type in ("QuantizeLinear", "DequantizeLinear"))


def native_layer_norm(context: GraphContext) -> Iterator[Finding]:
    """A LayerNorm of the model is one LayerNormalization node: decomposed, its square overflows in FP16."""
    for node in graph_nodes(context.model):
        path = str(node.name).rpartition("/")[0]
        if path in context.graph.layer_norms and node.op_type in ("ReduceMean", "Pow", "Sqrt"):
            yield Finding("layer-norm", str(node.name), "LayerNorm was decomposed; expected LayerNormalization")


def nothing_local(context: GraphContext) -> Iterator[Finding]:
    """No stack traces, paths or source lines of the machine that exported."""
    for node in graph_nodes(context.model):
        if node.metadata_props or node.doc_string:
            yield Finding("local-metadata", str(node.name), "carries exporter metadata; it must be stripped")


def free_axes_are_free(context: GraphContext) -> Iterator[Finding]:
    """An output that an input's free axis should reach still has that axis."""
    free = {str(dim) for value in context.model.graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
    for value in context.model.graph.outputs:
        reached = " ".join(str(dim) for dim in value.shape or () if not isinstance(dim, int))
        if BATCH in free and BATCH not in reached:
            yield Finding("free-axes", f"output {value.name}", f"shape {value.shape} lost the batch axis: the model pins it")


def no_square_tensor(context: GraphContext) -> Iterator[Finding]:
    """No tensor of ours grows with the square of the tokens, unless the caller gave a mask for each query."""
    if any(value.name == "mask" and len(value.shape or ()) == 3 for value in context.model.graph.inputs):
        context.notes.append("square-tensor: not applied, the caller's mask is one row of N for each query")
        return
    for node in _square_nodes(context):
        if _inside(str(node.name), context.graph.mixers):
            yield Finding(
                "square-tensor",
                str(node.name),
                f"{node.op_type} makes a tokens x tokens tensor, or one of unknown size. Causal mixing needs none: "
                "causal=True, with a padding mask where there is one",
            )


def linear_cost(context: GraphContext) -> Iterator[Finding]:
    """Operations and bytes grow by at most 4.2 from N to 4 N tokens, for models whose only token mixing is PoM."""
    sizes = _sizes(context.model, GROWTH_TOKENS)
    if TOKENS not in sizes or not context.graph.mixers:
        what = "the graph has no free token axis" if TOKENS not in sizes else "no mixer of the graph is known"
        context.notes.append(f"linear-cost: not applied, {what}")
        return
    outside = [node for node in _square_nodes(context) if not _inside(str(node.name), context.graph.mixers)]
    if outside or any(value.name == "mask" and len(value.shape or ()) == 3 for value in context.model.graph.inputs):
        where = outside[0].name if outside else "the mask for each query"
        context.notes.append(f"linear-cost: not applied, the model mixes tokens in another way too ({where})")
        return
    once, four = graph_cost(context.model, sizes), graph_cost(context.model, _sizes(context.model, 4 * GROWTH_TOKENS))
    for name, growth in (("operations", four.flops / once.flops), ("bytes", four.bytes / once.bytes)):
        if growth > MAX_GROWTH:
            yield Finding("linear-cost", "graph", f"{name} grow {growth:.2f}x from N to 4 N; expected at most {MAX_GROWTH}x")


RULES: tuple[Rule, ...] = (
    standard_domain,
    no_control_flow,
    no_half_pow,
    no_half_sums,
    one_scale_for_a_pair,
    finite_half_constants,
    cumsum_is_portable,
    symmetric_int8,
    int8_scales,
    native_layer_norm,
    nothing_local,
    free_axes_are_free,
    no_square_tensor,
    linear_cost,
)


def find_faults(context: GraphContext) -> list[Finding]:
    """Every broken rule of a graph."""
    findings: list[Finding] = []
    for rule in RULES:
        try:
            findings.extend(rule(context))
        except GateError as error:  # a shape that depends on data: its cost has no bound
            findings.append(Finding("shape", "graph", str(error)))
    return findings


def lint(context: GraphContext) -> list[str]:
    """Apply all rules.

    Returns:
        Notes on rules that could not apply.

    Raises:
        GateError: rules are broken; the message lists them with node and module path.
    """
    findings = find_faults(context)
    if findings:
        listed = "\n  ".join(str(finding) for finding in findings[:8])
        more = f"\n  and {len(findings) - 8} more" if len(findings) > 8 else ""
        raise GateError(f"the exported graph breaks {len(findings)} rule(s):\n  {listed}{more}")
    return context.notes


def _square_nodes(context: GraphContext) -> Iterator[ir.Node]:
    """Nodes that write a tokens x tokens tensor, or one whose size is not known."""
    sizes = _sizes(context.model, SQUARE_TOKENS)
    if TOKENS not in sizes:
        return
    larger = _sizes(context.model, 4 * SQUARE_TOKENS)
    for node in graph_nodes(context.model):
        if any(not has_shape(value) or _is_square(value, sizes, larger) for value in node.outputs):
            yield node


def _is_square(value: ir.Value, sizes: dict[str, int], larger: dict[str, int]) -> bool:
    """As many elements as tokens squared (a running sum's small triangle is not), growing with the square (N x D does not)."""
    elements = elements_at(value, sizes)
    return elements >= SQUARE_TOKENS**2 // 4 and elements_at(value, larger) > 8 * elements


def _sizes(model: ir.Model, tokens: int) -> dict[str, int]:
    """One sequence of ``tokens`` tokens (and as many context tokens); other free axes likewise."""
    free = {str(dim) for value in model.graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
    return {axis: 1 if axis == BATCH else tokens for axis in sorted(free | ({CONTEXT} & free))}


def _inside(node_name: str, paths: list[str]) -> bool:
    return any(path == "" or node_name.startswith((path + "/", path + ".")) for path in paths)


def _constants(model: ir.Model) -> Iterator[tuple[ir.Value, str]]:
    """Every constant with the name of a node that uses it."""
    for value in model.graph.initializers.values():
        users = [str(usage.node.name) for usage in value.uses()]
        yield value, users[0] if users else "graph"
    for node in graph_nodes(model):
        if node.op_type == "Constant":
            yield node.outputs[0], str(node.name)
