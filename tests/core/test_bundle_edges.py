"""Bundles that are wrong in ways nobody makes on purpose, and places that are easy to name: each ends in one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pom_edge.bundle import GOLDEN, MANIFEST, Bundle, check_destination, seal
from pom_edge.errors import BundleError
from tests.bundles import make_bundle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "tiny.pom")
    return tmp_path / "tiny.pom"


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / MANIFEST).read_text())
    change(content)
    (path / MANIFEST).write_text(seal(content))


def test_opened_from_inside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path)
    assert Bundle.open(Path()).path.name == "tiny.pom"
    with pytest.raises(BundleError, match="--overwrite"):
        check_destination(Path(), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_root_is_no_place_for_a_bundle(overwrite: bool) -> None:
    with pytest.raises(BundleError, match="root of a file system"):
        check_destination(Path(Path.cwd().anchor), overwrite)


def test_a_link_to_a_bundle_is_written_through(path: Path) -> None:
    link = path.with_name("latest.pom")
    link.symlink_to(path.name)
    make_bundle(link, overwrite=True, scale=2.0)
    assert link.is_symlink() and Bundle.open(path).manifest.name == "latest"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["latest.pom", "tiny.pom"]


def test_golden_data_that_is_not_hashed_is_not_parsed(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    shutil.move(path / GOLDEN, outside)
    (path / GOLDEN).symlink_to(outside)
    _edit(path, lambda m: m.update(files=[entry for entry in m["files"] if entry["path"] != GOLDEN]))
    with pytest.raises(BundleError, match=f"{GOLDEN} is not among the hashed files"):
        Bundle.open(path)


def test_a_golden_key_that_is_not_there(path: Path) -> None:
    _edit(path, lambda m: m["golden"][0]["inputs"].update(x="nowhere"))
    with pytest.raises(BundleError, match="does not fit its manifest .*nowhere"):
        list(Bundle.open(path).cases())


def test_unknown_dtype_and_precision(path: Path) -> None:
    _edit(path, lambda m: m["artifacts"][0].update(precision="fp12"))
    with pytest.raises(BundleError, match=r"artifacts.0.precision.*'fp12' is unknown; expected one of fp32"):
        Bundle.open(path)
    _edit(path, lambda m: m["artifacts"][0].update(precision="fp32"))
    _edit(path, lambda m: m["artifacts"][0]["inputs"][0].update(dtype="banana"))
    with pytest.raises(BundleError, match=r"inputs.0.dtype.*'banana' is unknown"):
        Bundle.open(path)


def test_a_manifest_nested_beyond_reason(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle.open(path)


def test_a_file_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pom_edge.bundle.sha256_of", refused)
    with pytest.raises(BundleError, match="cannot be read: Permission denied; check its permissions"):
        Bundle.open(path)
