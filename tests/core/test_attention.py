"""PolynomialMixer against nn.MultiheadAttention's contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pom_edge.attention import PolynomialMixer
from pom_edge.errors import InputError
from pom_edge.masks import drop_tokens
from pom_edge.mixer import mixers_of
from tests.mixers import lively

B, T, N, D, H = 3, 7, 5, 16, 4
EXACT = 1e-12  # float64 rounding
FP32 = 1e-5  # two FP32 computations of the same function


def _lively(model: nn.Module) -> nn.Module:
    for i, (_, mixer) in enumerate(mixers_of(model)):
        lively(mixer, i)
    return model


def _mixer(**settings: Any) -> PolynomialMixer:
    torch.manual_seed(0)
    mixer = PolynomialMixer(D, H, **{"batch_first": True, **settings})
    _lively(mixer)
    return mixer.double().eval()


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def _additive(ignored: Tensor, value: float = -torch.inf) -> Tensor:
    return torch.zeros(ignored.shape, dtype=torch.float64).masked_fill(ignored, value)


PADDING = torch.arange(N) >= torch.tensor([[5], [3], [1]])  # True is ignored; (B, N)
PER_QUERY = torch.rand(T, N, generator=torch.Generator().manual_seed(1)) < 0.4
PER_BATCH = torch.rand(B, T, N, generator=torch.Generator().manual_seed(2)) < 0.4
TRIANGLE = torch.ones(T, T).triu(1).bool()
LONG_PADDING = torch.arange(T) >= torch.tensor([[7], [4], [2]])  # (B, T), for causal self-mixing


# ---- the signature


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_arguments_are_those_of_multihead_attention(method: str) -> None:
    theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
    ours = inspect.signature(getattr(PolynomialMixer, method)).parameters
    shared = list(ours.values())[: len(theirs)]
    assert [(p.name, p.default) for p in shared] == [(p.name, p.default) for p in theirs.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_settings_reach_the_mixer() -> None:
    mixer = PolynomialMixer(D, H, bias=False, dtype=torch.float64, device="meta", degree=5, expand=3, n_groups=2)
    pom = mixer.pom
    assert (pom.degree, pom.expand, pom.n_groups, pom.n_sel_heads) == (5, 3, 2, H)
    assert pom.ag_proj.bias is None and pom.ag_proj.weight.dtype == torch.float64 and pom.ag_proj.weight.is_meta
    assert PolynomialMixer(D, H, n_sel_heads=2).pom.n_sel_heads == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv is True"),
        ({"add_zero_attn": True}, "add_zero_attn is True"),
        ({"kdim": 8}, "kdim is 8, embed_dim 16"),
        ({"vdim": 8}, "vdim is 8"),
        ({"num_heads": 3}, "not divisible by num_heads 3"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"n_sel_heads": 5}, "not divisible by n_sel_heads 5"),
    ],
)
def test_what_cannot_be_built_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PolynomialMixer(**{"embed_dim": D, "num_heads": H, **settings})


# ---- forward


@torch.no_grad()
def test_layouts_agree() -> None:
    first, last = _mixer(), _mixer(batch_first=False)
    query, context = _randn(B, T, D), _randn(B, N, D, seed=1)
    expected = first.pom(query, context, mask=~PADDING)
    found, weights = first(query, context, context, key_padding_mask=PADDING)
    assert weights is None and _relative_error(found, expected) < EXACT
    swapped = context.transpose(0, 1)
    found, _ = last(query.transpose(0, 1), swapped, swapped, key_padding_mask=PADDING)
    assert _relative_error(found.transpose(0, 1), expected) < EXACT
    for mixer in (first, last):
        found, _ = mixer(query[1], context[1], context[1], key_padding_mask=PADDING[1], attn_mask=PER_QUERY)
        again, _ = first(query[1:2], context[1:2], context[1:2], key_padding_mask=PADDING[1:2], attn_mask=PER_QUERY)
        assert found.shape == (T, D) and _relative_error(found, again[0]) < EXACT


def _repeat(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(H, dim=0)


# Arguments of a cross-mixing call, and which (query, token) pairs they ignore.
CROSS = {
    "nothing": ({}, torch.zeros(T, N, dtype=torch.bool)),
    "padding": ({"key_padding_mask": PADDING}, PADDING[:, None]),
    "additive padding": ({"key_padding_mask": _additive(PADDING)}, PADDING[:, None]),
    "per query": ({"attn_mask": PER_QUERY}, PER_QUERY),
    "additive per query": ({"attn_mask": _additive(PER_QUERY)}, PER_QUERY),
    "lowest value": ({"attn_mask": _additive(PER_QUERY, torch.finfo(torch.float64).min)}, PER_QUERY),
    "per batch and head": ({"attn_mask": _repeat(PER_BATCH)}, PER_BATCH),
    "both": ({"attn_mask": PER_QUERY, "key_padding_mask": PADDING}, PER_QUERY | PADDING[:, None]),
    "both, mixed kinds": ({"attn_mask": _additive(PER_QUERY), "key_padding_mask": PADDING}, PER_QUERY | PADDING[:, None]),
    "both, by batch": ({"attn_mask": _repeat(PER_BATCH), "key_padding_mask": PADDING}, PER_BATCH | PADDING[:, None]),
}


@pytest.mark.parametrize("case", CROSS)
@torch.no_grad()
def test_masks_mean_what_they_mean_to_attention(case: str) -> None:
    arguments, ignored = CROSS[case]
    mixer, query, context = _mixer(), _randn(B, T, D), _randn(B, N, D, seed=1)
    found, _ = mixer(query, context, context, **arguments)
    expected = mixer.pom(query, context, mask=(~ignored).expand(B, T, N))
    assert _relative_error(found, expected) < EXACT
    assert case == "nothing" or _relative_error(mixer.pom(query, context), expected) > 1e-2
    if not ignored.expand(B, T, N).all(-1).any():  # attention itself then depends on the same tokens, and on no others
        _same_tokens_as_attention(arguments, ignored.expand(B, T, N))


def _same_tokens_as_attention(arguments: dict[str, Tensor], ignored: Tensor) -> None:
    attention = nn.MultiheadAttention(D, H, batch_first=True).double().eval()
    context = _randn(B, N, D)
    _, weights = attention(_randn(B, T, D), context, context, **arguments)
    assert torch.equal(weights == 0, ignored)


CAUSAL = {
    "the hint alone": {"is_causal": True},
    "bool triangle": {"attn_mask": TRIANGLE},
    "additive triangle": {"attn_mask": _additive(TRIANGLE)},
    "triangle and hint": {"attn_mask": TRIANGLE, "is_causal": True},
    "triangle for each head": {"attn_mask": TRIANGLE.expand(B * H, -1, -1)},
    "PyTorch's own": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(T)},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CAUSAL)
@torch.no_grad()
def test_the_causal_triangle_runs_in_linear_time(case: str, padded: bool) -> None:
    mixer, x = _mixer(), _randn(B, T, D)
    calls: list[dict[str, Any]] = []
    mixer.pom.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs), with_kwargs=True)
    padding = LONG_PADDING if padded else None
    found, _ = mixer(x, x, x, key_padding_mask=padding, **CAUSAL[case])
    assert calls[0]["causal"] and (calls[0]["mask"] is None or calls[0]["mask"].ndim == 2)
    ignored = TRIANGLE | (LONG_PADDING[:, None] if padded else False)
    assert _relative_error(found, mixer.pom(x, mask=(~ignored).expand(B, T, T))) < EXACT


@torch.no_grad()
def test_a_query_that_sees_nothing_gets_the_bias() -> None:
    mixer, x = _mixer(), _randn(B, T, D)
    found, _ = mixer(x, x, x, key_padding_mask=torch.arange(B)[:, None].expand(B, T) == 1)
    assert torch.equal(found[1], mixer.pom.ag_proj.bias.expand(T, D)) and torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.zeros(T, N)[:-1]}, r"attn_mask has shape \(6, 5\); expected \(7, 5\) or \(12, 7, 5\)"),
        ({"attn_mask": torch.full((T, N), 0.5)}, "values other than 0 and -inf, found up to 0.5"),
        ({"attn_mask": torch.zeros(T, N, dtype=torch.int64)}, "attn_mask is torch.int64; expected bool"),
        ({"attn_mask": _repeat(PER_BATCH) ^ (torch.arange(B * H) == 1)[:, None, None]}, "differs between heads"),
        ({"attn_mask": PER_QUERY, "is_causal": True}, "not the causal triangle"),
        ({"is_causal": True}, "7 queries for 5 context tokens"),
        ({"key_padding_mask": PADDING.t()}, r"key_padding_mask has shape \(5, 3\); expected \(3, 5\)"),
        ({"key_padding_mask": _additive(PADDING, -1e3)}, "key_padding_mask holds values other than 0 and -inf"),
        ({"value": _randn(B, N, D, seed=9)}, "key and value differ"),
        ({"key": _randn(N, D)}, "expected both"),
        ({"query": _randn(B, T, D + 1)}, "expected .batch, tokens, 16."),
        ({"query": torch.nested.nested_tensor([_randn(2, D), _randn(3, D)])}, "nested tensor"),
    ],
)
def test_calls_that_cannot_be_honoured_are_refused(arguments: dict[str, Tensor], message: str) -> None:
    context = _randn(B, N, D, seed=1)
    defaults = {"query": _randn(B, T, D), "key": context, "value": context}
    with pytest.raises(InputError, match=message):
        _mixer()(**{**defaults, **arguments})


def test_an_equal_value_is_accepted() -> None:
    mixer, x = _mixer(), _randn(B, T, D)
    assert torch.equal(mixer(x, x, x.clone())[0], mixer(x, x, x)[0])


def test_dropout_leaves_tokens_out_of_the_mean() -> None:
    torch.manual_seed(0)
    mask = torch.rand(2, 4000) < 0.5
    context = torch.zeros(2, 4000, 1)
    kept = drop_tokens(None, context, 0.25)
    assert abs(float(kept.double().mean()) - 0.75) < 0.03  # 4 standard deviations
    assert not (drop_tokens(mask, context, 0.25) & ~mask).any()
    per_query = drop_tokens(torch.ones(1, 3, 4000, dtype=torch.bool), context, 0.25)
    assert per_query.shape == (2, 3, 4000) and torch.equal(per_query[:, 0], per_query[:, 2])


def test_dropout_acts_in_training_only() -> None:
    mixer, x = _mixer(dropout=0.5), _randn(B, T, D)
    assert torch.equal(mixer(x, x, x)[0], mixer.pom(x, x))
    torch.manual_seed(0)
    first, second = mixer.train()(x, x, x)[0], mixer(x, x, x)[0]
    assert _relative_error(first, second) > 1e-2
    torch.manual_seed(0)
    assert torch.equal(mixer(x, x, x)[0], first)


# ---- export


@torch.no_grad()
def test_cross_mixing_exports_and_keeps_both_inputs() -> None:
    mixer, x, context = _mixer().float(), _randn(B, T, D).float(), _randn(B, N, D, seed=1).float()

    class _Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, query: Tensor, context: Tensor, ignored: Tensor) -> Tensor:
            return self.mixer(query, context, context, attn_mask=ignored, need_weights=False)[0]  # type: ignore[no-any-return]

    program = torch.export.export(_Cross(), (x, context, PER_QUERY)).module()
    assert _relative_error(program(x, context, ~PER_QUERY), mixer(x, context, context, attn_mask=~PER_QUERY)[0]) < FP32
    assert _relative_error(program(x, 2 * context, PER_QUERY), program(x, context, PER_QUERY)) > 1e-3
    with pytest.raises(InputError, match="pass the same tensor as key and value"):
        torch.export.export(mixer, (x, context, context.clone()))
