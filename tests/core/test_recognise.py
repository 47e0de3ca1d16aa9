"""The published class in a user's repository is found, rebuilt and lowered; look-alikes are not, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.export.lowering import lower
from pom_edge.mixer import PoM
from pom_edge.pipeline import export_bundle
from pom_edge.recognise import is_published, recognise, to_pom, unrecognised
from tests.core import published_standin as published

SETTINGS: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (published.PoM, {"n_groups": 1, "n_sel_heads": 4}),
    (published.PoM, {"n_groups": 4, "n_sel_heads": 1, "bias": True}),
    (published.PoM, {"n_groups": 1, "n_sel_heads": 0}),
    (published.PoMRoPE, {"n_groups": 1, "n_sel_heads": 4}),
    (published.PoMRoPE, {"n_groups": 2, "n_sel_heads": 1, "rope_base": 500000.0}),
    (published.PoMRoPE, {"n_groups": 1, "n_sel_heads": 4, "rope_2d": True}),
    (published.PoMRoPEOfSD35, {"n_groups": 1, "n_sel_heads": 4}),
    (published.ComPoM, {"n_groups": 1, "n_sel_heads": 4, "year": 2025}),
    (published.ComPoM, {"n_groups": 1, "n_sel_heads": 1, "year": 2025, "bias": True}),
    (published.ComPoM, {"n_groups": 2, "n_sel_heads": 8, "year": 2025, "bias": True}),
    (published.ComPoM, {"n_groups": 1, "n_sel_heads": 4, "year": 2026}),
    (published.ComPoM, {"n_groups": 1, "n_sel_heads": 1, "year": 2026, "bias": True}),
]


def _published(
    kind: type[nn.Module], settings: dict[str, Any], degree: int = 3, lively: bool = True
) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    module = kind(16, degree=degree, expand=2, **settings).eval()
    if lively:
        for name, parameter in module.named_parameters():
            nn.init.normal_(parameter, std=1.0 if "proj" not in name else 0.6)
    positions = torch.stack((torch.arange(11) // 4, torch.arange(11) % 4), -1)
    return module, {"positions_hw": positions} if settings.get("rope_2d") else {}


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
@pytest.mark.parametrize("mask", [None, "causal", "padding", "per query"])
@torch.no_grad()
def test_rebuilt_and_lowered_layer_is_the_same_function(
    kind: type[nn.Module], settings: dict[str, Any], mask: str | None
) -> None:
    if mask == "causal" and kind is published.ComPoM:
        pytest.skip("these years know no causal mask")
    module, extra = _published(kind, settings)
    x = 3 * torch.randn(2, 11, 16)
    shape = {"padding": (2, 11), "per query": (2, 11, 11)}.get(mask or "")
    admitted = mask if shape is None else (torch.rand(shape) < 0.7).float().index_fill(-1, torch.tensor([0]), 1.0)
    expected = module(x, mask=admitted, **extra)
    assert is_published(module)
    ours = to_pom(module)(x, mask=admitted, positions=extra.get("positions_hw"))
    lowered, names = lower(module)
    assert names == [""]
    for found in (ours, lowered(x, mask=admitted, **extra), lowered(x, x, admitted, **extra)):
        assert _error(found, expected) < 1e-5
        assert _error(torch.zeros_like(found), expected) > 0.5


@pytest.mark.parametrize("degree", [1, 2, 4, 5, 7])
@pytest.mark.parametrize(("kind", "settings"), [SETTINGS[0], SETTINGS[5], SETTINGS[7], SETTINGS[10]])
@torch.no_grad()
def test_every_degree_and_fresh_weights(kind: type[nn.Module], settings: dict[str, Any], degree: int) -> None:
    """Fresh coefficients are near 0.001 and the output near 1e-4; which mathematics it is shows all the same."""
    module, extra = _published(kind, settings, degree, lively=False)
    x = torch.randn(2, 11, 16)
    expected = module(x, **extra)
    assert _error(to_pom(module)(x, positions=extra.get("positions_hw")), expected) < 1e-5


def test_what_the_tensors_do_not_tell_is_found_out() -> None:
    pairs = [
        (published.PoMRoPE, SETTINGS[3][1], "current-rotary", 6.0, "hardsigmoid"),
        (published.PoMRoPEOfSD35, SETTINGS[6][1], "current-rotary", 1.0, "hardsigmoid"),
        (published.ComPoM, {"n_groups": 1, "n_sel_heads": 4, "bias": True, "year": 2025}, "compom-2025", None, "sigmoid"),
        (published.ComPoM, {"n_groups": 1, "n_sel_heads": 4, "bias": True, "year": 2026}, "compom-2026-03", 6.0, "hardsigmoid"),
    ]
    for kind, settings, layout, clamp, gate in pairs:
        found = recognise(_published(kind, settings)[0])
        assert found is not None and found.mixer is not None
        assert (found.layout, found.mixer.clamp_max, found.mixer.gate) == (layout, clamp, gate)


def test_settings_are_read_and_tensors_shared() -> None:
    module, _ = _published(published.PoMRoPE, {"n_groups": 2, "n_sel_heads": 8, "rope_base": 500.0, "max_seq_len": 300})
    layer = to_pom(module)
    assert (layer.dim, layer.degree, layer.expand, layer.n_groups, layer.n_sel_heads) == (16, 3, 2, 2, 8)
    assert (layer.rotary, layer.rotary_base) == ("1d", 500.0)
    for name in ("po_proj.weight", "se_proj.bias", "po_coeff", "ag_proj.weight"):
        assert layer.get_parameter(name) is module.get_parameter(name)
    assert to_pom(layer) is layer


@torch.no_grad()
def test_cross_context_keeps_its_own_positions() -> None:
    module, _ = _published(published.PoMRoPE, {"n_groups": 1, "n_sel_heads": 4})
    x, context = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    lowered, _ = lower(module)
    expected = module(x, context, positions=torch.arange(5) + 3)
    assert _error(lowered(x, context, positions=torch.arange(5) + 3), expected) < 1e-5


class _Hybrid(nn.Module):
    """A published layer, a modified one and attention beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = published.PoM(16, 3, 2, 1, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.modified = _Normalised(16, 3, 2, 1, 4)
        for layer in (self.mixer, self.modified):
            nn.init.normal_(layer.po_coeff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return x + self.attention(x, x, x)[0] + self.modified(x)  # type: ignore[no-any-return]


class _Normalised(published.PoM):
    """Somebody's experiment: the same tensors, another function."""

    def features(self, xc: Tensor) -> Tensor:
        return nn.functional.normalize(super().features(xc), dim=-1)


@torch.no_grad()
def test_in_a_model_only_the_true_ones_are_replaced() -> None:
    torch.manual_seed(0)
    model = _Hybrid().eval()
    lowered, names = lower(model)
    assert names == ["mixer"]
    assert isinstance(lowered.modified, _Normalised) and isinstance(lowered.attention, nn.MultiheadAttention)
    x = torch.randn(2, 7, 16)
    assert _error(lowered(x), model(x)) < 1e-5
    assert isinstance(model.mixer, published.PoM), "the model itself is left alone"
    reasons = unrecognised(model)
    assert list(reasons) == ["modified"]
    assert "computes something else" in reasons["modified"]


def test_what_is_not_the_published_class() -> None:
    assert recognise(PoM(8, 2, 2)) is None
    assert recognise(nn.Linear(8, 8)) is None
    with pytest.raises(InputError, match="Linear is no PoM layer: expected parameters po_coeff"):
        to_pom(nn.Linear(8, 8))


class _OtherArguments(published.PoM):
    def forward(self, x: Tensor, temperature: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * temperature


class _MoreParameters(published.PoM):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_OtherArguments(16, 3, 2, 1, 4), "its forward takes x, temperature, not xq, xc, mask"),
        (_MoreParameters(16, 3, 2, 1, 4), "no published PoM layer has scale"),
        (_Normalised(16, 3, 2, 1, 4), "computes something else than any published version"),
    ],
)
def test_look_alikes_say_why_they_are_left_alone(module: nn.Module, reason: str) -> None:
    assert not is_published(module)
    with pytest.raises(InputError, match=f"looks like the published PoM, but .*{reason}"):
        to_pom(module)
    assert unrecognised(module).keys() == {""}
    lowered, names = lower(module)
    assert names == [] and type(lowered) is type(module)


def test_a_module_that_cannot_run() -> None:
    module = published.PoM(16, 3, 2, 1, 4)
    module.order = 5
    assert not is_published(module)
    with pytest.raises(InputError, match="cannot be run by itself on a few tokens"):
        to_pom(module)


def test_probing_leaves_no_trace() -> None:
    module, _ = _published(published.PoMRoPE, {"n_groups": 1, "n_sel_heads": 4})
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert is_published(module) and to_pom(module).training
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and all(torch.equal(before[name], value) for name, value in module.state_dict().items())


class _Doubled(PoM):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


class _Renamed(PoM):
    """A subclass that changes nothing."""


def _patched() -> PoM:
    layer = PoM(8, 2, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign,assignment,misc]
    return layer


def _hooked() -> PoM:
    layer = PoM(8, 2, 2)
    layer.register_forward_hook(lambda _module, _inputs, y: 3 * y)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: _Doubled(8, 2, 2), "overrides forward"), (_patched, "forward was replaced"), (_hooked, "forward hooks")],
)
def test_our_own_layer_made_to_compute_something_else_is_not_lowered(make: Callable[[], PoM], reason: str) -> None:
    model = nn.Sequential(make(), PoM(8, 2, 2))
    lowered, names = lower(model)
    assert names == ["1"] and reason in unrecognised(model)["0"]
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(lowered(x), model.eval()(x), rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match=f"can be lowered .*{reason}"):
        export_bundle(model[:1], example_inputs={"input": x}, out="never.pom")


def test_a_subclass_that_changes_nothing_is_lowered() -> None:
    assert lower(nn.Sequential(_Renamed(8, 2, 2)))[1] == ["0"]
    parametrized = nn.utils.parametrizations.weight_norm(PoM(8, 2, 2).qc_proj)
    layer = PoM(8, 2, 2)
    layer.qc_proj = parametrized
    assert lower(nn.Sequential(layer))[1] == ["0"]
