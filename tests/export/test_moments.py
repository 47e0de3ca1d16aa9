"""Means of polynomials from moments: the same function, fewer passes, where it may be and nowhere else."""

from __future__ import annotations

from collections import Counter

import numpy as np
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


def _graph(layer: PoM, padded: bool = False, mask: LayerMask = "none") -> Graph:
    plan = parallel(LayerModel(layer, mask), layer_example(layer, padded), Extent(), Extent())
    return export_graph(plan.model, plan.mixers, plan.example, plan.axes)


def _layer(**settings: object) -> PoM:
    torch.manual_seed(0)
    layer = PoM(**{"dim": 8, "degree": 3, "expand": 2, "n_sel_heads": 4} | settings).eval()  # type: ignore[arg-type]
    nn.init.normal_(layer.po_coeff)
    return layer


def _run(graph: Graph, x: np.ndarray) -> np.ndarray:
    model = ir.to_proto(graph.model).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], np.float64)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"degree": 2},
        {"degree": 6},
        {"n_groups": 2},
        {"n_sel_heads": 1},
        {"dim": CHANNEL_BLOCK, "expand": 3, "n_sel_heads": 3},  # three blocks of channels
        {"dim": 300, "expand": 2, "n_sel_heads": 3},  # 600 channels: blocks of another size
        {"clamp_max": None},
    ],
)
def test_the_function_is_that_of_the_layer_in_float64(settings: dict[str, object]) -> None:
    layer = _layer(**settings)
    x = np.random.default_rng(0).standard_normal((3, 77, layer.dim)).astype(np.float32)
    double = _layer(**settings).double()
    double.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected = double(torch.from_numpy(x).double()).numpy()
    graph = with_moments(_graph(layer))
    assert any("moments" in str(node.name) for node in graph.model.graph)
    error = _run(graph, x) - expected
    assert 10 * np.log10(np.square(expected).sum() / np.square(error).sum()) > 110
    (tap,) = graph.taps.values()  # still a value of this graph
    assert tap.producer() in set(graph.model.graph)


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
        ({}, True, "none"),  # a weighted mean is another sum
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
