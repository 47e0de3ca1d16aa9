"""model.pt in and out: our format, other people's state dicts, factories, programs, pickles."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import pom_edge
from pom_edge.checkpoint import load, load_checkpoint, save_checkpoint
from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model, example_inputs
from tests.core import published_standin as published

CONFIGS = {
    "classifier": ModelConfig("classifier", dim=16, depth=2, image_size=8, patch_size=4, channels=1, num_classes=3),
    "encoder": ModelConfig("encoder", dim=16, depth=2, input_dim=5, n_groups=2, n_sel_heads=4, bias=True),
    "dense": ModelConfig("dense", dim=16, depth=1, patch_size=4, channels=3, num_classes=2, rotary="2d", n_sel_heads=4),
    "lm": ModelConfig("lm", dim=16, depth=2, vocab_size=11, tied_head=True, blocks=("pom", "local"), window=4),
}
State = dict[str, Tensor]


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model.eval()


class Hybrid(nn.Module):
    """Somebody's model: published layers, attention, a norm with buffers, tied weights."""

    def __init__(self, rotary: bool = False, rows: int = 64, base: float = 10000.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        settings: dict[str, Any] = {"max_seq_len": rows, "rope_base": base} if rotary else {}
        self.mixer = (published.PoMRoPE if rotary else published.PoM)(16, 3, 2, 1, 4, **settings)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mixer(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]


def build_hybrid() -> nn.Module:
    return Hybrid()


IDS = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])


def saved(tmp_path: Path, content: Any, name: str = "model.pt") -> Path:
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@torch.no_grad()
def same_answers(found: nn.Module | None, model: nn.Module, **inputs: Tensor) -> bool:
    assert found is not None and not found.training
    expected = model(**inputs)
    assert float(expected.abs().max()) > 1e-3, "an output near zero proves nothing"
    return torch.allclose(found(**inputs), expected, rtol=1e-5, atol=1e-6)


# ---- our format -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_reference_model_comes_back(kind: str, suffix: str, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    model = lively(build_model(config))
    inputs = example_inputs(config, batch=3)
    path = tmp_path / f"model{suffix}"
    save_checkpoint(path, model, config, samples=inputs, labels=torch.arange(3), class_names=["a", "b", "c"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file stays"
    loaded = load_checkpoint(path)
    assert loaded.format == "pom-edge checkpoint" and loaded.config == config and loaded.warnings == []
    assert loaded.published_layout is None and loaded.layer is None and loaded.exported_program is None
    assert same_answers(loaded.model, model, **inputs)
    assert loaded.samples.keys() == inputs.keys()
    assert all(torch.equal(loaded.samples[name], inputs[name]) for name in inputs)
    assert loaded.labels is not None and loaded.labels.tolist() == [0, 1, 2]
    assert loaded.class_names == ["a", "b", "c"]
    assert same_answers(pom_edge.load(path), model, **inputs)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_samples_are_optional_and_random_numbers_untouched(suffix: str, tmp_path: Path) -> None:
    config, path = CONFIGS["encoder"], tmp_path / f"model{suffix}"
    model = lively(build_model(config))
    state = torch.get_rng_state()
    save_checkpoint(path, model, config)
    loaded = load_checkpoint(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.samples == {} and loaded.labels is None and loaded.class_names is None


def test_a_safetensors_file_of_ours_is_known_by_its_metadata(tmp_path: Path) -> None:
    save_checkpoint(path := tmp_path / "m.safetensors", build_model(CONFIGS["lm"]), CONFIGS["lm"])
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pom-edge"
        assert json.loads(file.metadata()["config"]) == CONFIGS["lm"].to_dict()


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"samples": {"x": torch.zeros(3, 4, 5)}, "labels": torch.zeros(2)}, r"\[2, 3\] rows"),
        ({"samples": {"x": [1.0, 2.0]}}, "expected samples to be a mapping of input name to tensor"),
        ({"samples": {"x": torch.tensor(1.0)}}, "with a batch axis"),
        ({"samples": {"x": torch.full((2, 4, 5), float("nan"))}}, "sample x holds 40 values that are not finite"),
        ({"labels": [1, 2]}, "the labels are a list"),
        ({"class_names": "abc"}, "a list of texts"),
        ({"class_names": [1, 2]}, "a list of texts"),
    ],
)
def test_extras_that_make_no_sense_are_not_saved(extras: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        save_checkpoint(tmp_path / "m.pt", build_model(CONFIGS["encoder"]), CONFIGS["encoder"], **extras)
    assert list(tmp_path.iterdir()) == []


def test_saving_refuses_what_could_not_be_loaded(tmp_path: Path) -> None:
    model = build_model(CONFIGS["encoder"])
    with pytest.raises(CheckpointError, match="not those that its config builds"):
        save_checkpoint(tmp_path / "m.pt", model, CONFIGS["lm"])
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = float("inf")
    with pytest.raises(CheckpointError, match=r"1 values that are not finite \(0 NaN, 1 Inf\)"):
        save_checkpoint(tmp_path / "m.pt", model, CONFIGS["encoder"])
    with pytest.raises(InputError, match="the folder to write into does not exist"):
        save_checkpoint(tmp_path / "none" / "m.pt", build_model(CONFIGS["lm"]), CONFIGS["lm"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_write_that_fails_leaves_the_previous_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    model, config, path = build_model(CONFIGS["lm"]), CONFIGS["lm"], tmp_path / f"m{suffix}"
    save_checkpoint(path, model, config)
    before = path.read_bytes()
    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr("pom_edge.checkpoint.save_file", full)
    with pytest.raises(InputError, match="the disk is full"):
        save_checkpoint(path, lively(model), config)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InputError, match="a part of the path is a file"):
        save_checkpoint(path / "m.pt", model, config)


def _ours(tmp_path: Path) -> dict[str, Any]:
    save_checkpoint(path := tmp_path / "m.pt", lively(build_model(CONFIGS["encoder"])), CONFIGS["encoder"])
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "of version 2, this release reads 1 to 1; update with"),
        (lambda c: c.update(version="1"), "of version '1'"),
        (lambda c: c.pop("config"), "lacks config or state_dict"),
        (lambda c: c["config"].update(colour="red"), "unknown settings colour"),
        (lambda c: c["config"].update(dim=15), "not divisible by n_groups"),
        (lambda c: c["config"].update(dim=32), "does not fit Encoder: .*other shapes .*expected"),
        (lambda c: c["state_dict"].pop("blocks.1.mixer.po_coeff"), r"1 missing \(blocks.1.mixer.po_coeff\)"),
        (lambda c: c["state_dict"].update(extra=torch.ones(2)), r"1 unexpected \(extra\)"),
        (lambda c: c["state_dict"]["blocks.0.mixer.po_coeff"].fill_(float("nan")), "po_coeff holds 96 values .*96 NaN, 0 Inf"),
        (lambda c: c.update(samples=[1]), "expected samples to be a mapping"),
        (lambda c: c.update(labels="abc"), "the labels are a str"),
    ],
)
def test_a_damaged_checkpoint_of_ours(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    content = _ours(tmp_path)
    change(content)
    path = saved(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert path.name in str(caught.value)


def test_options_for_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, _ours(tmp_path))
    for options in ({"layout": "current"}, {"degree": 3}, {"clamp": 6.0}, {"factory": build_hybrid}):
        with pytest.raises(InputError, match=f"--{next(iter(options))}: .*leave it out"):
            load_checkpoint(path, **options)  # type: ignore[arg-type]
    path = saved(tmp_path, build_hybrid().state_dict())
    with pytest.raises(InputError, match="--degree, --clamp: the factory's model says itself"):
        load_checkpoint(path, factory=build_hybrid, degree=3, clamp=1.0)


# ---- a bare layer, however it was saved ----------------------------------------------------------------------------


@pytest.fixture
def layer() -> PoM:
    lively(model := PoM(16, 3, 2, n_sel_heads=4))
    return model


CONTAINERS: dict[str, Callable[[State], Any]] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "lightning": lambda s: {"pytorch-lightning_version": "2.4", "state_dict": s, "optimizer_states": [{"state": {0: s}}]},
    "timm": lambda s: {"model": s, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "args": None},
    "any name": lambda s: {"weights_of_run_7": s, "step": 3},
    "data parallel": lambda s: {f"module.{k}": v for k, v in s.items()},
    "compiled": lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
    "averaged": lambda s: {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in s.items()}},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_layer_in_every_container(container: str, layer: PoM, tmp_path: Path) -> None:
    loaded = load_checkpoint(saved(tmp_path, CONTAINERS[container](layer.state_dict()), "last.ckpt"))
    assert loaded.published_layout == "current" and loaded.warnings == []
    assert same_answers(loaded.model, layer, x=torch.randn(2, 5, 16))


def test_an_averaged_copy_beside_the_weights_is_left_out_and_said(layer: PoM, tmp_path: Path) -> None:
    state, other = layer.state_dict(), {k: v + 1 for k, v in layer.state_dict().items()}
    contents = [
        {"state_dict": state, "ema_state_dict": other},
        {"model": state, "ema": other},
        {"state_dict": state, "ema_params1": list(other.values())},
        {**{f"online_model.{k}": v for k, v in state.items()}, **{f"ema_model.{k}": v for k, v in other.items()}},
        {**state, **{f"model_ema.{k.replace('.', '')}": v for k, v in other.items()}, "model_ema.decay": torch.tensor(0.9)},
    ]
    for content in contents:
        loaded = load_checkpoint(saved(tmp_path, content))
        assert same_answers(loaded.model, layer, x=torch.randn(2, 5, 16))
        assert len(loaded.warnings) == 1 and "averaged copy" in loaded.warnings[0]
    for content in ({"ema": state}, {f"ema.{k}": v for k, v in state.items()}):
        loaded = load_checkpoint(saved(tmp_path, content))
        assert same_answers(loaded.model, layer, x=torch.randn(2, 5, 16))
        assert "only an averaged copy" in loaded.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_other_precisions_are_computed_in_fp32(layer: PoM, dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in layer.state_dict().items()}
    loaded = load_checkpoint(saved(tmp_path, state, f"m{suffix}"))
    assert loaded.layer is not None and {p.dtype for p in loaded.layer.parameters()} == {torch.float32}
    assert all(torch.equal(p, state[name].float()) for name, p in loaded.layer.named_parameters())
    assert loaded.warnings == [
        f"weights are stored in another precision (4 as {str(dtype)[6:]}); they are computed in FP32"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"po_coeff holds 2 values that are not finite \(2 NaN, 0 Inf\) of 96"),
        (float("-inf"), r"po_coeff holds 2 values that are not finite \(0 NaN, 2 Inf\) of 96"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_finite(layer: PoM, value: float, dtype: torch.dtype, message: str, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in layer.state_dict().items()}
    state["po_coeff"][0, 1] = state["po_coeff"][7, 2] = value
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved(tmp_path, state))
    state["ag_proj.weight"][0, 0] = value
    with pytest.raises(CheckpointError, match="1 more tensors have some"):
        load_checkpoint(saved(tmp_path, state))


# ---- whole models -----------------------------------------------------------------------------------------------


def test_a_whole_model_without_a_factory_says_what_it_found(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": PoM(16, 3, 2), "b": PoM(16, 3, 2)})
    with pytest.raises(CheckpointError, match=r"holds 2 PoM layers \(a, b\).*: a whole model.*--factory module:callable"):
        load_checkpoint(saved(tmp_path, model.state_dict()))
    with pytest.raises(CheckpointError, match=r"holds 1 PoM layers \(mixer\) and embed.weight, .* beside: a whole model"):
        load_checkpoint(saved(tmp_path, Hybrid().state_dict()))
    with pytest.raises(CheckpointError, match="a state dict without a PoM layer .*conv.weight.* or give --factory"):
        load_checkpoint(saved(tmp_path, {"conv.weight": torch.ones(3, 3)}))


WRAPPED: dict[str, Callable[[State], Any]] = {
    **CONTAINERS,
    "denoiser": lambda s: {"state_dict": {f"denoiser.net.{k}": v for k, v in s.items()}},
    "beside others": lambda s: {f"net.{k}": v for k, v in s.items()} | {"loss.weight": torch.ones(3)},
    "compiled inside": lambda s: {k.replace("mixer.", "mixer._orig_mod."): v for k, v in s.items()},
    "with a copy": lambda s: {f"net.{k}": v for k, v in s.items()} | {f"ema_net.{k}": v + 1 for k, v in s.items()},
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_factory_gets_its_weights_from_every_container(wrapping: str, tmp_path: Path) -> None:
    model = lively(Hybrid())
    path = saved(tmp_path, WRAPPED[wrapping](model.state_dict()), "last.ckpt")
    loaded = load_checkpoint(path, factory=build_hybrid)
    assert loaded.format == "state dict" and loaded.layer is None
    assert same_answers(loaded.model, model, ids=IDS)
    said = {"beside others": "left out: loss.weight", "with a copy": "averaged copy"}.get(wrapping)
    assert (loaded.warnings == []) if said is None else (len(loaded.warnings) == 1 and said in loaded.warnings[0])


def test_a_factory_may_return_the_wrapper(tmp_path: Path) -> None:
    model = lively(Hybrid())
    path = saved(tmp_path, model.state_dict())
    loaded = load_checkpoint(path, factory=lambda: nn.ModuleDict({"net": Hybrid()}))
    assert isinstance(loaded.model, nn.ModuleDict) and same_answers(loaded.model["net"], model, ids=IDS)


def test_tied_weights_stored_once(tmp_path: Path) -> None:
    model = lively(Hybrid())
    save_model(model, str(path := tmp_path / "m.safetensors"))
    assert same_answers(load_checkpoint(path, factory=build_hybrid).model, model, ids=IDS)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_is_computed_in_fp32(half: torch.dtype, tmp_path: Path) -> None:
    model = lively(Hybrid(rotary=True)).to(half)
    loaded = load_checkpoint(saved(tmp_path, model.state_dict()), factory=lambda: Hybrid(rotary=True).to(half))
    assert loaded.model is not None
    assert {t.dtype for t in loaded.model.state_dict().values() if t.is_floating_point()} == {torch.float32}
    assert "computed in FP32" in loaded.warnings[0]
    assert torch.equal(loaded.model.get_parameter("mixer.po_coeff"), model.get_parameter("mixer.po_coeff").float())


def test_tables_of_another_length_do_not_block(tmp_path: Path) -> None:
    model = lively(Hybrid(rotary=True, rows=64))
    path = saved(tmp_path, model.state_dict())
    for rows in (4, 1000):
        loaded = load_checkpoint(path, factory=lambda rows=rows: Hybrid(rotary=True, rows=rows))
        assert same_answers(loaded.model, model, ids=IDS)
        assert "rotary tables of another length" in loaded.warnings[0]
    with pytest.raises(
        CheckpointError, match="made with base 10000, those of the model with 500; build the model with rope_base=10000"
    ):
        load_checkpoint(path, factory=lambda: Hybrid(rotary=True, rows=32, base=500.0))


class Ours(nn.Module):
    """The same model written with our layer, which keeps no tables."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.mixer = PoM(16, 3, 2, n_sel_heads=4, rotary="1d", rotary_base=base)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x)  # type: ignore[no-any-return]


def test_published_tables_load_into_our_layer_when_the_base_agrees(tmp_path: Path) -> None:
    model = lively(published.PoMRoPE(16, 3, 2, 1, 4, rope_base=500.0))
    path = saved(tmp_path, {f"mixer.{name}": tensor for name, tensor in model.state_dict().items()})
    loaded = load_checkpoint(path, factory=lambda: Ours(500.0))
    x = torch.randn(2, 6, 16)
    assert loaded.model is not None and torch.allclose(loaded.model(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="mixer has rotary_base 10000, the tables in the file were made with 500"):
        load_checkpoint(path, factory=Ours)


def test_an_old_layout_inside_a_model_is_converted_where_that_is_exact(tmp_path: Path) -> None:
    old = lively(published.ComPoM(16, 3, 2, 1, 4, year=2026))
    path = saved(tmp_path, {f"mixer.{name}": tensor for name, tensor in old.state_dict().items()})
    loaded = load_checkpoint(path, factory=lambda: nn.ModuleDict({"mixer": PoM(16, 3, 2, n_sel_heads=4)}))
    assert isinstance(loaded.model, nn.ModuleDict) and loaded.warnings == ["converted from layout compom-2026-03: mixer"]
    x = torch.randn(2, 6, 16)
    assert torch.allclose(loaded.model["mixer"](x), old(x), rtol=1e-4, atol=1e-5)
    of_2025 = lively(published.ComPoM(16, 3, 2, 1, 4, year=2025))
    path = saved(tmp_path, {f"mixer.{name}": tensor for name, tensor in of_2025.state_dict().items()})
    with pytest.raises(CheckpointError, match="missing .*qc_proj.weight"):
        load_checkpoint(path, factory=lambda: nn.ModuleDict({"mixer": PoM(16, 3, 2, n_sel_heads=4)}))


def _without(state: State, *names: str) -> State:
    return {name: tensor for name, tensor in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: _without(s, "mixer.po_coeff", "norm.bias"), r"2 missing \(mixer.po_coeff, norm.bias\)"),
        (lambda s: s | {"head.bias": torch.ones(7), "x": torch.ones(1)}, r"2 unexpected \(head.bias, x\)"),
        (lambda s: s | {"mixer.po_coeff": torch.ones(32, 4)}, r"mixer.po_coeff is \(32, 4\), expected \(32, 3\)"),
        (
            lambda s: s | {"mixer.po_coeff": torch.ones(32, 3).to(torch.int8)},
            "mixer.po_coeff is torch.int8, expected torch.float32",
        ),
        (lambda s: {f"p{i}": torch.ones(1) for i in range(9)}, r"9 unexpected \(p0, p1, p2, p3 and 5 more\)"),
        (
            lambda s: {f"student.{k}": v for k, v in s.items()} | {f"teacher.{k}": v for k, v in s.items()},
            r"holds this model 2 times, under 'student.', 'teacher.'",
        ),
    ],
)
def test_weights_that_do_not_fit_the_factory(change: Callable[[State], State], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, change(Hybrid().state_dict()))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, factory=build_hybrid)


def test_a_factory_named_in_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(Hybrid())
    path = saved(tmp_path, model.state_dict())
    (tmp_path / "mine.py").write_text(
        "from tests.core.test_checkpoint import Hybrid\ndef build():\n    return Hybrid()\nx = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    for spec in ("mine:build", f"{tmp_path}/mine.py:build", "mine.py:build"):
        assert same_answers(load_checkpoint(path, factory=spec).model, model, ids=IDS)
    with pytest.raises(InputError, match="the factory returned list; expected a torch.nn.Module"):
        load_checkpoint(path, factory=list)


# ---- programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt2", "model.pt"])
def test_an_exported_program(name: str, layer: PoM, tmp_path: Path) -> None:
    x = torch.randn(2, 6, 16)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    with (tmp_path / name).open("wb") as file:
        torch.export.save(torch.export.export(layer, (x,), dynamic_shapes=dynamic), file)
    loaded = load_checkpoint(tmp_path / name)
    assert loaded.model is None and loaded.exported_program is not None
    assert torch.allclose(loaded.exported_program.module()(x[:, :3]), layer(x[:, :3]), atol=1e-6)
    with pytest.raises(InputError, match="--degree, --factory: a .pt2 is a complete program"):
        load_checkpoint(tmp_path / name, degree=3, factory=build_hybrid)
    with pytest.raises(CheckpointError, match="load it with torch.export.load"):
        load(tmp_path / name)


# ---- pickles ----------------------------------------------------------------------------------------------------


FIRED: list[str] = []


def fire(what: str) -> str:
    FIRED.append(what)
    return what


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (fire, ("unpickled",))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_objects_are_refused_without_running_anything(legacy: bool, tmp_path: Path) -> None:
    FIRED.clear()
    path = tmp_path / "m.pt"
    torch.save({"state_dict": {"a": torch.ones(2)}, "trap": Trap()}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        CheckpointError, match="runs code from the file; expected weights only.*--unsafe-pickle.*test_checkpoint.fire"
    ):
        load_checkpoint(path)
    assert FIRED == []
    with pytest.raises(CheckpointError, match="without a PoM layer"):
        load_checkpoint(path, unsafe_pickle=True)
    assert FIRED == ["unpickled"]


def test_a_pickled_module_needs_the_flag_and_warns(layer: PoM, tmp_path: Path) -> None:
    model = lively(Hybrid())
    for content in (model, nn.DataParallel(model), {"epoch": 3, "model": model}):
        path = saved(tmp_path, content)
        with pytest.raises(CheckpointError, match="pickled Python objects"):
            load_checkpoint(path)
        loaded = load_checkpoint(path, unsafe_pickle=True)
        assert isinstance(loaded.model, Hybrid) and same_answers(loaded.model, model, ids=IDS)
        assert loaded.format == "pickled module" and "ran code from it" in loaded.warnings[0]
    with pytest.raises(InputError, match="--factory: the file holds a complete pickled module"):
        load_checkpoint(path, unsafe_pickle=True, factory=build_hybrid)
    loaded = load_checkpoint(saved(tmp_path, lively(published.PoM(16, 3, 2, 1, 4))), unsafe_pickle=True)
    assert isinstance(loaded.layer, PoM)
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.get_parameter("mixer.po_coeff"), float("nan"))
    with pytest.raises(CheckpointError, match="mixer.po_coeff holds 96 values"):
        load_checkpoint(saved(tmp_path, broken), unsafe_pickle=True)


def test_lightning_settings_that_are_no_plain_types(layer: PoM, tmp_path: Path) -> None:
    content = {"state_dict": layer.state_dict(), "hyper_parameters": argparse.Namespace(lr=1e-3)}
    path = saved(tmp_path, content, "last.ckpt")
    with pytest.raises(CheckpointError, match="its state_dict entry.*argparse.Namespace"):
        load_checkpoint(path)
    assert load_checkpoint(path, unsafe_pickle=True).layer is not None


def test_a_class_that_is_not_here(tmp_path: Path) -> None:
    code = "import torch, sys; sys.modules['gone'] = sys.modules['__main__']\nclass Net(torch.nn.Linear): pass\n"
    code += f"Net.__module__ = 'gone'\ntorch.save(Net(2, 2), {str(tmp_path / 'm.pt')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(
        CheckpointError, match="cannot be unpickled here: No module named 'gone'. Its classes must be importable"
    ):
        load_checkpoint(tmp_path / "m.pt", unsafe_pickle=True)


def test_nothing_but_the_flag_unpickles(monkeypatch: pytest.MonkeyPatch, layer: PoM, tmp_path: Path) -> None:
    """Every torch.load on the way is a weights-only one."""
    modes: list[object] = []
    original = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        modes.append(kwargs.get("weights_only"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    load_checkpoint(saved(tmp_path, layer.state_dict()))
    load_checkpoint(saved(tmp_path, _ours(tmp_path)))
    with contextlib.suppress(CheckpointError):
        load_checkpoint(saved(tmp_path, Hybrid()))
    assert len(modes) == 4 and all(mode is True for mode in modes)  # one of them is this test's own
