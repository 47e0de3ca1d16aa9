"""Model -> graph -> artifact.

inputs       which axes are free; example inputs of any size
lowering     exact rewrites of each PoM for inference
forms        what is traced for each form (parallel)
onnx_graph   torch.onnx, names, files
cost         operations and bytes of a graph as formulas
lint         rules that every graph keeps
reference    the PyTorch side of the parity waterfall
golden       the recorded inputs and answers that travel in the bundle
tensorrt_engine   an ONNX file to an engine: no torch, no onnx

The names are looked up when they are used, so that a device imports the engine builder without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pom_edge.export.lint import lint
    from pom_edge.export.lowering import lower
    from pom_edge.export.onnx_graph import export_graph, save_graph
    from pom_edge.export.reference import TorchSession

_HOME = {
    "TorchSession": "reference",
    "export_graph": "onnx_graph",
    "lint": "lint",
    "lower": "lowering",
    "save_graph": "onnx_graph",
}

__all__ = ["TorchSession", "export_graph", "lint", "lower", "save_graph"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pom_edge.export' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pom_edge.export.{_HOME[name]}"), name)
