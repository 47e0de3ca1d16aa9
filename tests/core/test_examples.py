"""--factory and --example: names to callables, files to inputs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pom_edge.checkpoint import load_example
from pom_edge.errors import InputError
from pom_edge.imports import call_named, import_callable

SOURCE = """
import numpy as np
import torch
import sibling_of_inputs

number = 3

def inputs():
    mask = torch.ones(2, 5, dtype=bool)
    return {"x": torch.zeros(2, 5, dtype=torch.float64), "ids": np.arange(3, dtype=np.int32), "mask": mask}

def one(): return np.ones((1, 2), np.float16)
def empty(): return {}
def text(): return {"x": "abc"}
def several(): return torch.ones(2), torch.ones(3)
def poisoned(): return {"x": torch.tensor([1.0, float("nan"), float("inf")])}
def needy(path, size=3): return {}
def broken():
    return {"x": torch.ones(2) + torch.ones(3)}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "inputs_of_mine.py").write_text(SOURCE)
    (tmp_path / "sibling_of_inputs.py").write_text("value = 1\n")
    (tmp_path / "raises_at_import.py").write_text("import math\nmath.sqrt(-1)\n")
    (tmp_path / "needs_something.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "numpy_like").mkdir()
    (tmp_path / "numpy_like" / "torch.py").write_text("def build(): return 'mine'\n")
    for name in ("inputs_of_mine", "sibling_of_inputs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spec", ["inputs_of_mine:inputs", "inputs_of_mine.py:inputs", "{folder}/inputs_of_mine.py:inputs"])
def test_a_function_of_inputs(folder: Path, spec: str) -> None:
    before = list(sys.path)
    found = load_example(spec.format(folder=folder))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "x": (torch.float32, (2, 5)),
        "ids": (torch.int64, (3,)),
        "mask": (torch.bool, (2, 5)),
    }
    assert sys.path == before, "the import path is as it was"


def test_a_file_elsewhere_sees_its_siblings(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert "x" in load_example(f"{folder}/inputs_of_mine.py:inputs")


def test_a_file_named_like_an_installed_module_shadows_nothing(folder: Path) -> None:
    assert call_named("numpy_like/torch.py:build", "--factory") == "mine"
    assert sys.modules["torch"] is torch


def test_files_of_inputs(folder: Path) -> None:
    np.savez("a.npz", x=np.ones((2, 3)), ids=np.arange(4, dtype=np.int16), picture=np.zeros((1, 2), np.uint8))
    np.save("b.npy", np.ones((2, 3), np.float16))
    save_file({"x": torch.ones(2, 3), "context": torch.ones(2, 4)}, "c.safetensors")
    first = load_example("a.npz")
    assert {name: tensor.dtype for name, tensor in first.items()} == {
        "x": torch.float32, "ids": torch.int64, "picture": torch.uint8,
    }  # fmt: skip
    second = load_example("b.npy")
    assert list(second) == ["x"] and second["x"].dtype == torch.float32
    assert load_example("c.safetensors").keys() == {"x", "context"}
    assert list(load_example("inputs_of_mine:one")) == ["x"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none.npz", "none.npz does not exist"),
        ("inputs_of_mine.py", "is not one of .npz, .npy, .safetensors"),
        ("inputs_of_mine:empty", "gave an empty mapping; expected a mapping of input name to tensor"),
        ("inputs_of_mine:several", "gave a tuple; expected a mapping of input name to tensor"),
        ("inputs_of_mine:text", "input 'x' is a str; expected a tensor or a numeric array"),
        ("inputs_of_mine:poisoned", "input 'x' holds 2 NaN or Inf of 3 values"),
        ("inputs_of_mine:needy", r"needs arguments \(path\), but it is called with none"),
        ("inputs_of_mine:broken", r"raised RuntimeError: The size of tensor .*inputs_of_mine.py, line 19\)"),
        ("inputs_of_mine:number", "inputs_of_mine:number is of type int; expected something that can be called"),
        ("inputs_of_mine:nothing", "inputs_of_mine has no 'nothing'; it defines broken, empty, inputs"),
        ("no_such_module:build", "there is no module 'no_such_module', neither installed nor in"),
        ("torch.nothing_here:build", "there is no module 'torch.nothing_here'"),
        (
            "needs_something:build",
            "needs_something imports 'not_installed_anywhere', which is neither installed nor in .*run from",
        ),
        ("raises_at_import:build", r"importing raises_at_import raised ValueError: .*raises_at_import.py, line 2\)"),
        ("nowhere/file.py:build", "nowhere/file.py does not exist or is not a file"),
        (":build", "expected package.module:callable or path/to/file.py:callable"),
        ("inputs_of_mine:", "expected package.module:callable"),
        ("inputs_of_mine:a b", "expected package.module:callable"),
    ],
)
def test_what_cannot_be_an_example(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_example(spec)


def test_a_name_without_colon_says_the_form() -> None:
    with pytest.raises(InputError, match="--factory is 'my_model'; expected package.module:callable"):
        import_callable("my_model", "--factory")


def test_a_class_is_a_factory() -> None:
    assert import_callable("torch.nn:Identity", "--factory") is torch.nn.Identity
