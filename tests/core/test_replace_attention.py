"""Whole PyTorch models with their attention replaced: what they compute, in training, in eval and exported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from pom_edge.attention import PolynomialMixer, replace_attention
from pom_edge.errors import InputError
from pom_edge.mixer import mixers_of
from tests.mixers import lively

B, T, N, D, H = 3, 7, 5, 16, 4
FP32 = 1e-5  # two FP32 computations of the same function
PADDING = torch.arange(N) >= torch.tensor([[5], [3], [1]])  # True is ignored; (B, N)
LONG_PADDING = torch.arange(T) >= torch.tensor([[7], [4], [2]])  # (B, T)


def _lively(model: nn.Module) -> nn.Module:
    for i, (_, mixer) in enumerate(mixers_of(model)):
        lively(mixer, i)
    return model


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def _encoder(layers: int = 2, **settings: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, dim_feedforward=24, **{"batch_first": True, **settings})
    return nn.TransformerEncoder(layer, num_layers=layers)


def _layer_by_definition(layer: nn.TransformerEncoderLayer, x: Tensor, mask: Tensor | None) -> Tensor:
    def mix(tokens: Tensor) -> Tensor:
        return layer.self_attn.pom(tokens, mask=mask)  # type: ignore[no-any-return, operator, union-attr]

    def feed_forward(tokens: Tensor) -> Tensor:
        return layer.linear2(layer.linear1(tokens).relu())  # type: ignore[no-any-return]

    if layer.norm_first:
        x = x + mix(layer.norm1(x))
        return x + feed_forward(layer.norm2(x))
    x = layer.norm1(x + mix(x))
    return layer.norm2(x + feed_forward(x))  # type: ignore[no-any-return]


def _forbid_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("fast path")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", refuse)
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", refuse)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_an_encoder_in_eval_computes_its_mixers(norm_first: bool, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_fast_path(monkeypatch)
    encoder = _encoder(norm_first=norm_first).eval()
    x, padding = _randn(B, T, D), LONG_PADDING if padded else None
    with pytest.raises(AssertionError, match="fast path"):  # what this test watches is what PyTorch would do
        encoder(x, src_key_padding_mask=padding)
    _lively(replace_attention(encoder, degree=3, expand=2))
    found = encoder(x, src_key_padding_mask=padding)
    expected = x
    for layer in encoder.layers:
        expected = _layer_by_definition(layer, expected, None if padding is None else ~padding)
    assert _relative_error(found, expected) < FP32
    encoder.train()
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, PolynomialMixer):
            assert module.dropout == 0.1
            module.dropout = 0.0
    assert _relative_error(encoder(x, src_key_padding_mask=padding), found) < FP32


@torch.no_grad()
def test_padding_of_an_encoder_does_not_reach_real_tokens() -> None:
    encoder = _lively(replace_attention(_encoder())).eval()
    x = _randn(B, T, D)
    noisy = torch.where(LONG_PADDING.unsqueeze(-1), 50.0, x)
    real = ~LONG_PADDING
    outputs = [encoder(tokens, src_key_padding_mask=LONG_PADDING)[real] for tokens in (x, noisy)]
    assert _relative_error(outputs[0], outputs[1]) < FP32
    assert _relative_error(encoder(noisy)[real], encoder(x)[real]) > 1e-3


@torch.no_grad()
def test_an_encoder_runs_causally() -> None:
    encoder = _lively(replace_attention(_encoder())).eval()
    x = _randn(B, T, D)
    changed = x.clone()
    changed[:, 4] += 1
    triangle = nn.Transformer.generate_square_subsequent_mask(T)
    before, after = (encoder(tokens, mask=triangle) for tokens in (x, changed))
    assert torch.equal(before[:, :4], after[:, :4]) and (before[:, 4:] - after[:, 4:]).norm(dim=-1).min() > 1e-4


@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_a_decoder_mixes_its_memory(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(D, H, dim_feedforward=24, batch_first=batch_first)
    decoder = _lively(replace_attention(nn.TransformerDecoder(layer, num_layers=2), n_sel_heads=2)).eval()
    x, memory = _randn(B, T, D), _randn(B, N, D, seed=1)
    arguments = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(T),
        "tgt_key_padding_mask": torch.zeros(B, T).masked_fill(LONG_PADDING, -torch.inf),
        "memory_key_padding_mask": PADDING,
    }
    found = decoder(_swap(x, batch_first), _swap(memory, batch_first), **arguments)
    expected = x
    for one in decoder.layers:
        expected = one.norm1(expected + one.self_attn.pom(expected, mask=~LONG_PADDING, causal=True))
        expected = one.norm2(expected + one.multihead_attn.pom(expected, memory, mask=~PADDING))
        expected = one.norm3(expected + one.linear2(one.linear1(expected).relu()))
    assert _relative_error(_swap(found, batch_first), expected) < FP32


def _swap(tokens: Tensor, batch_first: bool) -> Tensor:
    return tokens if batch_first else tokens.transpose(0, 1)


def test_a_whole_transformer_trains() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(D, H, 2, 2, dim_feedforward=24, batch_first=True)
    _lively(replace_attention(model)).train()
    assert sum(1 for _ in mixers_of(model)) == 6 and not any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    x, y = _randn(B, T, D), _randn(B, N, D, seed=1)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        torch.manual_seed(1)  # the same dropout each time
        loss = (model(x, y) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert losses[-1] < losses[0]


# ---- what is replaced


def test_skip_makes_a_hybrid() -> None:
    encoder = _encoder(layers=3)
    paths = []

    def skip(path: str, attention: nn.Module) -> bool:
        assert isinstance(attention, nn.MultiheadAttention)
        paths.append(path)
        return path == "layers.1.self_attn"

    _lively(replace_attention(encoder, skip=skip)).eval()
    assert paths == [f"layers.{i}.self_attn" for i in range(3)]
    kinds = [type(layer.self_attn) for layer in encoder.layers]
    assert kinds == [PolynomialMixer, nn.MultiheadAttention, PolynomialMixer]
    x = _randn(B, T, D)
    with torch.no_grad():  # the skipped layer keeps PyTorch's fused path, which agrees with its slow one
        fused = encoder(x, src_key_padding_mask=LONG_PADDING)
    assert _relative_error(fused[~LONG_PADDING], encoder(x, src_key_padding_mask=LONG_PADDING)[~LONG_PADDING]) < FP32


def test_shared_attention_stays_shared_and_kinds_are_kept() -> None:
    attention = nn.MultiheadAttention(D, H, bias=False, dtype=torch.float64).eval()
    model = nn.ModuleDict({"a": attention, "b": nn.Sequential(attention)})
    assert replace_attention(model, degree=2, expand=1, n_groups=2) is model
    mixer = model["a"]
    assert isinstance(mixer, PolynomialMixer) and mixer is model["b"][0]  # type: ignore[index]
    assert (mixer.pom.degree, mixer.pom.expand, mixer.pom.n_groups, mixer.pom.n_sel_heads) == (2, 1, 2, H)
    assert mixer.pom.ag_proj.bias is None and mixer.pom.po_coeff.dtype == torch.float64
    assert not mixer.training and not mixer.batch_first


class _Rotated(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (nn.MultiheadAttention(D, H, kdim=8), "1: kdim is 8"),
        (nn.MultiheadAttention(D, H, add_bias_kv=True), "1: add_bias_kv is True"),
        (nn.MultiheadAttention(D, H, add_zero_attn=True), "1: add_zero_attn is True"),
        (_Rotated(D, H), "1: _Rotated has a forward of its own"),
    ],
)
def test_a_failing_replacement_changes_nothing(bad: nn.Module, message: str) -> None:
    model = nn.ModuleList([nn.MultiheadAttention(D, H), bad])
    with pytest.raises(InputError, match=message):
        replace_attention(model)
    assert type(model[0]) is nn.MultiheadAttention


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="found no attention to replace in Linear"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(InputError, match="is itself an attention"):
        replace_attention(nn.MultiheadAttention(D, H))


def test_an_encoder_layer_swapped_by_itself_says_so_when_packed() -> None:
    encoder = _encoder()
    replace_attention(encoder.layers[0])
    with torch.no_grad(), pytest.raises(InputError, match="call replace_attention on the whole encoder"):
        encoder.eval()(_randn(B, T, D), src_key_padding_mask=LONG_PADDING)


# ---- export


class _Causal(nn.Module):
    """What users write: the mask is built inside, and said to be causal."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        triangle = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return self.encoder(x, mask=triangle, is_causal=True)  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_padded_encoder_exports_with_free_sizes() -> None:
    encoder = _lively(replace_attention(_encoder())).eval()
    inputs = {"src": _randn(B, T, D), "src_key_padding_mask": LONG_PADDING}
    shapes = {name: {0: Dim("batch", max=64), 1: Dim("tokens", max=4096)} for name in inputs}
    program = torch.export.export(copy.deepcopy(encoder), (), inputs, dynamic_shapes=shapes).module()
    for batch, tokens in ((2, 3), (4, 300)):
        x = _randn(batch, tokens, D)
        padding = torch.arange(tokens) >= torch.arange(tokens, tokens - batch, -1)[:, None]
        other = {"src": x, "src_key_padding_mask": padding}
        assert _relative_error(program(**other), encoder(**other)) < FP32


@torch.no_grad()
def test_a_causal_encoder_exports_in_linear_time() -> None:
    model = _Causal(_lively(replace_attention(_encoder())).eval())
    x = _randn(B, T, D)
    program = torch.export.export(model, (x,))
    assert _relative_error(program.module()(x), model(x)) < FP32
    products = [n for n in program.graph.nodes if n.op == "call_function" and "matmul" in str(n.target)]
    assert not products  # a mask for each query would be one
