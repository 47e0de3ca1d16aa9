"""What kind of file a model file is, told by its bytes and never by its name (imports no torch).

Nothing is unpickled or parsed here beyond headers: a file is named before any loader sees it, so that a wrong file gets one
sentence instead of a loader's traceback.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

from pom_edge.errors import CheckpointError

FileKind = Literal["torch", "safetensors", "pt2"]

EXPECTED = "expected a checkpoint: .pt, .pth or .ckpt of torch.save, .safetensors, or .pt2 of torch.export.save"
TORCH_LEGACY = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # the number that torch.save wrote first, before 1.6 and zip archives
SAFETENSORS_HEADER_LIMIT = 100 << 20  # bytes; the format's own limit

# (offset, magic bytes, name): other files that people mistake for a checkpoint.
_MAGIC = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras .h5)"),
    (0, b"GGUF", "a GGUF file (llama.cpp)"),
    (0, b"ftrt", "a TensorRT engine"),
    (0, b"\x93NUMPY", "a NumPy .npy array"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (4, b"ORTM", "an ONNX Runtime .ort model"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"BZh", "a bzip2 archive"),
    (0, b"\xfd7zXZ", "an xz archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (0, b"7z\xbc\xaf", "a 7-Zip archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x7fELF", "a compiled program"),
    (0, b"MZ", "a Windows program"),
)

__all__ = ["EXPECTED", "FileKind", "identify"]


def identify(path: Path) -> FileKind:
    """Name the format of a model file.

    Returns:
        ``"torch"`` (torch.save, zip or legacy), ``"safetensors"`` or ``"pt2"`` (torch.export archive).

    Raises:
        CheckpointError: missing, a folder, empty, unreadable, truncated, TorchScript, or some other kind of file; the message
            names what was found.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if not head:
        raise CheckpointError(f"{path} is empty (0 bytes); {EXPECTED}. Was the copy or the download interrupted?")
    if head.startswith(b"PK\x03\x04"):
        return _identify_zip(path)
    if _is_safetensors(path, head, size):
        return "safetensors"
    if TORCH_LEGACY in head[:64]:
        return "torch"
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CheckpointError(
            f"{path} is a Python pickle that torch.save did not write, and loading one runs code from it; {EXPECTED}. Where it "
            "was made, save the weights with torch.save(model.state_dict(), 'weights.pt')"
        )
    raise CheckpointError(f"{path} is {_name_other(path, head)}; {EXPECTED}")


def _check_regular(path: Path) -> None:
    if path.is_dir():
        if (path / "manifest.json").is_file():
            raise CheckpointError(f"{path} is a bundle, not a checkpoint; run or inspect it with pom-edge check, run or info")
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".pt", ".pth", ".ckpt", ".safetensors", ".pt2"))
        hint = f" It holds {', '.join(inside[:4])}: give one of these." if inside else ""
        raise CheckpointError(f"{path} is a folder; {EXPECTED}.{hint}")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; {EXPECTED}")
    if not path.is_file():
        raise CheckpointError(f"{path} is a device or a pipe; {EXPECTED}")


def _identify_zip(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged: it starts as a zip archive, as torch.save writes it, but its table of contents "
            "is missing. Copy or download it again"
        ) from error
    if any(name.rpartition("/")[2] in ("archive_format", "serialized_exported_program.json") for name in names):
        return "pt2"
    if any("/code/" in name for name in names) and any(name.endswith("constants.pkl") for name in names):
        raise CheckpointError(
            f"{path} is a TorchScript archive: its PoM layers are compiled code, which cannot be told apart and lowered. Load "
            "it where it was made and save the original model instead: torch.save(model.state_dict(), 'weights.pt') with "
            "--factory package.module:callable, or torch.export.save(torch.export.export(model, inputs), 'model.pt2')"
        )
    if any(name.endswith("data.pkl") for name in names):
        return "torch"
    if names and all(name.endswith(".npy") for name in names):
        found = "a NumPy .npz of arrays"
    elif any(name.endswith(".weights.h5") for name in names):
        found = "a Keras archive"
    else:
        found = f"a zip archive of other files ({', '.join(names[:3]) or 'none'})"
    raise CheckpointError(f"{path} is {found}; {EXPECTED}")


def _is_safetensors(path: Path, head: bytes, size: int) -> bool:
    """8 bytes of little-endian header length, then a JSON object."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    header = int.from_bytes(head[:8], "little")
    if not 2 <= header <= SAFETENSORS_HEADER_LIMIT:
        return False
    if 8 + header > size:
        raise CheckpointError(
            f"{path} is truncated: a safetensors header of {header} bytes is announced, the file has {size}. Copy it again"
        )
    return True


def _name_other(path: Path, head: bytes) -> str:
    for offset, magic, name in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return name
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer: the file itself was not fetched (run: git lfs pull)"
    text = _as_text(head)
    if text is not None:
        start = text.lstrip()[:15].lower()
        if start.startswith(("<!doctype html", "<html")):
            return "an HTML page, most likely a download link's error or login page"
        return "a JSON text" if start.startswith(("{", "[")) else "a text file"
    if path.suffix == ".onnx" or (head[0] == 0x08 and len(head) > 2 and 1 <= head[1] <= 20 and head[2] in (0x12, 0x1A, 0x3A)):
        return "an ONNX model, already exported"
    return f"none of the known formats (it starts with {head[:8].hex(' ')})"


def _as_text(head: bytes) -> str | None:
    """The start of the file as text, None for bytes that no text has."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # later, the sample merely cuts a character in two
            return None
        text = head[: error.start].decode("utf-8")
    return text if all(char.isprintable() or char in "\r\n\t\f" for char in text) else None
