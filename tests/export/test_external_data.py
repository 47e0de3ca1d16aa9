"""Weights beyond protobuf's 2 GiB: they go into a file beside the graph, and the bundle moves as one folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pom_edge.bundle import Bundle
from pom_edge.export import onnx_graph
from pom_edge.mixer import PoM
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes import check_bundle


class _Wide(nn.Module):
    """Two mixers of given size, in a residual chain."""

    def __init__(self, dim: int, expand: int) -> None:
        super().__init__()
        self.first, self.second = (PoM(dim, 2, expand, n_sel_heads=8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)  # type: ignore[no-any-return]


def _export(model: nn.Module, dim: int, path: Path) -> Bundle:
    return Bundle.open(export_bundle(model, example_inputs={"x": torch.randn(2, 3, dim)}, out=path).bundle)


def test_weights_beside_the_graph_move_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "EXTERNAL_BYTES", 1000)
    artifact = _export(_Wide(16, 2), 16, tmp_path / "a.pom").manifest.artifacts[0]
    assert artifact.files == ["parallel.fp32.onnx", "parallel.fp32.onnx.data"]
    shutil.move(tmp_path / "a.pom", tmp_path / "elsewhere.pom")
    assert check_bundle(tmp_path / "elsewhere.pom", layers=True).passed


@pytest.mark.slow
def test_a_model_beyond_2_gib(tmp_path: Path) -> None:
    dim, expand = 4096, 8
    with torch.device("meta"):
        model = _Wide(dim, expand)
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # cheap, lively and different everywhere: drawing 540 million normals takes longer
        nn.init.uniform_(parameter, -0.02, 0.02)
    assert sum(p.numel() for p in model.parameters()) * 4 > 2 << 30
    artifact = _export(model, dim, tmp_path / "a.pom").manifest.artifacts[0]
    assert artifact.files == ["parallel.fp32.onnx", "parallel.fp32.onnx.data"]
    assert artifact.parity is not None and artifact.parity["snr_db"] >= 90
    shutil.rmtree(tmp_path / "a.pom")  # 2 GiB that no later test needs
