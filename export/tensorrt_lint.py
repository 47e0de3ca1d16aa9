"""What TensorRT does not take, found before minutes of building, and before a device is at hand.

TensorRT-RTX's parser accepts what TensorRT documents as illegal (scales for each channel of an activation, mixed types), so
that "it parsed" proves nothing. The findings are made at export, where onnx is, and travel in the manifest to the device, where
it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir

from pom_edge.export.cost import graph_nodes
from pom_edge.export.lint import (
    Finding,
    GraphContext,
    cumsum_is_portable,
    finite_half_constants,
    int8_scales,
    no_control_flow,
    no_half_pow,
    standard_domain,
    symmetric_int8,
)
from pom_edge.export.onnx_graph import Graph

LOWEST_OPSET, OLD_PARSER_OPSET = 9, 20  # 9 to 20 is what JetPack 6's parser (10.3) covers
SCALES_IN_HALF_FROM = 19
UNSUPPORTED = frozenset(
    {"QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "NonZero", "Unique", "Optional"}
)
SAME_TYPE = frozenset(
    {"Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Conv", "Concat", "Max", "Min", "Sum", "Pow", "LayerNormalization"}
)
CONSTANT_INPUTS = {"Clip": (1, 2), "ReduceMean": (1,), "ReduceSum": (1,), "ReduceMax": (1,), "CumSum": (1,)}
PASSED_THROUGH = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Mul"})  # still crash
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
FLOATS = HALVES | {ir.DataType.FLOAT}

__all__ = ["find_illegal", "tensorrt_facts"]

Rule = Callable[[GraphContext], Iterator[Finding]]


def supported_operators(context: GraphContext) -> Iterator[Finding]:
    """Operators that no version from 10.3 on has."""
    for node in graph_nodes(context.model):
        if node.op_type in UNSUPPORTED:
            yield Finding(
                "trt-operator", str(node.name), f"TensorRT has no {node.op_type}; quantize by Q/DQ pairs of constant scale"
            )


def one_type(context: GraphContext) -> Iterator[Finding]:
    """A strongly typed network does not cast by itself: operands of one node have one floating-point type."""
    for node in graph_nodes(context.model):
        if node.op_type not in SAME_TYPE:
            continue
        types = sorted({value.dtype.name for value in node.inputs if value is not None and value.dtype in FLOATS})
        if len(types) > 1:
            yield Finding("trt-types", str(node.name), f"{node.op_type} mixes {' and '.join(types)}; a Cast must make them one")


def constant_parameters(context: GraphContext) -> Iterator[Finding]:
    """Bounds of Clip and axes of reductions are constants, or the node does not become a layer."""
    for node in graph_nodes(context.model):
        for index in CONSTANT_INPUTS.get(node.op_type, ()):
            value = node.inputs[index] if len(node.inputs) > index else None
            if value is not None and value.const_value is None and not _is_constant_node(value):
                yield Finding("trt-constant", str(node.name), f"input {index} of {node.op_type} is computed at run time")


def float_biases(context: GraphContext) -> Iterator[Finding]:
    """A bias that goes through DequantizeLinear is refused; biases stay float."""
    for node in graph_nodes(context.model):
        if node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2:
            bias = node.inputs[2]
            made_by = None if bias is None else bias.producer()
            if made_by is not None and made_by.op_type == "DequantizeLinear":
                yield Finding("trt-bias", str(node.name), "its bias comes out of DequantizeLinear; keep biases float")


def scale_types(context: GraphContext) -> Iterator[Finding]:
    """Scales in FP16 exist from opset 19 on."""
    opset = context.model.opset_imports.get("", 0)
    for node in graph_nodes(context.model):
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.inputs[1] is None:
            continue
        if node.inputs[1].dtype in HALVES and opset < SCALES_IN_HALF_FROM:
            yield Finding(
                "trt-scale-type", str(node.name), f"a scale of {node.inputs[1].dtype} at opset {opset}; expected 19 or more"
            )


def no_int4_blocks_on_the_left(context: GraphContext) -> Iterator[Finding]:
    """Blocks of INT4 as a MatMul's left operand, without a Cast in between, crash the builder of TensorRT-RTX 1.7.1 (SIGSEGV).

    ``quantize.weights`` writes the Cast. Those on the right build, and so do INT4 weights with one scale for each channel.
    """
    for node in graph_nodes(context.model):
        made_by = node.inputs[0].producer() if node.op_type == "MatMul" and node.inputs[0] is not None else None
        while made_by is not None and made_by.op_type in PASSED_THROUGH and made_by.inputs[0] is not None:
            made_by = made_by.inputs[0].producer()
        if made_by is None or made_by.op_type != "DequantizeLinear" or made_by.inputs[0] is None:
            continue
        if made_by.inputs[0].dtype == ir.DataType.INT4 and "block_size" in made_by.attributes:
            yield Finding(
                "trt-int4-left",
                str(node.name),
                "blocks of 4-bit weights on the left crash TensorRT-RTX 1.7; export the model again, or use --precision w8",
            )


RULES: tuple[Rule, ...] = (
    standard_domain,
    no_control_flow,
    cumsum_is_portable,
    no_half_pow,
    finite_half_constants,
    symmetric_int8,
    int8_scales,
    supported_operators,
    one_type,
    constant_parameters,
    float_biases,
    scale_types,
    no_int4_blocks_on_the_left,
)


def find_illegal(graph: Graph) -> list[Finding]:
    """Everything in a graph that TensorRT does not take."""
    opset = graph.model.opset_imports.get("", 0)
    context = GraphContext(graph, opset, for_tensorrt=True)
    found = [finding for rule in RULES for finding in rule(context)]
    if opset < LOWEST_OPSET:
        found.append(Finding("trt-opset", "graph", f"opset {opset}; TensorRT's parser begins at {LOWEST_OPSET}"))
    return found


def tensorrt_facts(graphs: list[Graph]) -> dict[str, Any]:
    """What a device that compiles these graphs must know of them, for the manifest.

    Returns:
        ``findings``: why TensorRT would refuse them, in words; ``weak_flags``: builder flags for TensorRT below 10.12, which
        cannot type strongly; ``opset``; ``note``: what older parsers do not cover.
    """
    opset = max(graph.model.opset_imports.get("", 0) for graph in graphs)
    return {
        "findings": [str(finding) for graph in graphs for finding in find_illegal(graph)],
        "weak_flags": sorted({flag for graph in graphs for flag in _flags(graph)}),
        "opset": opset,
        "note": f"opset {opset}: the parser of TensorRT 10.3 covers 9 to 20" if opset > OLD_PARSER_OPSET else "",
    }


def _flags(graph: Graph) -> Iterator[str]:
    names = {ir.DataType.FLOAT16: "FP16", ir.DataType.BFLOAT16: "BF16", ir.DataType.INT8: "INT8", ir.DataType.INT4: "INT4"}
    values = [*graph.model.graph.initializers.values(), *(out for node in graph_nodes(graph.model) for out in node.outputs)]
    return (names[value.dtype] for value in values if value.dtype in names)


def _is_constant_node(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Constant"
