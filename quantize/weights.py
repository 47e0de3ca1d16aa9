"""``--precision w8`` and ``w4``: weights stored as integers, arithmetic in float. A rewrite of the ONNX graph.

    W  ->  DequantizeLinear(W_q, s)         w8: one scale for each output channel
                                            w4: one for each block of 32 weights that a GEMM adds up (opset 21)

Only standard operators. The runtime makes the float weight anew, from a quarter (an eighth) of the bytes, so it pays where
reading weights is what takes the time, and where files and downloads should be small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from pom_edge.errors import InputError
from pom_edge.quantize.graph import HALF_OPSET, add_constant, drop_unused
from pom_edge.quantize.scales import channel_scales

BLOCK = 32  # weights that share a scale at 4 bits
W4_OPSET = 21  # DequantizeLinear with block_size, and INT4
LIMITS = {8: 127, 4: 7}
SMALLEST = 256  # elements: below that the node costs more bytes than it saves

__all__ = ["BLOCK", "W4_OPSET", "StoredWeight", "weight_only"]


@dataclass(frozen=True)
class StoredWeight:
    """One weight of the report.

    Attributes:
        name: of the weight.
        node: a node that reads it; its name begins with the module path.
        bits: 8 or 4.
        snr_db: of the stored weight against the float one.
        note: why it has other bits than asked for.
    """

    name: str
    node: str
    bits: int
    snr_db: float
    note: str = ""


def weight_only(
    model: ir.Model, bits: Literal[4, 8] = 8, clip: bool = True, other: Mapping[str, int] | None = None
) -> list[StoredWeight]:
    """Store the weights of a graph's GEMMs as integers. Changes the graph in place; ``bits=4`` raises its opset to 21.

    Args:
        model: a float graph.
        bits: 8, or 4 where the weights fill blocks of 32 (8 elsewhere, with a note).
        clip: scales with the least squared error; otherwise those that clip nothing.
        other: bits of single weights, by name: 8, or 32 for one that stays as it is.

    Returns:
        What became of each weight.

    Raises:
        InputError: the graph has no such weight, or holds operators whose meaning changed up to opset 21.
    """
    if bits not in (4, 8):
        raise InputError(f"weights of {bits} bits; expected 8 (--precision w8) or 4 (--precision w4)")
    _fold_views(model)
    found = list(_weights(model))
    if not found:
        raise InputError("the model has no layer with a weight that could be stored as integers; export it as fp32 or fp16")
    report, stored = [], dict[str, ir.Value]()
    for node, index, reduced in found:
        source = node.inputs[index]
        assert source is not None
        own = (other or {}).get(str(source.name), bits)
        if own == 32:
            continue
        key = f"{source.name}/{reduced}"
        if key not in stored:
            entry, stored[key] = _store(model, node, source, reduced, own, clip, left=node.op_type == "MatMul" and index == 0)
            report.append(entry)
        node.replace_input_with(index, stored[key])
    if any(entry.bits == 4 for entry in report):
        _raise_opset(model)
    elif any(value.dtype == ir.DataType.FLOAT16 for value in stored.values()):
        model.opset_imports[""] = max(HALF_OPSET, model.opset_imports[""])
    drop_unused(model)
    return report


_VIEWS: dict[str, Callable[[np.ndarray, ir.Node], np.ndarray]] = {
    "Transpose": lambda weight, node: weight.transpose(node.attributes["perm"].as_ints()),
    "Squeeze": lambda weight, node: weight.squeeze(tuple(_second(node))),
    "Unsqueeze": lambda weight, node: np.expand_dims(weight, tuple(_second(node))),
    "Reshape": lambda weight, node: weight.reshape(_second(node)),
}


def _second(node: ir.Node) -> list[int]:
    value = node.inputs[1]
    assert value is not None
    assert value.const_value is not None
    return [int(n) for n in value.const_value.numpy()]


def _fold_views(model: ir.Model) -> None:
    """Views of a weight that torch.onnx left to the runtime."""
    for node in list(model.graph):
        values = list(node.inputs)
        if node.op_type in _VIEWS and all(v is not None and v.const_value is not None and v.is_initializer() for v in values):
            source = values[0]
            assert source is not None
            assert source.const_value is not None
            if source.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or len(node.outputs[0].shape or ()) < 2:
                continue
            view = np.ascontiguousarray(_VIEWS[node.op_type](source.const_value.numpy(), node))
            made = add_constant(model, ir.Tensor(view), str(source.name))
            ir.convenience.replace_all_uses_with(node.outputs[0], made)
            model.graph.remove(node, safe=True)


def _weights(model: ir.Model) -> Iterator[tuple[ir.Node, int, int]]:
    """(GEMM, which input is a float constant, the axis of it that is added up)."""
    for node in list(model.graph):
        for index in {"MatMul": (1, 0), "Gemm": (1,), "Conv": (1,)}.get(node.op_type, ()):
            value = node.inputs[index]
            if value is None or value.const_value is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                continue
            if value.const_value.size < SMALLEST or len(value.const_value.shape) < 2 or not value.is_initializer():
                continue
            if node.op_type == "Conv":
                reduced = 1
            elif node.op_type == "Gemm":
                reduced = 1 if node.attributes.get_int("transB", 0) else 0
            else:
                reduced = len(value.const_value.shape) - (2 if index == 1 else 1)
            yield node, index, reduced
            break


def _store(
    model: ir.Model, node: ir.Node, source: ir.Value, reduced: int, bits: int, clip: bool, left: bool
) -> tuple[StoredWeight, ir.Value]:
    assert source.const_value is not None
    weight = source.const_value.numpy()
    flat, channel = _as_matrix(weight, reduced)
    along = flat.shape[1 - channel]
    note = ""
    if bits == 4 and along % BLOCK:
        bits, note = 8, f"8 bits: {along} weights to a channel do not fill blocks of {BLOCK}"
    whole = torch.from_numpy(flat.astype(np.float32))
    limit, low = LIMITS[bits], -8 if bits == 4 else -LIMITS[bits]
    rows = whole if channel == 0 else whole.t()  # (channels, weights of one)
    blocks = rows.reshape(-1, BLOCK if bits == 4 else along)
    scales = channel_scales(blocks, 0, limit, clip, low)
    # Blocks of INT4 on the left of a MatMul crash the builder of TensorRT-RTX 1.7.1 (SIGSEGV); with a Cast between they build.
    between = bits == 4 and left
    scale_type = np.dtype({np.float32: np.float16, np.float16: np.float32}[weight.dtype.type] if between else weight.dtype)
    if np.float16 in (weight.dtype, scale_type):
        scales = scales.half().float().clamp(min=2.0**-24)
    integers = (blocks / scales.unsqueeze(1)).round().clamp(low, limit)
    again = (integers * scales.unsqueeze(1)).reshape(rows.shape)
    noise = float(((rows - again).double() ** 2).sum())
    snr = 10 * np.log10(float((rows.double() ** 2).sum()) / noise) if noise else float("inf")
    whole_numbers = integers.reshape(rows.shape)
    numbers = np.ascontiguousarray((whole_numbers if channel == 0 else whole_numbers.t()).numpy())
    per_row = scales.reshape(rows.shape[0], -1).numpy().astype(scale_type)
    attributes = {"axis": channel}
    if bits == 4:
        per_row = np.ascontiguousarray(per_row if channel == 0 else per_row.T)
        attributes = {"axis": 1 - channel, "block_size": BLOCK}
    else:
        per_row = per_row.reshape(-1)
    made = _dequantize(model, node, source, numbers, per_row, bits, attributes)
    if between:
        made = _cast(model, node, made, source)
    if flat.shape != weight.shape:
        made = _reshape(model, node, made, weight.shape, source)
    return StoredWeight(str(source.name), str(node.name), bits, round(float(snr), 2), note), made


def _as_matrix(weight: np.ndarray, reduced: int) -> tuple[np.ndarray, int]:
    """A weight as a matrix, and which of its axes counts the output channels.

    Groups and heads are laid beside each other, so that each row of a grouped weight has a scale of its own; a kernel's taps
    belong to its output channel.
    """
    if weight.ndim == 2:
        return weight, 1 - reduced
    if reduced == weight.ndim - 1:
        return weight.reshape(-1, weight.shape[-1]), 0
    if reduced == weight.ndim - 2:
        return weight.reshape(-1, weight.shape[-1]), 1
    return weight.reshape(weight.shape[0], -1), 0


def _dequantize(
    model: ir.Model,
    node: ir.Node,
    source: ir.Value,
    numbers: np.ndarray,
    scales: np.ndarray,
    bits: int,
    attributes: dict[str, int],
) -> ir.Value:
    kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
    integers = numbers.astype(ml_dtypes.int4 if bits == 4 else np.int8)
    inputs = [
        add_constant(model, ir.Tensor(integers, dtype=kind), f"{source.name}_int{bits}"),
        add_constant(model, ir.Tensor(scales), f"{source.name}_scale"),
    ]
    made = ir.node("DequantizeLinear", inputs, attributes, name=_beside(node, "DequantizeLinear", source))
    kind_of_float = ir.TensorType(ir.DataType.FLOAT16 if scales.dtype == np.float16 else ir.DataType.FLOAT)
    return _insert(model, node, made, f"{source.name}_float", kind_of_float, numbers.shape)


def _cast(model: ir.Model, node: ir.Node, value: ir.Value, source: ir.Value) -> ir.Value:
    """The weight in the graph's own type."""
    made = ir.node("Cast", [value], {"to": int(source.dtype)}, name=_beside(node, "Cast", source))  # type: ignore[arg-type]
    return _insert(model, node, made, f"{source.name}_cast", source.type, tuple(value.shape or ()))  # type: ignore[arg-type]


def _reshape(model: ir.Model, node: ir.Node, value: ir.Value, shape: tuple[int, ...], source: ir.Value) -> ir.Value:
    wanted = add_constant(model, ir.Tensor(np.array(shape, np.int64)), f"{source.name}_shape")
    made = ir.node("Reshape", [value, wanted], name=_beside(node, "Reshape", source))
    return _insert(model, node, made, f"{source.name}_reshaped", value.type, shape)


def _beside(node: ir.Node, kind: str, source: ir.Value) -> str:
    path = str(node.name).rpartition("/")[0]
    leaf = str(source.name).removesuffix(".fp16").rpartition(".")[2]
    return f"{path}/{kind}_of_{leaf}" if path else f"{kind}_of_{source.name}"


def _insert(
    model: ir.Model, node: ir.Node, made: ir.Node, name: str, kind: ir.TypeProtocol | None, shape: tuple[int, ...]
) -> ir.Value:
    (output,) = made.outputs
    output.name, output.type, output.shape = name, kind, ir.Shape(shape)
    model.graph.insert_before(node, made)
    return output


# Operators whose results, not only their types, changed from opset 18 to 21.
_CHANGED = frozenset({"Resize", "GroupNormalization", "DFT", "AveragePool", "GridSample"})


def _raise_opset(model: ir.Model) -> None:
    changed = sorted({node.op_type for node in model.graph} & _CHANGED)
    if changed:
        raise InputError(
            f"4-bit weights need opset {W4_OPSET}, where {', '.join(changed)} means something else; use --precision w8"
        )
    model.opset_imports[""] = max(W4_OPSET, model.opset_imports[""])
