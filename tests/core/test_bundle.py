"""The folder that travels: whole or not at all, verified before anything parses it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pom_edge import exchange
from pom_edge.bundle import GOLDEN, MANIFEST, VERSION, Bundle, seal, write_bundle
from pom_edge.errors import BundleError, InputError
from tests.bundles import fill, make_bundle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "tiny.pom")
    return tmp_path / "tiny.pom"


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _leftovers(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir() if entry != path]


def _edit(path: Path, **changes: Any) -> None:
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(seal(content | changes))


def test_what_was_written_is_read(path: Path) -> None:
    bundle = Bundle.open(path)
    assert sorted(entry.path for entry in bundle.manifest.files) == [GOLDEN, "parallel.fp32.onnx"]
    (case, inputs, outputs), *_ = bundle.cases()
    assert case.name == "a" and inputs["x"].shape == outputs["y"].shape == (2, 5, 6)
    assert np.allclose(np.tanh(bundle.taps(case)["mixer"]), outputs["y"])
    assert _leftovers(path) == []


def test_same_input_same_bytes(path: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    make_bundle(tmp_path / "again" / "tiny.pom")
    assert _snapshot(path) == _snapshot(tmp_path / "again" / "tiny.pom")


@pytest.mark.parametrize("file", [GOLDEN, "parallel.fp32.onnx"])
@pytest.mark.parametrize("position", [0, 0.5, 1])
def test_one_changed_byte(path: Path, file: str, position: float) -> None:
    data = bytearray((path / file).read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(BundleError, match=f"{file} was changed after the export"):
        Bundle.open(path)


def test_truncated_and_missing_files(path: Path) -> None:
    artifact = path / "parallel.fp32.onnx"
    artifact.write_bytes(artifact.read_bytes()[:-1])
    with pytest.raises(BundleError, match="bytes, expected"):
        Bundle.open(path)
    artifact.unlink()
    with pytest.raises(BundleError, match="is missing"):
        Bundle.open(path)


def test_one_changed_byte_in_the_manifest(path: Path) -> None:
    """Wherever it is: in a name that is shown, in white space, in the digest itself."""
    data = (path / MANIFEST).read_bytes()
    for byte in range(len(data)):
        (path / MANIFEST).write_bytes(data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :])
        with pytest.raises(BundleError, match=MANIFEST):
            Bundle.open(path)


def test_an_edited_manifest(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace("parallel.fp32.onnx", "parallel.fp16.onnx"))
    with pytest.raises(BundleError, match=r"manifest.json was changed after the export.*parallel.fp16.onnx is missing"):
        Bundle.open(path)
    (path / MANIFEST).write_text(json.dumps(json.loads(text) | {"class_names": ["a"]}))
    with pytest.raises(BundleError, match=r"manifest.json was changed after the export; copy the folder again"):
        Bundle.open(path)
    (path / MANIFEST).write_text(text)
    Bundle.open(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", ""])
def test_paths_that_leave_the_folder(path: Path, name: str) -> None:
    content = json.loads((path / MANIFEST).read_text())
    content["files"][0]["path"] = name
    (path / MANIFEST).write_text(seal(content))
    with pytest.raises(BundleError, match="leaves the folder"):
        Bundle.open(path)


def test_an_artifact_that_is_not_hashed(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text())
    content["artifacts"][0]["file"] = "../elsewhere.onnx"
    (path / MANIFEST).write_text(seal(content))
    with pytest.raises(BundleError, match="not among the hashed files"):
        Bundle.open(path)


def test_a_link_out_of_the_folder(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.onnx"
    shutil.move(path / "parallel.fp32.onnx", outside)
    (path / "parallel.fp32.onnx").symlink_to(outside)
    with pytest.raises(BundleError, match="link out of the folder"):
        Bundle.open(path)


@pytest.mark.parametrize("version", [VERSION + 1, 0, "1", None, True])
def test_unknown_versions(path: Path, version: Any) -> None:
    _edit(path, version=version)
    with pytest.raises(BundleError, match="manifest version .*pip install --upgrade"):
        Bundle.open(path)


def test_not_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        Bundle.open(tmp_path / "none.pom")
    with pytest.raises(BundleError, match="is not a bundle"):
        Bundle.open(tmp_path)
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(BundleError, match="is not a pom-edge-bundle manifest"):
        Bundle.open(tmp_path)


def test_existing_bundle_is_kept_without_overwrite(path: Path) -> None:
    before = _snapshot(path)
    with pytest.raises(BundleError, match="--overwrite"):
        make_bundle(path, scale=2.0)
    assert _snapshot(path) == before
    make_bundle(path, overwrite=True, scale=2.0)
    assert _snapshot(path) != before and _leftovers(path) == []


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("text")
    with pytest.raises(BundleError, match="is not a bundle; it is left alone"):
        make_bundle(folder, overwrite=True)
    assert (folder / "chapter.txt").read_text() == "text"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug"), OSError(errno.ENOSPC, "full")])
def test_an_interrupted_write_changes_nothing(path: Path, error: BaseException) -> None:
    before = _snapshot(path)

    def interrupted() -> None:
        with write_bundle(path, overwrite=True) as folder:
            (folder / "half").write_text("half")
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert _snapshot(path) == before and _leftovers(path) == []


def test_disk_full_while_writing_is_one_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _snapshot(path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pom_edge.bundle.save_file", full)
    with pytest.raises(InputError, match="the disk is full"):
        make_bundle(path, overwrite=True)
    assert _snapshot(path) == before and _leftovers(path) == []


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; create it first"):
        make_bundle(tmp_path / "none" / "a.pom")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="part of the path is a file"):
        make_bundle(tmp_path / "file" / "a.pom")


def test_without_an_atomic_exchange(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_exchange", lambda a, b: False)
    before = _snapshot(path)
    make_bundle(path, overwrite=True, scale=2.0)
    assert _snapshot(path) != before and _leftovers(path) == []


def test_a_crash_between_the_two_renames_is_undone(path: Path) -> None:
    before = _snapshot(path)
    path.rename(path.with_name(".tiny.pom.old"))
    assert Bundle.open(path).manifest.name == "tiny"
    assert _snapshot(path) == before and _leftovers(path) == []


def test_a_crash_after_the_second_rename_is_finished(path: Path) -> None:
    shutil.copytree(path, path.with_name(".tiny.pom.old"))
    Bundle.open(path)
    assert _leftovers(path) == []


def test_two_exports_of_the_same_bundle_at_once(tmp_path: Path) -> None:
    """Neither removes the other's work; who comes second is told, and replaces nothing."""
    path = tmp_path / "a.pom"

    def second() -> None:
        with write_bundle(path, overwrite=False) as folder:
            fill(folder, "second")
            make_bundle(path)  # the other one, begun later and done first
            assert folder.is_dir()

    with pytest.raises(BundleError, match="a.pom exists; pass --overwrite"):
        second()
    assert Bundle.open(path).manifest.name == "a" and _leftovers(path) == []


def test_a_folder_of_a_living_process_is_left_alone(path: Path) -> None:
    other = path.with_name(f".tiny.pom.new-{os.getppid()}-x")
    gone = path.with_name(".tiny.pom.new-999999999-x")
    other.mkdir()
    gone.mkdir()
    make_bundle(path, overwrite=True)
    assert other.is_dir() and not gone.exists()


def test_what_a_killed_run_left_is_removed(path: Path) -> None:
    stale = path.with_name(".tiny.pom.new-dead")
    stale.mkdir()
    fill(stale)
    make_bundle(path, overwrite=True)
    assert _leftovers(path) == []
