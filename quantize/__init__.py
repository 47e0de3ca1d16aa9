"""Float -> INT8.

quantizer.py     which tensors become INT8
observers.py     what their scales are taken from; scales.py: the arithmetic of that
quantize.py      a traced model to the same model in INT8
graph.py         the ONNX side of it
weights.py       weights alone as integers (w8, w4)
calibration.py   calibration data, read and checked
qat.py           training with INT8 in the loop

torchao takes seconds to import: names are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "Calibration": "calibration",
    "Options": "quantize",
    "Prepared": "quantize",
    "Quantized": "quantize",
    "StoredWeight": "weights",
    "Training": "qat",
    "finish": "graph",
    "load_calibration": "calibration",
    "prepare": "quantize",
    "prepare_qat": "qat",
    "weight_only": "weights",
}

__all__ = [
    "Calibration",
    "Options",
    "Prepared",
    "Quantized",
    "StoredWeight",
    "Training",
    "finish",
    "load_calibration",
    "prepare",
    "prepare_qat",
    "weight_only",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"pom_edge.quantize.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'pom_edge.quantize' has no attribute {name!r}")
