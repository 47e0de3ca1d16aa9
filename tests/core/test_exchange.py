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


def test_interrupted_as_soon_as_the_new_folder_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, seen = os.mkdir, []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        seen.append(Path(path).name)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(KeyboardInterrupt):
        make_bundle(tmp_path / "tiny.pom")
    assert len(seen) == 1 and seen[0].startswith(".tiny.pom.new-") and not list(tmp_path.iterdir())


def test_a_file_keeps_its_permissions_and_is_left_where_the_last_look_refuses(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    before = os.umask(0o027)
    try:
        exchange.replace_file(file, b"1")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640, "as any new file"
    file.chmod(0o604)
    exchange.replace_file(file, b"2")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"2", 0o604)

    def refuse() -> None:
        raise RuntimeError("changed")

    with pytest.raises(RuntimeError, match="changed"):
        exchange.replace_file(file, b"3", check=refuse)
    assert file.read_bytes() == b"2" and [each.name for each in tmp_path.iterdir()] == ["a.html"]


def test_stale_folders_of_a_name_with_brackets(tmp_path: Path) -> None:
    (tmp_path / ".[x].pom.new-dead").mkdir()
    make_bundle(tmp_path / "[x].pom")
    assert [entry.name for entry in tmp_path.iterdir()] == ["[x].pom"]
