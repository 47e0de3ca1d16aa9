"""Reference models: their configs, what each token may see, free sizes, and that they train and export."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from pom_edge.blocks import FullAttention, LocalAttention
from pom_edge.errors import InputError
from pom_edge.mixer import PoM, mixers_of
from pom_edge.models import Classifier, LanguageModel, ModelConfig, build_model, example_inputs
from tests.mixers import lively

EXACT = 1e-12  # float64 rounding
FP32 = 1e-5  # two FP32 computations of the same function
HYBRID = ("pom", "local", "full")

CONFIGS = {
    "classifier": {"kind": "classifier", "image_size": 12, "patch_size": 3, "channels": 1, "num_classes": 5},
    "dense": {"kind": "dense", "patch_size": 2, "channels": 3, "num_classes": 4, "rotary": "2d"},
    "features": {"kind": "encoder", "input_dim": 6, "output_dim": 3, "n_sel_heads": 4, "n_groups": 2, "bias": True},
    "tokens": {"kind": "encoder", "vocab_size": 11, "rotary": "1d", "positions": "learned", "max_tokens": 64},
    "lm": {"kind": "lm", "vocab_size": 13, "tied_head": True},
}
VARIANTS = [(name, blocks) for name in CONFIGS for blocks in (None, HYBRID)]


def _config(name: str, blocks: tuple[str, ...] | None = None, **changes: Any) -> ModelConfig:
    depth = 2 if blocks is None else len(blocks)
    return ModelConfig(**{"dim": 16, "depth": depth, "blocks": blocks, "window": 4, **CONFIGS[name], **changes})


def _model(config: ModelConfig, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build_model(config)
    for i, (_, mixer) in enumerate(mixers_of(model)):
        lively(mixer, seed + i)
    return model.eval()


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


# ---- configs


@pytest.mark.parametrize(("name", "blocks"), VARIANTS)
def test_config_survives_json(name: str, blocks: tuple[str, ...] | None) -> None:
    config = _config(name, blocks)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(_config(name, blocks))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lm", {"kind": "gan"}, "kind is 'gan'; expected one of classifier, encoder"),
        ("lm", {"dim": 0}, "dim is 0; expected a whole number"),
        ("lm", {"depth": "2"}, "depth is '2'"),
        ("lm", {"vocab_size": None}, "'lm' needs vocab_size"),
        ("lm", {"num_classes": 3}, "num_classes has no meaning for a model of kind 'lm'"),
        ("lm", {"tied_head": 1}, "tied_head is 1; expected True or False"),
        ("lm", {"norm_eps": -1e-5}, "norm_eps is -1e-05; expected a positive number"),
        ("lm", {"n_groups": 3}, "dim 16 is not divisible by n_groups 3"),
        ("lm", {"n_sel_heads": 5}, "32 is not divisible by n_sel_heads 5"),
        ("lm", {"n_sel_heads": None}, "n_sel_heads is None"),
        ("lm", {"rotary": "2d"}, "needs a grid of patches"),
        ("lm", {"rotary": "3d"}, "rotary is '3d'"),
        ("lm", {"positions": "learned"}, "learned positions need max_tokens"),
        ("lm", {"positions": "sinusoidal"}, "positions is 'sinusoidal'; expected one of none, learned"),
        ("lm", {"blocks": ("pom",), "depth": 2}, "blocks names 1 mixers, but depth is 2"),
        ("lm", {"blocks": ("pom", "mamba")}, "a block is 'mamba'; expected one of pom, full, local"),
        ("lm", {"blocks": ("pom", "full"), "n_heads": 3}, "dim 16 is not divisible by n_heads 3"),
        ("features", {"vocab_size": 7}, "either input_dim .* or vocab_size"),
        ("classifier", {"image_size": 10}, "image_size 10 is not a multiple of patch_size 3"),
        ("dense", {"positions": "learned", "max_tokens": 4}, "max_tokens, positions has no meaning"),
    ],
)
def test_bad_configs_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _config(name, **changes)


def test_unknown_and_missing_settings_are_refused() -> None:
    settings = _config("lm").to_dict()
    with pytest.raises(InputError, match="unknown settings heads"):
        ModelConfig.from_dict({**settings, "heads": 3})
    del settings["dim"]
    with pytest.raises(InputError, match="lacks dim"):
        ModelConfig.from_dict(settings)
    with pytest.raises(InputError, match="is a list"):
        ModelConfig.from_dict([1])  # type: ignore[arg-type]


def test_a_model_refuses_the_config_of_another_kind() -> None:
    with pytest.raises(InputError, match="'lm', not 'classifier'"):
        Classifier(_config("lm"))


# ---- attention blocks


def _attention_by_definition(layer: FullAttention | LocalAttention, x: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention, one head after the other; seen (B, N, N)."""
    q, k, v = layer.qkv_proj(x).chunk(3, dim=-1)
    width = layer.dim // layer.n_heads
    heads = []
    for h in range(layer.n_heads):
        part = slice(h * width, (h + 1) * width)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / width**0.5
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[..., part])
    return layer.out_proj(torch.cat(heads, -1))


def _seen(tokens: int, causal: bool, window: int | None, mask: Tensor | None) -> Tensor:
    t = torch.arange(tokens)
    distance = t[:, None] - t
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & ((distance < window) if causal else (distance.abs() <= window // 2))
    return seen.expand(3, -1, -1) if mask is None else seen & (mask > 0).unsqueeze(1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 64])
@pytest.mark.parametrize("tokens", [1, 4, 9, 33])
@torch.no_grad()
def test_attention_is_what_its_mask_says(tokens: int, window: int | None, causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    layer = (FullAttention(8, 2) if window is None else LocalAttention(8, 2, window)).double()
    x = _randn(3, tokens, 8)
    mask = torch.ones(3, tokens).double() if padded else None
    if mask is not None:
        mask[1, tokens // 2 + 1 :] = 0
        mask[2, ::3] = 0
    seen = _seen(tokens, causal, window, mask)
    found, expected = layer(x, mask=mask, causal=causal), _attention_by_definition(layer, x, seen)
    defined = seen.any(-1)  # a token that sees nothing has no softmax; ours is finite there
    assert torch.isfinite(found).all()
    assert _relative_error(found[defined], expected[defined]) < EXACT


# ---- what tokens see


@pytest.mark.parametrize("kind", ["pom", "local", "full"])
@torch.no_grad()
def test_language_models_are_causal(kind: str) -> None:
    model = _model(_config("lm", (kind, kind)))
    ids = torch.randint(13, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 12] = (ids[0, 12] + 1) % 13
    before, after = model(ids), model(changed)
    assert torch.allclose(before[:, :12], after[:, :12], atol=1e-5)
    assert (before[:, 12:] - after[:, 12:]).norm(dim=-1).min() > 1e-4 or kind == "local"  # windows end after a while
    assert (before[:, 12:15] - after[:, 12:15]).norm(dim=-1).min() > 1e-3


@pytest.mark.parametrize("kind", ["pom", "local", "full"])
@torch.no_grad()
def test_padding_does_not_reach_real_tokens(kind: str) -> None:
    model = _model(_config("features", (kind, kind)))
    x = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 10)
    mask[1, 7:] = 0
    noisy = torch.where(mask.unsqueeze(-1) > 0, x, 100 * x)
    real = mask > 0
    assert _relative_error(model(noisy, mask)[real], model(x, mask)[real]) < FP32
    assert _relative_error(model(noisy)[real], model(x)[real]) > 1e-3  # without the mask it does
    assert _relative_error(model(x[1:, :7]), model(x, mask)[1:, :7]) < FP32  # padding is the same as a shorter sequence


@pytest.mark.parametrize("rotary", [None, "1d", "2d"])
@torch.no_grad()
def test_classifiers_see_where_patches_are(rotary: str | None) -> None:
    model = _model(_config("classifier", rotary=rotary))
    x = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    assert _relative_error(model(x.roll(3, dims=-1)), model(x)) > 1e-3


@torch.no_grad()
def test_dense_logits_land_on_their_own_pixels() -> None:
    model = _model(_config("dense", rotary=None))
    for _, mixer in mixers_of(model):
        mixer.po_coeff.zero_()  # no mixing: a pixel reaches its own patch only
    x = torch.randn(1, 3, 6, 10, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, :, 3, 6] += 1.0  # the patch of rows 2..3, columns 6..7
    touched = (model(x) != model(changed)).any(1)[0]
    expected = torch.zeros(6, 10, dtype=torch.bool)
    expected[2:4, 6:8] = True
    assert torch.equal(touched, expected)


@torch.no_grad()
def test_learned_positions_tell_order_and_end() -> None:
    model = _model(_config("tokens", rotary=None))
    ids = torch.arange(8).unsqueeze(0)
    assert _relative_error(model(ids.flip(1)).flip(1), model(ids)) > 1e-3
    with pytest.raises(InputError, match="65 tokens; the learned positions of this model end at 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_a_tied_head_is_the_embedding() -> None:
    tied, free = _model(_config("lm")), _model(_config("lm", tied_head=False))
    assert "head.weight" in free.state_dict() and not any("head" in name for name in tied.state_dict())
    assert isinstance(tied, LanguageModel)
    ids = torch.arange(6).unsqueeze(0)
    features = tied.mix(tied.embed(ids), causal=True)
    assert _relative_error(tied(ids), features @ tied.embed.weight.t()) < FP32


# ---- sizes, wrong inputs, training, export


@pytest.mark.parametrize(("name", "blocks"), VARIANTS)
def test_inputs_are_named_as_the_arguments(name: str, blocks: tuple[str, ...] | None) -> None:
    config = _config(name, blocks)
    model, inputs = build_model(config), example_inputs(config, batch=3, tokens=7)
    assert list(inputs) == list(inspect.signature(model.forward).parameters)
    shapes = {
        "classifier": (3, 5),
        "dense": (3, 4, 8, 8),
        "features": (3, 7, 3),
        "tokens": (3, 7, 16),
        "lm": (3, 7, 13),
    }
    assert tuple(model(**inputs).shape) == shapes[name]
    mixers = [model.get_submodule(f"blocks.{i}.mixer") for i in range(config.depth)]
    expected = {"pom": PoM, "local": LocalAttention, "full": FullAttention}
    assert [type(mixer) for mixer in mixers] == [expected[kind] for kind in config.mixers()]
    assert all(torch.equal(a, b) for a, b in zip(inputs.values(), example_inputs(config, 3, 7).values(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("classifier", (2, 1, 12, 15), r"expected \(batch, 1, 12, 12\)"),
        ("dense", (2, 3, 8, 7), "multiples of 2"),
        ("features", (2, 7), r"expected \(batch, tokens, 6\)"),
        ("lm", (2, 7), "token ids are torch.float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(_config(name))(torch.zeros(shape))


@pytest.mark.parametrize(("name", "blocks"), VARIANTS)
def test_every_parameter_trains(name: str, blocks: tuple[str, ...] | None) -> None:
    config = _config(name, blocks)
    model = _model(config).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = example_inputs(config)
    losses = []
    for _ in range(2):
        loss = (model(**inputs) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        idle = [
            n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all() or not p.grad.any()
        ]
        assert not idle
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["features", "lm"])
@torch.no_grad()
def test_memory_is_linear_in_tokens(name: str) -> None:
    model, largest = _model(_config(name, ("pom", "local"))), {}
    for tokens in (512, 2048):
        with _LargestTensor() as mode:
            model(**example_inputs(_config(name), batch=1, tokens=tokens))
        largest[tokens] = mode.numel
    assert largest[2048] <= 4.2 * largest[512]


def _dynamic_shapes(name: str, inputs: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    batch, tokens = Dim("batch", max=64), Dim("tokens", max=4096)
    if name == "classifier":
        return {"x": {0: batch}}
    if name == "dense":
        return {"x": {0: batch, 2: 2 * Dim("rows", max=256), 3: 2 * Dim("columns", max=256)}}
    return {key: {0: batch, 1: tokens} for key in inputs}


@pytest.mark.parametrize(("name", "blocks"), VARIANTS)
@torch.no_grad()
def test_models_export_with_free_sizes(name: str, blocks: tuple[str, ...] | None) -> None:
    config = _config(name, blocks)
    model, inputs = _model(config), example_inputs(config, batch=2, tokens=16)
    program = torch.export.export(
        model,
        (),
        inputs,
        dynamic_shapes=_dynamic_shapes(name, inputs),
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for batch, tokens in ((1, 3), (3, 16), (2, 60)):
        other = example_inputs(config, batch=batch, tokens=tokens, seed=1)
        if name == "dense":
            other = {"x": torch.randn(batch, 3, 2 * batch + 2, 6)}  # one row of patches is refused by torch.export
        assert _relative_error(program(**other), model(**other)) < FP32
