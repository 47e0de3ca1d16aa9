"""A .pt2 is read without running code from it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pom_edge.errors import CheckpointError
from pom_edge.program import load_program

Rewrite = Callable[[str, bytes], tuple[str, bytes]]


class _Shapes(nn.Module):
    """Sizes that need every kind of expression."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        padded = nn.functional.pad(x, (0, 0, 0, -tokens % 4))
        return padded[:, : max(tokens // 2 + 1, 2)].mean(1)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(_Shapes(), (torch.randn(2, 9, 3),), dynamic_shapes=({0: free, 1: free},))
    path = tmp_path_factory.mktemp("program") / "m.pt2"
    torch.export.save(program, path)
    return path


def _rewritten(archive: Path, path: Path, rewrite: Rewrite, *extra: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            new, content = rewrite(name, source.read(name))
            target.writestr(new, content)
        for name, content in extra:
            target.writestr(name, content)
    return path


def test_symbolic_sizes_load(archive: Path) -> None:
    x = torch.randn(3, 6, 3)
    assert torch.equal(load_program(archive).module()(x), _Shapes()(x))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("m/data/constants/custom_obj_0", "a pickled object"),
        ("m/data/constants/OPAQUE_OBJ_0", "a pickled object"),
        ("m/data/aotinductor/model/run.so", "a compiled library"),
        ("m/extra/helper.DLL", "a compiled library"),
    ],
)
def test_archives_that_hold_code_are_refused(archive: Path, tmp_path: Path, name: str, what: str) -> None:
    path = _rewritten(archive, tmp_path / "bad.pt2", lambda n, c: (n, c), (name, b"\x80\x04."))
    with pytest.raises(CheckpointError, match=f"bad.pt2 holds {what} .*runs code when it is loaded.*--unsafe-pickle"):
        load_program(path)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').mkdir('fired')",
        "exec(chr(112))",
        "Integer(1).__class__",
        "(lambda x: x)(1)",
        "Symbol('s27').func",
        "open('fired', 'w')",
        "[c for c in (1, 2)]",
        "Integer(1); Integer(2)",
    ],
)
def test_sizes_that_are_programs_are_refused(
    archive: Path, tmp_path: Path, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def poison(name: str, content: bytes) -> tuple[str, bytes]:
        if name.endswith("models/model.json"):
            start = content.index(b'"expr_str": "') + len(b'"expr_str": "')
            content = content[:start] + expression.encode() + content[content.index(b'"', start) :]
        return name, content

    path = _rewritten(archive, tmp_path / "bad.pt2", poison)
    with pytest.raises(CheckpointError, match="a size that is no plain expression"):
        load_program(path)
    assert not (tmp_path / "fired").exists()


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("fired",))


def test_pickled_example_inputs_do_not_run(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.load falls back to a full unpickling there; forced weights-only, it fails instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    torch.save(_Trap(), tmp_path / "trap")

    def poison(name: str, content: bytes) -> tuple[str, bytes]:
        return name, (tmp_path / "trap").read_bytes() if "sample_inputs" in name else content

    path = _rewritten(archive, tmp_path / "bad.pt2", poison)
    with pytest.raises(CheckpointError, match="cannot be read by torch .* as a torch.export archive"):
        load_program(path)
    assert not (tmp_path / "fired").exists()
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "0", "the environment is as it was"


def test_a_damaged_archive(archive: Path, tmp_path: Path) -> None:
    def damage(name: str, content: bytes) -> tuple[str, bytes]:
        return name, b"{}" if name.endswith("models/model.json") else content

    with pytest.raises(CheckpointError, match="cannot be read by torch .*Export it again with this torch version"):
        load_program(_rewritten(archive, tmp_path / "bad.pt2", damage))
