"""Means of polynomials from moments: the same function, fewer passes, where it may be and nowhere else."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from pom_edge.export.forms import LayerMask, LayerModel, layer_example, parallel
from pom_edge.export.inputs import Extent
from pom_edge.export.moments import CHANNEL_BLOCK, with_moments
from pom_edge.export.onnx_graph import Graph, export_graph
from pom_edge.mixer import PoM
from pom_edge.pipeline import export_bundle
from pom_edge.runtimes import open_session


def _graph(layer: PoM, padded: bool = False, mask: LayerMask = "none") -> Graph:
    plan = parallel(LayerModel(layer, mask), layer_example(layer, padded), Extent(), Extent())
    return export_graph(plan.model, plan.mixers, plan.example, plan.axes)


def _layer(**settings: object) -> PoM:
    torch.manual_seed(0)
    layer = PoM(**{"dim": 8, "degree": 3, "expand": 2, "n_sel_heads": 4} | settings).eval()  # type: ignore[arg-type]
    nn.init.normal_(layer.po_coeff)
    return layer


class _Admitting(nn.Module):
    def __init__(self, mixer: PoM) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, mask=valid)  # type: ignore[no-any-return]


def _double(layer: PoM) -> PoM:
    return copy.deepcopy(layer).double()


def _run(graph: Graph, x: np.ndarray, **others: np.ndarray) -> np.ndarray:
    model = ir.to_proto(graph.model).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x} | others)[0], np.float64)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"degree": 2},
        {"degree": 6},
        {"n_groups": 2},
        {"n_sel_heads": 1},
        {"dim": CHANNEL_BLOCK, "expand": 3, "n_sel_heads": 3},  # three blocks of channels
        {"dim": 400, "expand": 2, "n_sel_heads": 4},  # 800 channels: blocks of another size
        {"clamp_max": None},
    ],
)
def test_the_function_is_that_of_the_layer_in_float64(settings: dict[str, object]) -> None:
    layer = _layer(**settings)
    x = np.random.default_rng(0).standard_normal((3, 77, layer.dim)).astype(np.float32)
    with torch.no_grad():
        expected = _double(layer)(torch.from_numpy(x).double()).numpy()
    graph = with_moments(_graph(layer))
    assert any("moments" in str(node.name) for node in graph.model.graph)
    error = _run(graph, x) - expected
    assert 10 * np.log10(np.square(expected).sum() / np.square(error).sum()) > 110
    (tap,) = graph.taps.values()  # still a value of this graph
    assert tap.producer() in set(graph.model.graph)


@pytest.mark.parametrize("dim", [8, CHANNEL_BLOCK])
def test_a_mask_goes_into_the_powers(dim: int) -> None:
    layer = _layer(dim=dim, n_sel_heads=2)
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((3, 77, dim)).astype(np.float32), rng.random((3, 77)) < 0.6
    mask[1] = False  # nothing is admitted: the mean is 0
    with torch.no_grad():
        expected = _double(layer)(torch.from_numpy(x).double(), mask=torch.from_numpy(mask)).numpy()
    example = {"x": torch.from_numpy(x), "valid": torch.from_numpy(mask)}
    plan = parallel(_Admitting(layer), example, Extent(), Extent())
    graph = with_moments(export_graph(plan.model, plan.mixers, plan.example, plan.axes))
    assert sum("moments/ReduceSum" in str(node.name) for node in graph.model.graph) == (4 if dim == 8 else 7)
    error = _run(graph, x, valid=mask) - expected
    assert 10 * np.log10(np.square(expected).sum() / np.square(error).sum()) > 110


def test_a_mask_of_other_numbers_does_not() -> None:
    """m^2 is not m there. An input may bear the name of the streamed form's own mask."""

    example = {"x": torch.randn(2, 5, 8), "valid": torch.rand(2, 5)}
    plan = parallel(_Admitting(_layer()), example, Extent(), Extent())
    graph = export_graph(plan.model, plan.mixers, plan.example, plan.axes)
    assert not any("moments" in str(node.name) for node in with_moments(graph).model.graph)


def test_a_layer_that_is_called_twice_has_two_means() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = _layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mixer(x + self.mixer(x))  # type: ignore[no-any-return]

    model = Twice().eval()
    x = torch.randn(2, 9, 8)
    plan = parallel(model, {"x": x}, Extent(), Extent())
    graph = with_moments(export_graph(plan.model, plan.mixers, plan.example, plan.axes))
    names = [str(node.name) for node in graph.model.graph]
    assert sum("moments/Concat" in name for name in names) == 2 and len(set(names)) == len(names)
    with torch.no_grad():
        np.testing.assert_allclose(_run(graph, x.numpy()), model(x).numpy(), atol=1e-5)


def test_a_pass_of_the_streamed_form_sums_moments(tmp_path: Path) -> None:
    """Against the published arithmetic in float64, over chunks of which the last is padded."""
    layer = _layer(dim=24)
    x = np.random.default_rng(0).standard_normal((1, 77, 24)).astype(np.float32)
    settings: dict[str, Any] = {"form": "streamed", "chunk": 16, "tokens": 77, "batch": 1}
    report = export_bundle(layer, example_inputs={"x": torch.from_numpy(x)}, out=tmp_path / "m.pom", **settings)
    files = sorted(tmp_path.rglob("*.onnx"))
    assert any("moments" in node.name for file in files for node in onnx.load(file).graph.node)
    with torch.no_grad():
        expected = _double(layer)(torch.from_numpy(x).double()).numpy()
    error = open_session(report).run(x).astype(np.float64) - expected
    assert 10 * np.log10(np.square(expected).sum() / np.square(error).sum()) > 110


def test_blocks_of_channels_share_out_the_rows_of_the_projection() -> None:
    layer = _layer(dim=CHANNEL_BLOCK, expand=3, n_sel_heads=3)
    graph = with_moments(_graph(layer))
    made = Counter(node.op_type for node in graph.model.graph if "moments" in str(node.name))
    assert (made["MatMul"], made["ReduceMean"], made["ReduceSum"]) == (3, 9, 1)
    elements = sum(v.const_value.size for v in graph.model.graph.initializers.values() if v.const_value is not None)
    weights = sum(parameter.numel() for parameter in layer.parameters())
    assert weights <= elements < weights + 100  # none is kept twice


@pytest.mark.parametrize(
    ("settings", "padded", "mask"),
    [
        ({}, False, "causal"),
        ({"rotary": "1d"}, False, "none"),  # what is averaged is turned by the position
        ({"degree": 1}, False, "none"),  # nothing to gain
        ({"first_power": 0}, False, "none"),
    ],
)
def test_other_means_stay_as_they_are(settings: dict[str, object], padded: bool, mask: LayerMask) -> None:
    graph = _graph(_layer(**settings), padded, mask)
    changed = with_moments(graph)
    assert [str(node.name) for node in changed.model.graph] == [str(node.name) for node in graph.model.graph]
