"""The ONNX side of INT8: what torch.onnx leaves to do once a quantized program is translated.

    DequantizeLinear(W, axis 0) -> Transpose -> MatMul   ==   DequantizeLinear(W^T, axis 1) -> MatMul

and, both for ONNX Runtime (1.32): QuantizeLinear and DequantizeLinear of its own for each GEMM, or none of the GEMMs that share
a pair is fused to an integer kernel; a zero point of its own for each node, or its exact mode (session.x64quantprecision) fails
("Attempt to replace the existing tensor").
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pom_edge.export.onnx_graph import Graph

HALF_OPSET = 19  # QuantizeLinear and DequantizeLinear of FP16

__all__ = ["HALF_OPSET", "add_constant", "drop_unused", "finish", "replace_constant"]


def finish(graph: Graph) -> Graph:
    """Lay weights out as their GEMMs read them and give every node its own zero point. Changes the graph in place.

    Args:
        graph: a quantized program, translated.
    """
    _half_scales(graph.model)
    for node in list(graph.model.graph):
        if node.op_type == "DequantizeLinear" and _constant(node.inputs[0]) is not None:
            _transpose_beforehand(graph.model, node)
            _name_weight(graph.model, node)
    for node in list(graph.model.graph):
        if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and node.inputs[0].producer() is not None:
            _own_pairs(graph.model, node)
    _name_pairs(graph.model)
    for node in graph.model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _own_zero_point(graph.model, node)
    drop_unused(graph.model)
    return graph


def _constant(value: ir.Value | None) -> np.ndarray | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _half_scales(model: ir.Model) -> None:
    """Between FP16 values the scales are FP16 too, as opset 19 allows: no casts that would keep a GEMM from fusing."""
    changed = False
    for node in list(model.graph):
        half = False
        if node.op_type == "QuantizeLinear":
            half = node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT16
        elif node.op_type == "DequantizeLinear":
            readers = [usage.node for usage in node.outputs[0].uses()]
            casts = [
                reader for reader in readers if reader.op_type == "Cast" and reader.outputs[0].dtype == ir.DataType.FLOAT16
            ]
            half = bool(readers) and len(casts) == len(readers)
            for cast in casts if half else []:
                ir.convenience.replace_all_uses_with(cast.outputs[0], node.outputs[0])
                model.graph.remove(cast, safe=True)
            half = half or node.outputs[0].dtype == ir.DataType.FLOAT16
            if half:
                node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
        changed |= half
        scale = _constant(node.inputs[1]) if half else None
        if scale is not None and scale.dtype == np.float32:
            rounded = np.maximum(scale.astype(np.float16), np.finfo(np.float16).smallest_subnormal)
            replace_constant(model, node, 1, rounded, f"{node.outputs[0].name}_scale")
    if changed:
        model.opset_imports[""] = max(HALF_OPSET, model.opset_imports[""])
    for node in list(model.graph):  # a pair has one scale, also where one of the two is FP32
        before = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
        if before is None or before.op_type != "QuantizeLinear":
            continue
        first, second = _constant(before.inputs[1]), _constant(node.inputs[1])
        if first is None or second is None or first.dtype == second.dtype:
            continue
        # the rounded value is one that both types have
        wider, rounded = (before, second) if second.dtype == np.float16 else (node, first)
        replace_constant(model, wider, 1, rounded.astype(np.float32), f"{wider.outputs[0].name}_scale")


def _transpose_beforehand(model: ir.Model, node: ir.Node) -> None:
    """Where every reader of a dequantized weight transposes it in one way, store it so."""
    (output,) = node.outputs
    readers = [usage.node for usage in output.uses()]
    orders = {tuple(reader.attributes["perm"].as_ints()) for reader in readers if reader.op_type == "Transpose"}
    if not readers or len(orders) != 1 or any(reader.op_type != "Transpose" for reader in readers):
        return
    order = orders.pop()
    weight, source = _constant(node.inputs[0]), node.inputs[0]
    assert weight is not None
    assert source is not None
    replace_constant(model, node, 0, np.ascontiguousarray(weight.transpose(order)), str(source.name))
    if (scale := _constant(node.inputs[1])) is not None and scale.ndim:
        node.attributes["axis"] = ir.AttrInt64("axis", order.index(node.attributes.get_int("axis", 1) % weight.ndim))
    output.shape = ir.Shape([weight.shape[i] for i in order])
    for reader in readers:
        ir.convenience.replace_all_uses_with(reader.outputs[0], output)
        model.graph.remove(reader, safe=True)


def _name_weight(model: ir.Model, node: ir.Node) -> None:
    """torchao calls integer weights _frozen_param0 and so on: here they have the name of their module."""
    weight, source = _constant(node.inputs[0]), node.inputs[0]
    if weight is not None and source is not None and str(source.name).startswith("_frozen_param") and source.is_initializer():
        replace_constant(model, node, 0, weight, f"{str(node.name).rpartition('/')[0]}.weight_int8".lstrip("."))


def _own_pairs(model: ir.Model, dequantize: ir.Node) -> None:
    """Every further reader of a dequantized activation gets a QuantizeLinear and DequantizeLinear of its own."""
    assert dequantize.inputs[0] is not None
    quantize = dequantize.inputs[0].producer()
    assert quantize is not None
    readers = list(dequantize.outputs[0].uses())
    shared = len(list(quantize.outputs[0].uses())) > 1
    for count, (reader, index) in enumerate(readers):
        if not count and not shared:
            continue
        pair = []
        source = quantize.inputs[0]
        for node in (quantize, dequantize):
            made = ir.Node("", node.op_type, [source, *node.inputs[1:]], attributes=node.attributes.values(), num_outputs=1)
            (source,) = made.outputs
            source.name = _free_name(model, str(node.outputs[0].name))
            source.type, source.shape = node.outputs[0].type, node.outputs[0].shape
            made.name = node.name
            pair.append(made)
            model.graph.insert_before(reader, made)
        reader.replace_input_with(index, source)
    if shared or not readers:
        model.graph.remove(dequantize, safe=True)
        if not list(quantize.outputs[0].uses()):
            model.graph.remove(quantize, safe=True)


def _free_name(model: ir.Model, name: str) -> str:
    taken = {value.name for node in model.graph for value in node.outputs}
    count = 1
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"


def _name_pairs(model: ir.Model) -> None:
    """Number the nodes of each kind within their module again."""
    counts: dict[str, int] = {}
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            stem = str(node.name).rpartition("_")[0]
            node.name = f"{stem}_{counts.get(stem, 0)}"
            counts[stem] = counts.get(stem, 0) + 1


def _own_zero_point(model: ir.Model, node: ir.Node) -> None:
    scale = _constant(node.inputs[1])
    zero = _constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if scale is not None and zero is not None:
        replace_constant(model, node, 2, zero, f"{node.outputs[0].name}_zero_point")


def replace_constant(model: ir.Model, node: ir.Node, index: int, array: np.ndarray, name: str) -> ir.Value:
    """Give a node a constant input of its own, under this name or one like it."""
    old = node.inputs[index]
    if old is not None and str(old.name) == name and len(list(old.uses())) == 1:
        del model.graph.initializers[name]
    value = add_constant(model, ir.Tensor(array), name)
    node.replace_input_with(index, value)
    return value


def add_constant(model: ir.Model, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """A new initializer, under this name or one like it."""
    count, free = 0, name
    while free in model.graph.initializers:
        count += 1
        free = f"{name}_{count}"
    tensor.name = free
    value = ir.Value(name=free, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def drop_unused(model: ir.Model) -> None:
    """Remove constants that nothing reads."""
    for node in list(model.graph):
        if node.op_type == "Constant" and not list(node.outputs[0].uses()):
            model.graph.remove(node, safe=True)
    kept = set(model.graph.inputs)
    for name, value in list(model.graph.initializers.items()):
        if not list(value.uses()) and value not in kept and not value.is_graph_output():
            del model.graph.initializers[name]
