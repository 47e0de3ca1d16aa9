"""What the GEMMs of a network compute in, and whether that is what was asked for. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pom_edge.errors import GateError

TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT4": "int4", "INT32": "int32"}
NEEDED = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8", "w8": "int8 weights", "w4": "int4 weights"}
GEMMS = ("MATRIX_MULTIPLY", "CONVOLUTION")
PASSED_THROUGH = ("SHUFFLE", "CAST", "IDENTITY", "SLICE")

__all__ = ["gemm_census", "require_precision"]


def gemm_census(network: Any) -> dict[str, float]:
    """What the GEMMs and convolutions of a network compute in, as shares of their number.

    ``int8``: both operands come out of a DequantizeLinear, which is how TensorRT knows an INT8 kernel. ``int8 weights``,
    ``int4 weights``: one of them does.
    """
    made_by: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for output in range(layer.num_outputs):
            made_by[layer.get_output(output).name] = layer
        if _kind(layer) in GEMMS:
            name = _gemm_type(layer, made_by)
            counts[name] = counts.get(name, 0) + 1
    total = sum(counts.values()) or 1
    return {name: round(count / total, 4) for name, count in sorted(counts.items())}


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _gemm_type(layer: Any, made_by: dict[str, Any]) -> str:
    stored = [_stored_type(layer.get_input(index), made_by) for index in range(min(layer.num_inputs, 2))]
    found = [name for name in stored if name]
    if len(found) == 2 and set(found) == {"int8"}:
        return "int8"
    if found:
        return f"{min(found)} weights"
    dtype = str(layer.get_output(0).dtype).rpartition(".")[2]
    return TYPES.get(dtype, dtype.lower())


def _stored_type(tensor: Any, made_by: dict[str, Any]) -> str | None:
    """``"int8"`` where a tensor was dequantized from it, through reshapes and casts; else None."""
    while tensor is not None:
        layer = made_by.get(tensor.name)
        if layer is None:
            return None
        if _kind(layer) == "DEQUANTIZE":
            dtype = str(layer.get_input(0).dtype).rpartition(".")[2]
            return TYPES.get(dtype, dtype.lower())
        if _kind(layer) not in PASSED_THROUGH:
            return None
        tensor = layer.get_input(0)
    return None


def require_precision(precision: str, census: Mapping[str, float], what: str) -> None:
    """The precision was asked for, so it is there.

    Raises:
        GateError: it is not; says what is (rf-detr#1453: an FP32 engine under another name).
    """
    needed = NEEDED.get(precision, "float32")
    if not any(name == needed or (name == "int8 weights" and precision == "w4") for name in census):
        listed = ", ".join(f"{name} {share:.0%}" for name, share in census.items()) or "no GEMM at all"
        raise GateError(f"{precision} was asked for, and {what} computes its GEMMs in {listed}")
