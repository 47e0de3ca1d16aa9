"""A folder takes the place of another: no name stays empty, nothing stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pom_edge import exchange
from pom_edge.bundle import Bundle
from tests.bundles import make_bundle


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug")])
def test_interrupted_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    path = tmp_path / "tiny.pom"
    make_bundle(path)
    before = (path / "manifest.json").read_bytes()
    rename, calls = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise error
        rename(source, target)

    monkeypatch.setattr(exchange, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(type(error)):
        make_bundle(path, overwrite=True, scale=2.0)
    assert (path / "manifest.json").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.pom"]
    Bundle.open(path)


def test_stale_folders_of_a_name_with_brackets(tmp_path: Path) -> None:
    (tmp_path / ".[x].pom.new-dead").mkdir()
    make_bundle(tmp_path / "[x].pom")
    assert [entry.name for entry in tmp_path.iterdir()] == ["[x].pom"]
