"""Model -> graph -> artifact.

inputs       which axes are free; example inputs of any size
lowering     exact rewrites of each PoM for inference
forms        what is traced for each form (parallel)
onnx_graph   torch.onnx, names, files
cost         operations and bytes of a graph as formulas
lint         rules that every graph keeps
reference    the PyTorch side of the parity waterfall
golden       the recorded inputs and answers that travel in the bundle
"""

from __future__ import annotations

from pom_edge.export.lint import lint
from pom_edge.export.lowering import lower
from pom_edge.export.onnx_graph import export_graph, save_graph
from pom_edge.export.reference import TorchSession

__all__ = ["TorchSession", "export_graph", "lint", "lower", "save_graph"]
