"""Bundles from which engines are built, shared by the tests of builder and runtime: an export costs seconds."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pom_edge.bundle import MANIFEST, Bundle, extend_bundle, seal
from pom_edge.engine_sizes import engine_spec
from pom_edge.extent import Extent

PRECISIONS = ("fp32", "fp16", "int8")

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["PRECISIONS", "Graphs", "add_engine", "edit_manifest", "small_bundle", "write_graphs"]


@cache
def small_bundle(folder: Path) -> Path:
    """A two-block encoder with free batch and tokens: FP32, FP16 and INT8."""
    import torch

    from pom_edge.models import ModelConfig, build_model
    from pom_edge.pipeline import export_bundle

    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=32, depth=2, input_dim=12, n_sel_heads=4))
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 16, 12, generator=generator), "mask": torch.ones(4, 16)} for _ in range(4)]
    inputs = {"x": torch.randn(2, 16, 12, generator=generator), "mask": torch.ones(2, 16)}
    precisions = ["fp32", "fp16", "int8"]
    return export_bundle(
        model, precision=precisions, calibration=batches, example_inputs=inputs, out=folder / "small.pom"
    ).bundle


@dataclass
class Graphs:
    """Graphs of one model: their files by precision, and the dims of every input (numbers and names of free axes)."""

    files: dict[str, Path]
    dims: dict[str, list[Any]]

    def profile(self, sizes: dict[str, tuple[int, int, int]]) -> dict[str, tuple[list[int], list[int], list[int]]]:
        """Shortest, usual and longest shape of every input, from those of the free axes."""
        found = {}
        for name, dims in self.dims.items():
            low, usual, high = ([dim if isinstance(dim, int) else sizes[dim][i] for dim in dims] for i in range(3))
            found[name] = (low, usual, high)
        return found


def write_graphs(model: nn.Module, inputs: dict[str, Tensor], folder: Path, form: str = "parallel") -> Graphs:
    """Graphs in FP32, FP16 and INT8 as an export makes them, without its golden data and gates: those cost minutes for large
    models and are tested elsewhere."""
    from pom_edge.export import forms
    from pom_edge.export.golden import Case
    from pom_edge.export.inputs import BATCH, TOKENS, Extent
    from pom_edge.export.made import Single
    from pom_edge.export.onnx_graph import save_graph, trace_graph, translate
    from pom_edge.export.typed import look, typed
    from pom_edge.quantize import finish, prepare

    free = Extent()
    plan = (forms.recurrent if form == "recurrent" else forms.parallel)(model, inputs, free, free)
    traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes, {BATCH: free, TOKENS: free}, plan.inside)
    made = Single(plan, traced, free, free)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    chunks = [plan.example[next(iter(inputs))].shape[1]] if form == "recurrent" else []
    half, _ = typed(made, "fp16", look(made, [Case("a", "random", "", arrays, chunks=chunks)], None))
    quantized = prepare(traced, lambda module: module(dict(plan.example))).convert()
    files = {}
    for precision, graph in zip(PRECISIONS, (made.graph, half.graphs[0], finish(translate(quantized.traced))), strict=True):
        files[precision] = folder / f"{form}.{precision}.onnx"
        save_graph(graph.model, files[precision], {})
    specs = made.fields()["inputs"]
    return Graphs(files, {spec.name: list(spec.shape) for spec in specs})


def add_engine(bundle: Path, **facts: Any) -> str:
    """An RTX engine that was never built, beside the one graph of `tests.bundles.make_bundle`; its file's name."""
    opened, file = Bundle.open(bundle), "parallel.fp32.rtx-sm86-sm89.engine"
    source = opened.manifest.artifacts[0]
    about = {
        "compiler": "TensorRT-RTX",
        "version": "1.7.1",
        "gpu": None,
        "compute_capabilities": ["86", "89"],
        "source": source.file,
        "source_sha256": opened.sha256(source.file),
        "shapes": {"batch": [1, 1, 1], "tokens": [1, 5, 64]},
    } | facts
    sizes = {axis: Extent(*lengths) for axis, lengths in about["shapes"].items()}
    inputs = [engine_spec(spec, sizes) for spec in source.inputs]
    changes = {"target": "rtx", "file": file, "files": [file], "engine": about, "inputs": inputs, "tensorrt": None}
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / file).write_bytes(b"engine")
        extend_bundle(opened, [source.model_copy(update=changes)], Path(made))
    return file


def edit_manifest(bundle: Path, change: Any) -> None:
    """Change a manifest as somebody would who also knows how to seal it."""
    content = json.loads((bundle / MANIFEST).read_text())
    change(content)
    (bundle / MANIFEST).write_text(seal(content))
