"""The ONNX side of INT8: what torch.onnx leaves to do once a quantized program is translated.

    DequantizeLinear(W, axis 0) -> Transpose -> MatMul   ==   DequantizeLinear(W^T, axis 1) -> MatMul

and a zero point for each node: ONNX Runtime's exact mode (session.x64quantprecision) fails on one that several nodes share
("Attempt to replace the existing tensor", 1.32).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pom_edge.export.onnx_graph import Graph

__all__ = ["finish"]


def finish(graph: Graph) -> Graph:
    """Lay weights out as their GEMMs read them and give every node its own zero point. Changes the graph in place.

    Args:
        graph: a quantized program, translated.
    """
    for node in list(graph.model.graph):
        if node.op_type == "DequantizeLinear" and _constant(node.inputs[0]) is not None:
            _transpose_beforehand(graph.model, node)
    for node in graph.model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _own_zero_point(graph.model, node)
    _drop_unused(graph.model)
    return graph


def _constant(value: ir.Value | None) -> np.ndarray | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


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
    count, free = 0, name
    while free in model.graph.initializers:
        count += 1
        free = f"{name}_{count}"
    value = ir.Value(name=free, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    value.const_value = ir.tensor(array, name=free)
    model.graph.register_initializer(value)
    node.replace_input_with(index, value)
    return value


def _drop_unused(model: ir.Model) -> None:
    for node in list(model.graph):
        if node.op_type == "Constant" and not list(node.outputs[0].uses()):
            model.graph.remove(node, safe=True)
    kept = {value for value in model.graph.inputs}
    for name, value in list(model.graph.initializers.items()):
        if not list(value.uses()) and value not in kept and not value.is_graph_output():
            del model.graph.initializers[name]
