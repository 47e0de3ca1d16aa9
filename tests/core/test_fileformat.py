"""Bad input: every wrong file gets one sentence that says what it is, what was expected and what to do."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pom_edge.checkpoint import load_checkpoint
from pom_edge.errors import CheckpointError
from pom_edge.fileformat import identify


def _saved(path: Path, legacy: bool = False) -> bytes:
    torch.save({"weight": torch.arange(1000.0)}, path, _use_new_zipfile_serialization=not legacy)
    return path.read_bytes()


def _zip(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")


def _script(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO(b""))


def _truncated_safetensors(path: Path, keep: int) -> None:
    save_file({"weight": torch.arange(1000.0)}, path)
    path.write_bytes(path.read_bytes()[:keep])


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "does not exist; expected a checkpoint"),
    "folder": (lambda path: path.mkdir(), "is a folder; expected a checkpoint"),
    "empty": (_bytes(b""), r"is empty \(0 bytes\).*interrupted"),
    "fifo": (lambda path: os.mkfifo(path), "is a device or a pipe"),
    "truncated zip": (lambda p: p.write_bytes(_saved(p)[:-200]), "damaged: it starts as a zip.*Copy or download it again"),
    "a few bytes": (lambda p: p.write_bytes(_saved(p)[:10]), "truncated or damaged"),
    "truncated legacy": (lambda p: p.write_bytes(_saved(p, legacy=True)[:-200]), "cannot be read by torch.load.*damaged"),
    "flipped": (lambda p: p.write_bytes(_saved(p).replace(b"weight", b"wei\xffht")), "cannot be read by torch.load"),
    "text": (_bytes(b"# notes\nthis is no model\n"), "is a text file; expected a checkpoint"),
    "utf-8": (_bytes("Gewichte für das Modell ".encode() * 400), "is a text file"),
    "json": (_bytes(json.dumps({"dim": 3}).encode()), "is a JSON text"),
    "html": (_bytes(b"\n<!DOCTYPE html><html>Sign in</html>"), "is an HTML page, most likely a download link's error"),
    "lfs": (_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "Git LFS pointer.*git lfs pull"),
    "hdf5": (_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "is an HDF5 file"),
    "onnx": (_bytes(b"\x08\x08\x12\x07pytorch\x1a\x062.13.0\x00\xff"), "is an ONNX model"),
    "gguf": (_bytes(b"GGUF\x03\x00\x00\x00" + bytes(32)), "is a GGUF file"),
    "tflite": (_bytes(b"\x1c\x00\x00\x00TFL3" + bytes(32)), "is a TensorFlow Lite model"),
    "engine": (_bytes(b"ftrt" + bytes(64)), "is a TensorRT engine"),
    "gzip": (_bytes(b"\x1f\x8b\x08" + bytes(64)), "is a gzip archive"),
    "tar": (_tar, "is a tar archive"),
    "png": (_bytes(b"\x89PNG\r\n\x1a\n" + bytes(32)), "is a PNG image"),
    "npy": (lambda p: np.save(p.open("wb"), np.zeros(3)), "is a NumPy .npy array"),
    "npz": (lambda p: np.savez(p.open("wb"), x=np.zeros(3)), "is a NumPy .npz of arrays"),
    "keras": (lambda p: _zip(p, "config.json", "model.weights.h5"), "is a Keras archive"),
    "other zip": (lambda p: _zip(p, "word/document.xml"), r"is a zip archive of other files \(word/document.xml\)"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "a Python pickle that torch.save did not write"),
    "script": (_script, "is a TorchScript archive.*--factory package.module:callable.*torch.export.save"),
    "noise": (_bytes(bytes(range(1, 255, 7))), r"none of the known formats \(it starts with 01 08 0f"),
    "header": (lambda p: _truncated_safetensors(p, 40), "truncated: a safetensors header of"),
    "data": (lambda p: _truncated_safetensors(p, 400), "cannot be read as safetensors.*copy or save it again"),
    "bad header": (_bytes(struct.pack("<Q", 12) + b'{"a": oops}}' + bytes(8)), "cannot be read as safetensors"),
    "one tensor": (lambda p: torch.save(torch.ones(3), p), "holds a Tensor; expected a state dict: torch.save"),
    "no tensors": (lambda p: torch.save({"epoch": 3, "args": {"lr": 1}}, p), r"holds no weights, only epoch, args; expected"),
    "nothing": (lambda p: torch.save({}, p), "holds no weights, only an empty dict"),
    "two state dicts": (
        lambda p: torch.save({"generator": {"a": torch.ones(1)}, "critic": {"a": torch.ones(1)}}, p),
        r"holds several state dicts \(generator, critic\); expected one",
    ),
    "sparse": (lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p), "a is torch.sparse_coo; expected plain dense tensors"),
    "meta": (lambda p: torch.save({"a": torch.ones(3, device="meta")}, p), "a is without data; expected plain dense tensors"),
}  # fmt: skip


@pytest.mark.parametrize("unsafe", [False, True], ids=["safe", "unsafe"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_named(kind: str, unsafe: bool, tmp_path: Path) -> None:
    make, message = WRONG[kind]
    path = tmp_path / "model.pt"
    make(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path, unsafe_pickle=unsafe)
    text = str(caught.value)
    assert "model.pt" in text and "\n" not in text and "Traceback" not in text and "\x1b" not in text


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    _saved(tmp_path / "a.bin")
    save_file({"a": torch.ones(3)}, tmp_path / "b.pt")
    _saved(tmp_path / "c.safetensors", legacy=True)
    assert [identify(path) for path in sorted(tmp_path.iterdir())] == ["torch", "safetensors", "torch"]


def test_a_folder_says_what_is_in_it(tmp_path: Path) -> None:
    _saved(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"It holds weights.pt: give one of these"):
        load_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a bundle, not a checkpoint; run or inspect it with pom-edge check"):
        load_checkpoint(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.pt"
    _saved(path)

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match="m.pt cannot be read: Permission denied"):
        identify(path)


def test_every_truncation_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for write in (lambda: _saved(path), lambda: _saved(path, legacy=True), lambda: save_file({"a": torch.ones(50)}, path)):
        write()
        whole = path.read_bytes()
        for keep in range(0, len(whole), 97):
            path.write_bytes(whole[:keep])
            with pytest.raises(CheckpointError):
                load_checkpoint(path)
