"""Bounds of every value of a graph: they hold for each input within the limits, and are tight enough to prove something."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from pom_edge.export import forms
from pom_edge.export.cost import graph_nodes
from pom_edge.export.inputs import Extent
from pom_edge.export.onnx_graph import Graph, export_graph
from pom_edge.export.ranges import AGGREGATE, Range, find_ranges, in_scope, is_float
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.runtimes.onnxruntime_session import native_session

LIMIT = 4.0


def _graph(model: torch.nn.Module, example: dict[str, torch.Tensor], recurrent: bool = False) -> Graph:
    plan = (forms.recurrent if recurrent else forms.parallel)(model.eval(), example, Extent(), Extent())
    return export_graph(plan.model, plan.mixers, plan.example, plan.axes, {}, plan.inside)


def _lively(model: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.7 if "coeff" in name else 0.2)
    return model


class Attending(torch.nn.Module):
    """What users' models have beside a mixer: RMSNorm, attention, tanh-GELU, a maximum, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = PoM(12, 3, 2, n_sel_heads=3, bias=True)
        self.qkv = torch.nn.Linear(12, 36)
        self.up, self.down = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)
        self.weight = torch.nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        x = x + self.mixer(n)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2) / 3.5).softmax(-1) @ v
        x = x - self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))
        return torch.maximum(x.mean(1), -x.amax(1)).sigmoid() * 3 - torch.nn.functional.silu(x[:, 0])


class Named(torch.nn.Module):
    """Submodules named as ours once were, and a norm whose weight is computed from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.aggregate, self.tables = PoM(12, 2, 2), torch.nn.Linear(12, 12), torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tables(100 * self.aggregate(x)) + self.mixer(x)
        return torch.nn.functional.layer_norm(x, (12,), weight=x[0, 0] + 3)


SUBJECTS: dict[str, Any] = {
    "names": lambda: (Named(), {"x": torch.randn(2, 9, 12)}, False),
    "encoder": lambda: (
        build_model(ModelConfig(kind="encoder", dim=16, depth=2, input_dim=6, n_sel_heads=4, degree=4)),
        {"x": torch.randn(2, 9, 6), "mask": torch.ones(2, 9)},
        False,
    ),
    "classifier": lambda: (
        build_model(
            ModelConfig(kind="classifier", image_size=12, patch_size=4, num_classes=3, channels=1, dim=16, depth=1, rotary="2d")
        ),
        {"x": torch.randn(2, 1, 12, 12)},
        False,
    ),
    "user": lambda: (Attending(), {"x": torch.randn(2, 9, 12)}, False),
    "stream": lambda: (
        build_model(
            ModelConfig(kind="lm", vocab_size=20, dim=16, depth=2, n_heads=2, window=4, blocks=("pom", "local"), rotary="1d")
        ),
        {"x": torch.randint(0, 20, (2, 9))},
        True,
    ),
    "gates": lambda: (forms.LayerModel(PoM(16, 3, 2, n_groups=2, bias=True), "causal"), {"x": torch.randn(2, 9, 16)}, False),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_value_leaves_its_bounds(name: str) -> None:
    torch.manual_seed(3)
    model, example, recurrent = SUBJECTS[name]()
    graph = _graph(_lively(model), example, recurrent)
    ranges = find_ranges(graph.model, {"x": Range.of(-LIMIT, LIMIT), "mask": Range.of(0, 1)}, tokens=64)
    model_ir = graph.model.clone()
    values = [v for node in graph_nodes(model_ir) for v in node.outputs if is_float(v)]
    model_ir.graph.outputs.extend(v for v in values if not v.is_graph_output())
    native = native_session(ir.to_proto(model_ir).SerializeToString())
    state: dict[str, np.ndarray] = {}
    for seed in range(6):
        feeds = _feeds(native, seed, state)
        found = dict(zip([o.name for o in native.get_outputs()], native.run(None, feeds), strict=True))
        state = {n.replace("next.", "state."): a for n, a in found.items() if n.startswith("next.")}
        for value in values:
            bound, array = ranges[str(value.name)], found[str(value.name)].astype(np.float64)
            slack = 1e-4 * (1 + np.abs(array))
            assert (array >= bound.low - slack).all(), value.name
            assert (array <= bound.high + slack).all(), value.name
    outside = [v for v in values if not in_scope(v.producer(), AGGREGATE)]  # inside are sums on their way to a mean
    known = [v for v in outside if np.isfinite(ranges[str(v.name)].largest)]
    assert len(known) > 0.8 * len(outside)  # the others count


def _feeds(native: Any, seed: int, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {}
    for each in native.get_inputs():
        shape = [n if isinstance(n, int) else {"batch": 2}.get(n, 9 + seed) for n in each.shape]
        if each.name.startswith("state."):
            feeds[each.name] = state.get(each.name, np.zeros(shape, np.int64 if "int64" in each.type else np.float32))
        elif "int64" in each.type:
            feeds[each.name] = rng.integers(0, 20, shape)
        elif each.name == "mask":
            feeds[each.name] = rng.integers(0, 2, shape).astype(np.float32)
        else:  # corners too, not only the middle
            feeds[each.name] = np.clip(rng.standard_normal(shape) * 4 ** (seed % 3), -LIMIT, LIMIT).astype(np.float32)
    return feeds


def test_a_language_model_is_bounded_whatever_it_reads() -> None:
    """Ids are looked up, LayerNorm starts every block afresh, means keep bounds: no assumption is left."""
    model, example, recurrent = SUBJECTS["stream"]()
    graph = _graph(_lively(model), example, recurrent)
    ranges = find_ranges(graph.model, {})
    assert np.isfinite([ranges[str(v.name)].largest for v in graph.model.graph.outputs if is_float(v)]).all()


def test_the_mixers_bound_is_the_one_of_its_weights() -> None:
    """|f| <= sum |c_p| 6^p where the coefficients have one sign, and the norm of LayerNorm beats the sum of magnitudes."""
    layer = PoM(16, 3, 2, n_sel_heads=4)
    with torch.no_grad():
        layer.po_coeff.abs_()
    norm = torch.nn.LayerNorm(16)
    graph = _graph(torch.nn.Sequential(norm, layer), {"input": torch.randn(2, 9, 16)})
    ranges = find_ranges(graph.model, {})
    mean = next(str(n.outputs[0].name) for n in graph_nodes(graph.model) if n.op_type == "ReduceMean")
    projection = next(str(n.outputs[0].name) for n in graph_nodes(graph.model) if n.op_type == "MatMul")
    weight = layer.projection()[0].detach().double()
    reach = 4 * weight.norm(dim=1)  # sqrt(16) ||w||
    a = torch.nn.functional.leaky_relu(reach, 0.01).clamp(max=6)
    expected = sum(layer.po_coeff[:, p].detach().double() * a ** (p + 1) for p in range(3))
    assert ranges[projection].magnitude.reshape(-1) == pytest.approx(reach.numpy(), rel=1e-6)
    assert ranges[mean].largest == pytest.approx(float(expected.max()), rel=1e-5)


def test_what_has_no_rule_has_no_bound() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3]))
    node = ir.node("Det", [x], name="Det_0")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(ir.Graph([x], [node.outputs[0]], nodes=[node], opset_imports={"": 18}), ir_version=10)
    assert np.isinf(find_ranges(model, {"x": Range.of(-1, 1)})["y"].largest)
