"""Settings that leave no trace in the weights' shapes travel with the weights: another function is never silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pom_edge import PoM, build_model
from pom_edge.checkpoint import load, load_checkpoint
from pom_edge.errors import CheckpointError, PomError
from pom_edge.mixer import SETTINGS_KEY, read_settings
from pom_edge.models import ModelConfig
from tests.mixers import lively

OTHERS = [
    {"rotary": "1d"},
    {"rotary": "2d"},
    {"rotary": "1d", "rotary_base": 500.0, "n_sel_heads": 2},
    {"clamp_max": 1.0},
    {"clamp_max": None, "n_groups": 2, "bias": True},
    {"gate": "sigmoid"},
    {"first_power": 0},
]


def _layer(**settings: object) -> PoM:
    return lively(PoM(8, degree=3, expand=2, **settings))  # type: ignore[arg-type]


def _answers(layer: nn.Module, settings: dict[str, object]) -> torch.Tensor:
    x = 4 * torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    positions = {"1d": torch.arange(6) + 3, "2d": torch.stack((torch.arange(6), torch.arange(6) % 4), -1)}
    rotary = settings.get("rotary")
    return layer(x, **({"positions": positions[str(rotary)]} if rotary else {}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
@pytest.mark.parametrize("kind", ["pt", "safetensors", "half", "wrapped"])
def test_a_bare_state_dict_is_the_layer_that_it_was_saved_from(settings: dict[str, object], kind: str, tmp_path: Path) -> None:
    layer = _layer(**settings)
    path = tmp_path / f"layer.{'safetensors' if kind == 'safetensors' else 'pt'}"
    state = layer.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "half":  # a script that casts everything, the settings as well
        layer.half().float()
        torch.save({name: tensor.half() for name, tensor in state.items()}, path)
    else:
        torch.save({f"module.{name}": value for name, value in state.items()} if kind == "wrapped" else state, path)
    loaded = load_checkpoint(path)
    assert loaded.published_layout is None
    torch.testing.assert_close(_answers(load(path), settings), _answers(layer, settings), rtol=0, atol=0)


def test_published_settings_leave_the_published_names_alone() -> None:
    assert set(_layer().state_dict()) == {"qc_proj.weight", "se_bias", "po_coeff", "ag_proj.weight"}
    _layer(clamp_max=1.0).load_state_dict(_layer().state_dict())  # SD3.5's layers: published names, another bound


def test_weights_of_other_settings_are_refused_by_torch_itself() -> None:
    with pytest.raises(RuntimeError, match=r"clamp_max=1.0, here 6.0.*Build it with those settings"):
        _layer().load_state_dict(_layer(clamp_max=1.0).state_dict())
    with pytest.raises(RuntimeError, match=r"layers\.1: .*rotary='1d', here None"):
        nn.ModuleDict({"layers": nn.Sequential(nn.Identity(), _layer())}).load_state_dict(
            nn.ModuleDict({"layers": nn.Sequential(nn.Identity(), _layer(rotary="1d"))}).state_dict(), strict=False
        )


def test_a_factory_of_other_settings_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Sequential(_layer(gate="sigmoid")).state_dict(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"^0: .*gate='sigmoid', here 'hardsigmoid'"):
        load(tmp_path / "m.pt", factory=lambda: nn.Sequential(_layer()))
    torch.manual_seed(0)
    assert isinstance(load(tmp_path / "m.pt", factory=lambda: nn.Sequential(_layer(gate="sigmoid"))), nn.Sequential)


def test_options_that_the_weights_answer_are_refused(tmp_path: Path) -> None:
    torch.save(_layer(clamp_max=2.0).state_dict(), tmp_path / "layer.pt")
    with pytest.raises(CheckpointError, match="--clamp does not apply"):
        load_checkpoint(tmp_path / "layer.pt", clamp=6.0)
    with pytest.raises(CheckpointError, match="--layout does not apply"):
        load_checkpoint(tmp_path / "layer.pt", layout="compom-2025")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (torch.tensor([1, 2, 3], dtype=torch.uint8), "cannot be read"),
        (torch.tensor(list(b'{"gain": 2}'), dtype=torch.uint8), "names gain"),
        (torch.tensor(list(b'{"gate": "softmax"}'), dtype=torch.uint8), "softmax"),
        (torch.tensor(list(b'{"clamp_max": "six"}'), dtype=torch.uint8), "settings"),
        (torch.tensor(list(b"[1]"), dtype=torch.uint8), "cannot be read|names"),
        (torch.zeros(2, 2), "cannot be read"),
    ],
    ids=["bytes", "later", "gate", "clamp", "list", "matrix"],
)
def test_damaged_settings_are_one_message(entry: torch.Tensor, expected: str, tmp_path: Path) -> None:
    torch.save({**_layer().state_dict(), SETTINGS_KEY: entry}, tmp_path / "layer.pt")
    with pytest.raises(PomError, match=expected):
        load_checkpoint(tmp_path / "layer.pt")


def test_a_rotary_model_keeps_its_settings_through_its_checkpoint(tmp_path: Path) -> None:
    config = ModelConfig(kind="encoder", dim=8, depth=1, degree=2, expand=1, rotary="1d", input_dim=4)
    state = build_model(config).state_dict()
    assert [name for name in state if name.endswith(SETTINGS_KEY)]
    save_file(state, tmp_path / "s.safetensors")
    key = next(name for name in state if name.endswith(SETTINGS_KEY))
    assert read_settings(load_file(tmp_path / "s.safetensors")[key]) == {"rotary": "1d"}


def test_the_settings_are_shown() -> None:
    assert "clamp_max=1.0" in repr(_layer(clamp_max=1.0))
    assert "clamp_max" not in repr(_layer())
