"""Random configurations, lowered and exported, against the independent float64 loops of tests/oracle.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pom_edge.export.forms import LayerModel
from pom_edge.export.inputs import Extent, axis_sizes, make_inputs, plan_axes
from pom_edge.export.lint import GraphContext, lint
from pom_edge.export.lowering import lower
from pom_edge.export.onnx_graph import check_file, export_graph, save_graph
from pom_edge.mixer import PoM
from pom_edge.runtimes.onnxruntime_session import native_session
from tests.oracle import Case, evaluate, random_case, snr_db

SNR_DB = 90.0  # the FP32 gate; the worst of the module itself against the oracle is above 100
SEEDS = range(300)
ONNX_SEEDS = range(0, 300, 5)


def _case(seed: int) -> Case:
    return random_case(seed, published_only=seed % 4 != 0)


def _layer(case: Case) -> LayerModel:
    layer = PoM(**case.config)
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in case.params.items()})
    return LayerModel(layer, "causal" if case.causal else "none").eval()


def _inputs(case: Case) -> dict[str, Tensor]:
    inputs = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in case.inputs.items()}
    if "mask" in inputs:
        inputs["mask"] = inputs["mask"].float()  # as a session hands it over
    return inputs


@pytest.mark.parametrize("seed", SEEDS)
def test_lowered_layer_is_the_function(seed: int) -> None:
    case = _case(seed)
    lowered, _ = lower(_layer(case))
    with torch.no_grad():
        found = lowered(**_inputs(case)).numpy()
    assert snr_db(found, evaluate(case)) >= SNR_DB, str(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ONNX_SEEDS)
def test_exported_layer_is_the_function(seed: int, tmp_path: Path) -> None:
    """Traced at other sizes than it is run at, so a baked-in length cannot pass."""
    case = _case(seed)
    inputs = _inputs(case)
    axes = plan_axes(inputs, Extent(), Extent())
    lowered, mixers = lower(_layer(case))
    sizes = {axis: length + 2 for axis, length in axis_sizes(inputs, axes).items()}
    graph = export_graph(lowered, mixers, make_inputs(inputs, axes, sizes, seed), axes)
    lint(GraphContext(graph))
    save_graph(graph.model, tmp_path / "layer.onnx", {})
    check_file(tmp_path / "layer.onnx")
    session = native_session(str(tmp_path / "layer.onnx"), threads=1)
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    assert snr_db(found, evaluate(case)) >= SNR_DB, str(case)
