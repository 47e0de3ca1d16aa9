"""Hugging Face encoders, built from a config (no network), with their attention replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

transformers = pytest.importorskip("transformers")

from pom_edge.attention import replace_attention  # noqa: E402
from pom_edge.errors import InputError  # noqa: E402
from pom_edge.huggingface import HuggingFaceMixer  # noqa: E402
from pom_edge.mixer import PoM, mixers_of  # noqa: E402
from tests.mixers import lively  # noqa: E402

FP32 = 1e-5  # two FP32 computations of the same function
IMPLEMENTATIONS = ["sdpa", "eager"]
# A wide initialisation: with BERT's own, what a mixer adds is lost beside the residual stream.
SIZES = {"initializer_range": 0.5, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LENGTHS = torch.tensor([9, 5, 2])
MASK = (torch.arange(9) < LENGTHS[:, None]).to(torch.int64)  # (3, 9), 1 for real tokens


def _text(kind: str = "Bert", attention: str = "sdpa", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, max_position_embeddings=64, pad_token_id=0, attn_implementation=attention, **{**SIZES, **settings}
    )
    return getattr(transformers, f"{kind}Model")(config)  # type: ignore[no-any-return]


def _vision(kind: str = "ViT", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(image_size=8, patch_size=2, num_channels=3, **{**SIZES, **settings})
    return getattr(transformers, f"{kind}Model")(config)  # type: ignore[no-any-return]


def _replace(model: nn.Module, **settings: Any) -> nn.Module:
    replace_attention(model, **settings)
    for i, (_, mixer) in enumerate(mixers_of(model)):
        lively(mixer, i)
    return model.eval()


def _ids(seed: int = 0, tokens: int = 9) -> Tensor:
    return torch.randint(1, 40, (3, tokens), generator=torch.Generator().manual_seed(seed))


def _states(model: nn.Module, **inputs: Any) -> Tensor:
    return model(**inputs).last_hidden_state  # type: ignore[no-any-return]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


# ---- forward


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@torch.no_grad()
def test_text_encoders_compute_their_mixers(kind: str, attention: str) -> None:
    model = _replace(_text(kind, attention), degree=2, expand=3)
    mixers = dict(mixers_of(model))
    assert list(mixers) == [f"encoder.layer.{i}.attention.self.pom" for i in range(2)]
    assert all((m.degree, m.expand, m.n_sel_heads) == (2, 3, 4) for m in mixers.values())
    x = model.embeddings(input_ids=_ids())
    for layer in model.encoder.layer:
        x = layer.attention.output(layer.attention.self.pom(x, mask=MASK), x)
        x = layer.output(layer.intermediate(x), x)
    assert _relative_error(_states(model, input_ids=_ids(), attention_mask=MASK), x) < FP32


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
@torch.no_grad()
def test_vision_encoders_compute_their_mixers(kind: str) -> None:
    model = _replace(_vision(kind))
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = model.embeddings(images)
    for layer in model.layers:
        x = x + layer.attention.pom(layer.layernorm_before(x))
        x = x + layer.mlp(layer.layernorm_after(x))
    assert _relative_error(_states(model, pixel_values=images), model.layernorm(x)) < FP32
    model.layers[0].attention.pom.po_coeff.zero_()
    assert _relative_error(_states(model, pixel_values=images), model.layernorm(x)) > 1e-3


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@torch.no_grad()
def test_padded_tokens_do_not_reach_the_others(attention: str) -> None:
    model, real = _replace(_text(attention=attention)), MASK > 0
    noisy = torch.where(real, _ids(), _ids(seed=1))
    before, after = (_states(model, input_ids=ids, attention_mask=MASK) for ids in (_ids(), noisy))
    assert torch.equal(before[real], after[real])
    unmasked = [_states(model, input_ids=ids)[real] for ids in (_ids(), noisy)]
    assert _relative_error(*unmasked) > 1e-3
    short = _states(model, input_ids=_ids()[1:2, :5], attention_mask=MASK[1:2, :5])
    assert _relative_error(short, before[1:2, :5]) < FP32


@torch.no_grad()
def test_decoders_stay_causal() -> None:
    model = _replace(_text(is_decoder=True))
    changed = _ids()
    changed[:, 4] = (changed[:, 4] + 1) % 40
    for mask in (None, torch.ones_like(MASK)):
        before, after = (_states(model, input_ids=i, attention_mask=mask, use_cache=False) for i in (_ids(), changed))
        assert torch.equal(before[:, :4], after[:, :4]) and _relative_error(before[:, 5:], after[:, 5:]) > 1e-3


@torch.no_grad()
def test_cross_attention_mixes_the_encoder_states() -> None:
    model = _replace(_text(is_decoder=True, add_cross_attention=True))
    states = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    keep = (torch.arange(5) < torch.tensor([[5], [3], [1]])).to(torch.int64)
    noisy = torch.where(keep[..., None] > 0, states, 30.0)
    fixed = {"input_ids": _ids(), "encoder_attention_mask": keep, "use_cache": False}
    before = _states(model, encoder_hidden_states=states, **fixed)
    assert torch.equal(before, _states(model, encoder_hidden_states=noisy, **fixed))
    assert _relative_error(_states(model, encoder_hidden_states=states.roll(1, 0), **fixed), before) > 1e-3


# ---- the masks that a caller may hand to the layers


def _mixer(causal: bool = False, cross: bool = False) -> HuggingFaceMixer:
    return HuggingFaceMixer(lively(PoM(8, 3, 2)), cross=cross, causal=causal, dropout=0.0).eval()


PADDING = MASK.bool()
TRIANGLE = torch.ones(9, 9).tril().bool()
ANY = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.5


def _additive(keep: Tensor, value: float) -> Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, value)


@pytest.mark.parametrize(
    ("mask", "kept", "per_query"),
    [
        (PADDING[:, None, None], PADDING[:, None], False),
        (PADDING[:, None, None].expand(3, 1, 9, 9), PADDING[:, None], False),
        (PADDING[:, None, None].expand(3, 4, 9, 9), PADDING[:, None], False),
        (_additive(PADDING[:, None, None].expand(3, 1, 9, 9), -torch.inf), PADDING[:, None], False),
        (_additive(PADDING[:, None, None].expand(3, 1, 9, 9), torch.finfo(torch.float32).min), PADDING[:, None], False),
        ((TRIANGLE & PADDING[:, None])[:, None], TRIANGLE & PADDING[:, None], False),
        (TRIANGLE[None, None], TRIANGLE[None], False),
        (ANY[:, None], ANY, True),
    ],
)
@torch.no_grad()
def test_prepared_masks_are_understood(mask: Tensor, kept: Tensor, per_query: bool) -> None:
    mixer, x = _mixer(), torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(0))
    passed: list[Any] = []
    mixer.pom.register_forward_pre_hook(lambda _m, _a, kwargs: passed.append(kwargs["mask"]), with_kwargs=True)
    found, weights = mixer(x, mask)
    assert weights is None
    assert _relative_error(found, mixer.pom(x, mask=kept.expand(3, 9, 9))) < FP32
    assert (passed[0].ndim == 3) == per_query  # what can be linear, is


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.zeros(3, 1, 9, 9) + 0.5}, "values other than 0 and -inf"),
        ({"attention_mask": torch.zeros(3, 9, 9)}, r"shape \(3, 9, 9\); expected \(B, N\) or"),
        ({"attention_mask": torch.rand(3, 4, 9, 9) < 0.5}, "differs between heads"),
        ({"cache": object()}, "cache cannot be honoured .* use_cache=False"),
        ({"position_embeddings": (1, 2)}, "position_embeddings cannot be honoured"),
        ({"output_attentions": True}, "output_attentions cannot be honoured"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _mixer()(torch.zeros(3, 9, 8), **arguments)
    with pytest.raises(InputError, match="needs encoder_hidden_states"):
        _mixer(cross=True)(torch.zeros(3, 9, 8))


def test_a_decoder_with_a_cache_is_refused() -> None:
    model = _replace(_text(is_decoder=True))
    with pytest.raises(InputError, match="pass use_cache=False"):
        model(input_ids=_ids())


# ---- replacement


def test_skip_makes_a_hybrid_whose_attention_is_unchanged() -> None:
    for decoder in (False, True):
        original = _text(is_decoder=decoder).eval()
        paths: list[str] = []

        def skip(path: str, _module: nn.Module, paths: list[str] = paths) -> bool:
            paths.append(path)
            return path.startswith("encoder.layer.0.")

        hybrid = _replace(copy.deepcopy(original), skip=skip)
        assert paths == [f"encoder.layer.{i}.attention.self" for i in range(2)]
        assert [name for name, _ in mixers_of(hybrid)] == ["encoder.layer.1.attention.self.pom"]
        for mask in (None, MASK):
            inputs = {"input_ids": _ids(), "attention_mask": mask, "use_cache": False, "output_hidden_states": True}
            found, expected = (model(**inputs).hidden_states[1] for model in (hybrid, original))
            assert _relative_error(found[MASK > 0], expected[MASK > 0]) < FP32


def test_other_attention_is_refused_and_nothing_changes() -> None:
    config = transformers.DistilBertConfig(vocab_size=40, dim=16, n_layers=1, n_heads=2, hidden_dim=24)
    model = nn.ModuleList([_text(), transformers.DistilBertModel(config)])
    with pytest.raises(InputError, match=r"1\.transformer\.layer\.0\.attention.*is not supported; expected one of BertSelf"):
        replace_attention(model)
    assert not any(isinstance(m, HuggingFaceMixer) for m in model.modules())
    assert model[0].config._attn_implementation == "sdpa"


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pom_edge.attention.TRANSFORMERS_MAJOR", 99)
    with pytest.raises(InputError, match=r"found transformers .*; expected 99 or newer: pip install"):
        replace_attention(_text())


def test_packed_sequences_are_refused() -> None:
    model = _replace(_text(is_decoder=True, num_hidden_layers=1))
    mask = transformers.masking_utils.create_sliding_window_causal_mask
    model.config.sliding_window = 4
    with pytest.raises(InputError, match="neither plain nor causal"):
        mask(config=model.config, inputs_embeds=torch.zeros(3, 9, 16), attention_mask=MASK, cache=None)


# ---- training and export


@pytest.mark.parametrize("kind", ["Bert", "ViT"])
def test_a_step_trains_every_mixer(kind: str) -> None:
    model = _replace(_text() if kind == "Bert" else _vision()).train()
    inputs = {"input_ids": _ids(), "attention_mask": MASK} if kind == "Bert" else {"pixel_values": torch.randn(2, 3, 8, 8)}
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        torch.manual_seed(1)  # the same dropout each time
        loss = (_states(model, **inputs) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    for _, mixer in mixers_of(model):
        assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())
    assert losses[-1] < losses[0]


@torch.no_grad()
def test_bert_exports_with_free_sizes_and_no_quadratic_mask() -> None:
    model = _replace(_text())
    inputs = {"input_ids": _ids(), "attention_mask": MASK}
    shapes = {name: {0: Dim("batch", max=32), 1: Dim("tokens", max=64)} for name in inputs}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    values = [node.meta.get("val") for node in program.graph.nodes]
    length = next(node.meta["val"].shape[1] for node in program.graph.nodes if node.name == "input_ids")
    assert not any(isinstance(v, Tensor) and sum(dim == length for dim in v.shape) > 1 for v in values)
    run = program.module()
    for batch, size in ((2, 4), (3, 50)):
        ids = torch.randint(1, 40, (batch, size), generator=torch.Generator().manual_seed(2))
        mask = (torch.arange(size) < torch.arange(size, size - batch, -1)[:, None]).to(torch.int64)
        found, expected = (_states(m, input_ids=ids, attention_mask=mask) for m in (run, model))
        assert _relative_error(found, expected) < FP32
        assert _relative_error(_states(run, input_ids=ids, attention_mask=mask * 0 + 1), expected) > 1e-3


@torch.no_grad()
def test_vit_exports_with_a_free_batch() -> None:
    model = _replace(_vision())
    images = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (), {"pixel_values": images}, dynamic_shapes={"pixel_values": {0: Dim("batch")}})
    other = torch.randn(5, 3, 8, 8)
    assert _relative_error(_states(program.module(), pixel_values=other), _states(model, pixel_values=other)) < FP32
