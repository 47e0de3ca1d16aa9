"""Each rewrite against its definition in float64, and lowered layers against the layers they come from."""

from __future__ import annotations

import math
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from pom_edge.export import lowering
from pom_edge.export.forms import parallel
from pom_edge.export.inputs import Extent
from pom_edge.export.onnx_graph import export_graph, save_graph
from pom_edge.mixer import CumulativePoM, PoM, horner
from pom_edge.models import ModelConfig, build_model
from pom_edge.rotary import cos_sin, frequencies, rotate

EXACT = 1e-12  # float64 rounding of sums of a few thousand terms


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_project_channels_is_the_grouped_convolution(groups: int) -> None:
    x, weight, bias = _randn(2, 5, 8), _randn(24, 8 // groups, seed=1), _randn(24, seed=2)
    expected = nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(-1), bias, groups=groups)
    assert _relative_error(lowering.project_channels(x, weight, bias, groups), expected) < EXACT


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("first_power", [0, 1])
def test_horner_is_the_sum_of_powers(degree: int, first_power: int) -> None:
    a, c = _randn(2, 6, 7), _randn(degree, 6, 1, seed=1)
    expected = sum(c[p] * a ** (p + first_power) for p in range(degree))
    assert isinstance(expected, Tensor)
    assert _relative_error(horner(a, c.unbind(0), first_power), expected) < EXACT


def test_mean_over_tokens_with_weights() -> None:
    f, mask = _randn(2, 6, 9), torch.rand(2, 9, dtype=torch.float64)
    expected = torch.stack([(f[b] * mask[b]).sum(-1) / mask[b].sum() for b in range(2)]).unsqueeze(-1)
    assert _relative_error(lowering.mean_over_tokens(f, mask), expected) < EXACT
    assert _relative_error(lowering.mean_over_tokens(f, None), f.mean(-1, keepdim=True)) < EXACT


def test_a_row_that_admits_nothing_gives_zero() -> None:
    f = _randn(2, 6, 9)
    mask = torch.zeros(2, 9)
    mask[1, :3] = 1
    h = lowering.mean_over_tokens(f, mask)
    assert h[0].abs().max() == 0 and h[1].abs().max() > 0
    per_query = torch.zeros(2, 4, 9)
    per_query[:, 1:, 0] = 1
    h = lowering.mean_per_query(f, per_query)
    assert h[:, :, 0].abs().max() == 0 and torch.equal(h[:, :, 1], f[:, :, 0])


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 1023, 1024, 1025, 3000])
def test_running_sum_is_the_cumulative_sum(tokens: int) -> None:
    f = _randn(2, 3, tokens)
    assert _relative_error(lowering.running_sum(f), f.cumsum(-1)) < EXACT


def test_running_sum_holds_100_db_in_fp32_at_100k_tokens() -> None:
    f = _randn(1, 4, 100_000) + 1.0  # a mean other than zero, so that the sum grows
    expected = f.cumsum(-1)
    error = lowering.running_sum(f.float()).double() - expected
    snr_db = 10 * math.log10(float(expected.square().sum() / error.square().sum()))
    assert snr_db > 120


def test_causal_mean_with_padding() -> None:
    f, mask = _randn(2, 6, 40), (torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6).double()
    mask[0, :3] = 0  # the first tokens see nothing
    found = lowering.causal_mean(f, mask)
    for t in range(40):
        seen = mask[:, None, : t + 1]
        expected = (f[..., : t + 1] * seen).sum(-1) / seen.sum(-1).clamp(min=1)
        assert (found[..., t] - expected).abs().max() < EXACT


def test_collapsed_readout_is_gate_then_project() -> None:
    heads, width, dim = 4, 6, 5
    s, h, weight = _randn(2, 9, heads), _randn(2, heads * width, 1, seed=1), _randn(dim, heads * width, seed=2)
    gate = s.repeat_interleave(width, -1)  # (B, T, D)
    expected = (gate * h.transpose(1, 2)) @ weight.t()
    by_heads = weight.t().unflatten(0, (heads, width))
    assert _relative_error(lowering.collapsed_readout(s, h, by_heads), expected) < EXACT


def test_headed_and_channel_readout() -> None:
    heads, width, dim, tokens = 4, 6, 5, 9
    s, h, weight = (
        _randn(2, tokens, heads),
        _randn(2, heads * width, tokens, seed=1),
        _randn(heads * width, dim, seed=2),
    )
    expected = (s.repeat_interleave(width, -1) * h.transpose(1, 2)) @ weight
    assert _relative_error(lowering.headed_readout(s, h, weight), expected) < EXACT
    channel_gate = s.repeat_interleave(width, -1).transpose(1, 2)
    assert _relative_error(lowering.channel_readout(channel_gate, h, weight), expected) < EXACT


@pytest.mark.parametrize("position", [-70_000, -1, 0, 1, 255, 256, 65_535, 65_536, 1_000_003, 16_777_215, 4_294_967_295])
def test_rotary_tables_hold_at_any_position(position: int) -> None:
    theta = frequencies(64, "1d", 10000.0)
    cos, sin = lowering.RotaryTables(theta)(torch.tensor([[position]]), signed=position < 0)
    exact_cos, exact_sin = cos_sin(torch.tensor([[position]]), theta, torch.float64)
    assert (cos.double() - exact_cos).abs().max() < 4e-7
    assert (sin.double() - exact_sin).abs().max() < 4e-7


def test_a_position_beyond_the_tables_is_an_error_not_another_angle() -> None:
    tables = lowering.RotaryTables(frequencies(64, "1d", 10000.0))
    with pytest.raises(IndexError):
        tables(torch.tensor([[lowering.TABLE_ROWS**lowering.DIGITS]]), signed=True)


@pytest.mark.parametrize("rotary", ["1d", "2d"])
def test_rotate_channels_is_rotate_transposed(rotary: str) -> None:
    f = _randn(2, 7, 16)
    positions = torch.arange(14).reshape(7, 2) if rotary == "2d" else torch.arange(7).unsqueeze(-1)
    cos, sin = cos_sin(positions, frequencies(16, rotary, 10000.0), torch.float64)  # type: ignore[arg-type]
    found = lowering.rotate_channels(f.transpose(1, 2), cos, sin)
    assert torch.equal(found.transpose(1, 2), rotate(f, cos, sin))


class _Twice(nn.Module):
    """A model that nests a mixer in a container and keeps something else beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": PoM(8, 2, 2, n_sel_heads=2), "b": CumulativePoM(8, 2, 1)})
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner["b"](self.inner["a"](x)))  # type: ignore[no-any-return]


def test_lower_replaces_every_mixer_and_leaves_the_model_alone() -> None:
    model = _Twice().eval()
    nn.init.normal_(model.inner["a"].po_coeff)  # type: ignore[arg-type]
    x = torch.randn(2, 11, 8)
    before = model(x)
    lowered, names = lowering.lower(model)
    assert names == ["inner.a", "inner.b"]
    assert not any(isinstance(m, (PoM, CumulativePoM)) for m in lowered.modules())
    assert _relative_error(lowered(x), before) < 1e-5
    assert torch.equal(model(x), before)


def test_a_wrong_rewrite_would_be_seen() -> None:
    """The comparison above fails for a lowered model whose readout drops one head: it is not vacuous."""
    layer = PoM(8, 2, 2, n_sel_heads=4)
    nn.init.normal_(layer.po_coeff)
    lowered, _ = lowering.lower(layer)
    with torch.no_grad():
        lowered.ag_weight[1] = 0  # type: ignore[index,operator]
    x = torch.randn(2, 11, 8)
    assert _relative_error(lowered(x), layer(x)) > 1e-2


def test_gelu_is_one_operator_in_the_runtime(tmp_path: Path) -> None:
    """The graph keeps to the standard, in the order that ONNX Runtime recognises; as torch writes it, it is five passes."""
    from onnx import load

    model = build_model(ModelConfig(kind="encoder", dim=16, depth=2, input_dim=8))
    plan = parallel(model, {"x": torch.randn(2, 9, 8)}, Extent(), Extent())
    graph = export_graph(plan.model, plan.mixers, plan.example, plan.axes)
    assert {node.domain for node in graph.model.graph} == {""}
    save_graph(graph.model, tmp_path / "g.onnx", {})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "g.onnx"), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in load(str(tmp_path / "optimized.onnx")).graph.node]
    assert "Erf" not in operators and sum(name in ("Gelu", "BiasGelu") for name in operators) == 2
