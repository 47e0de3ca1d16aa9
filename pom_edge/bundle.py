"""The .pom folder: a manifest, golden data, artifacts. Imports no torch and no onnx: this is what a device needs.

    model.pom/
        manifest.json          schema below; the only place where a timestamp stands, and measurements recorded later
        golden.safetensors     inputs and PyTorch's answers
        parallel.fp32.onnx     artifacts, named <form>.<precision>[.<variant>].<ext>

Opening verifies every hash, the manifest's own included, before any native parser sees a byte. Writing goes into a folder
beside and exchanges the two, so a bundle is always whole: the old one or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pom_edge.errors import BundleError
from pom_edge.exchange import follow_umask, recover, replace_file, replaced_folder, writing_errors
from pom_edge.generated import generate
from pom_edge.manifest import (
    FORMAT,
    PRECISIONS,
    VERSION,
    Artifact,
    FileEntry,
    GoldenCase,
    ImageSpec,
    Manifest,
    Measurement,
    PassSpec,
    StreamSpec,
    SumSpec,
    TensorSpec,
    sampled_rows,
    take_rows,
)  # fmt: skip

MANIFEST = "manifest.json"
GOLDEN = "golden.safetensors"
COPY_ELSEWHERE = "copy the bundle to a folder that can be written"
PACKAGE = ".mlpackage"  # a folder of Core ML
COMPILED_MODEL = ".mlmodelc"  # what Core ML makes of a package
LEFT_BY_MACOS = (".DS_Store", "._")  # the Finder's notes and the second halves of files copied to other systems
_UNSEALED = "0" * 64
_DIGEST = re.compile(r'\n  "digest": "([0-9a-f]{64})"')  # of the manifest itself: two spaces deep

__all__ = [
    "GOLDEN",
    "MANIFEST",
    "PRECISIONS",
    "VERSION",
    "Artifact",
    "Bundle",
    "FileEntry",
    "GoldenCase",
    "ImageSpec",
    "Manifest",
    "Measurement",
    "PassSpec",
    "StreamSpec",
    "SumSpec",
    "TensorSpec",
    "check_destination",
    "check_extendable",
    "extend_bundle",
    "finish_bundle",
    "is_bundle",
    "record_measurement",
    "sampled_rows",
    "seal",
    "sha256_of",
    "take_rows",
    "write_bundle",
]


class Bundle:
    """An opened, verified bundle.

    Attributes:
        path: the folder.
        manifest: its manifest.
        damaged: engines of which a file is missing or changed, and what is wrong with it. Nothing else needs them, and they
            can be built again; all else that is damaged keeps a bundle from being opened.
    """

    def __init__(self, path: Path, manifest: Manifest, damaged: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.damaged = dict(damaged or {})

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Open and verify.

        Raises:
            BundleError: not a bundle, damaged, or made by a newer version; says which file and what to do.
        """
        path = path if path.name else path.absolute()  # `pom-edge info .` from inside a bundle
        recover(_destination(path))
        text = _manifest_text(path)
        intact = _is_sealed(text)
        edited = f"{path.name}/{MANIFEST} was changed after the export; copy the folder again, or export again"
        try:
            manifest = _parse(text, path)
            damaged = cls._verify_files(path, manifest)
        except BundleError as error:
            if intact:
                raise
            raise BundleError(f"{edited}. (The first thing wrong: {error})") from error
        if not intact:
            raise BundleError(edited)
        return cls(path, manifest, damaged)

    @staticmethod
    def _verify_files(path: Path, manifest: Manifest) -> dict[str, str]:
        engines = {artifact.file: set(artifact.files) for artifact in manifest.artifacts if artifact.engine is not None}
        others = {file for artifact in manifest.artifacts if artifact.engine is None for file in artifact.files} | {GOLDEN}
        damaged: dict[str, str] = {}
        for entry in manifest.files:
            try:
                _verify(path, entry)
            except _FileDamagedError as error:
                owners = [file for file, files in engines.items() if entry.path in files - others]
                if not owners:
                    raise
                damaged.update(dict.fromkeys(owners, str(error)))
        listed = {entry.path for entry in manifest.files}
        folders = {parent.as_posix() for file in listed for parent in PurePosixPath(file).parents}  # of Core ML packages
        for artifact in manifest.artifacts:
            unlisted = [file for file in (artifact.file, *artifact.files) if file not in listed and file not in folders]
            if unlisted:
                raise BundleError(f"{path.name}: artifact file {unlisted[0]!r} is not among the hashed files; export again")
        for package in sorted(folder for folder in folders if folder.endswith(PACKAGE)):
            _refuse_strangers(path, package, listed)
        if manifest.golden and GOLDEN not in listed:
            raise BundleError(f"{path.name}: {GOLDEN} is not among the hashed files; export again")
        return damaged

    def cases(self) -> Iterator[tuple[GoldenCase, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Every golden case with its inputs and PyTorch's outputs.

        Raises:
            BundleError: the golden file does not hold what the manifest says.
        """
        for case in self.manifest.golden:
            made = {name: generate(recipe) for name, recipe in case.generated.items()}
            yield case, {**self._golden(case.inputs), **made}, self._golden(case.outputs)

    def sha256(self, file: str) -> str:
        """The hash of one of the bundle's files; of a folder (a Core ML package) that of its files' hashes, in order."""
        inside = [entry.sha256 for entry in self.manifest.files if entry.path.startswith(f"{file}/")]
        if inside:
            return hashlib.sha256("".join(inside).encode()).hexdigest()
        return next(entry.sha256 for entry in self.manifest.files if entry.path == file)

    def taps(self, case: GoldenCase) -> dict[str, np.ndarray]:
        """PyTorch's value of every mixer's output in this case, by module path; empty where none was kept."""
        return self._golden(case.taps)

    def _golden(self, keys: Mapping[str, str]) -> dict[str, np.ndarray]:
        try:
            with safe_open(self.path / GOLDEN, framework="numpy") as data:
                return {name: data.get_tensor(key) for name, key in keys.items()}
        except (SafetensorError, OSError) as error:
            raise BundleError(f"{self.path.name}/{GOLDEN} does not fit its manifest ({error}); export again") from error


def record_measurement(path: Path, measurement: Measurement) -> None:
    """Write a measurement into a bundle's manifest, whole or not at all; nothing else of the bundle changes.

    Raises:
        BundleError: no intact bundle, or another process wrote its manifest in the meantime.
        InputError: the place cannot be written.
    """
    bundle = Bundle.open(path)
    text = _manifest_text(path)
    kept = [each for each in bundle.manifest.measurements if each.key != measurement.key]
    content = json.loads(text)
    content["measurements"] = [each.model_dump(mode="json") for each in (*kept, measurement)]

    def unchanged() -> None:
        if _manifest_text(path) != text:
            raise BundleError(f"{path.name}/{MANIFEST} was written by another process in the meantime; run the command again")

    replace_file(path / MANIFEST, seal(content).encode(), COPY_ELSEWHERE, unchanged)


def extend_bundle(bundle: Bundle, artifacts: Sequence[Artifact], made: Path) -> None:
    """Add artifacts, or replace those of the same file, in one step; all else of the bundle stays as it is.

    Args:
        bundle: as it was opened.
        artifacts: their files lie in ``made`` under the names that they get.

    Raises:
        BundleError: another process changed the bundle in the meantime.
        InputError: the place cannot be written, or the disk is full.
    """
    path, text = _destination(bundle.path), _manifest_text(bundle.path)
    if Manifest.model_validate_json(text) != bundle.manifest:
        raise BundleError(f"{path.name} was changed by another process in the meantime; run the command again")
    fresh = {file for artifact in artifacts for file in artifact.files}
    replaced = {artifact.file for artifact in artifacts}
    kept = [artifact for artifact in bundle.manifest.artifacts if artifact.file not in replaced]
    needed = {file for artifact in kept for file in artifact.files} | {GOLDEN}
    entries = [entry for entry in bundle.manifest.files if entry.path in needed - fresh]
    with replaced_folder(path, COPY_ELSEWHERE) as folder:
        lost = {file for artifact in kept if artifact.file in bundle.damaged for file in artifact.files}
        for entry in entries:
            if entry.path not in lost or (path / entry.path).exists():  # what is damaged stays so, and is said so
                _place(path / entry.path, folder / entry.path)
        for file in sorted(fresh):
            _place(made / file, folder / file)
            entries.append(FileEntry(path=file, sha256=sha256_of(folder / file), bytes=(folder / file).stat().st_size))
        files = sorted(entries, key=lambda entry: entry.path)
        manifest = bundle.manifest.model_copy(update={"artifacts": [*kept, *artifacts], "files": files})
        (folder / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")).encode())
        if _manifest_text(path) != text:
            raise BundleError(f"{path.name} was changed by another process in the meantime; run the command again")


def check_extendable(path: Path) -> None:
    """Refuse before minutes of building what could not be put into a bundle at the end.

    Raises:
        InputError: the place cannot be written.
    """
    with writing_errors(path, COPY_ELSEWHERE):
        _check_parent(_destination(path).parent)


def _place(source: Path, target: Path) -> None:
    """The same file under another name, without a second copy where the file system can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing_errors(target, COPY_ELSEWHERE):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def is_bundle(path: Path) -> bool:
    """Whether the folder claims to be a bundle (has a manifest)."""
    return (path / MANIFEST).is_file()


def seal(content: Mapping[str, Any]) -> str:
    """The text of a manifest, with the digest of that text (its own 64 digits read as zeros) in it."""
    text = json.dumps({**content, "digest": _UNSEALED}, indent=2, sort_keys=True) + "\n"
    return _with_digest(text, hashlib.sha256(text.encode()).hexdigest())


def _is_sealed(text: str) -> bool:
    found = _DIGEST.search(text)
    return found is not None and hashlib.sha256(_with_digest(text, _UNSEALED).encode()).hexdigest() == found[1]


def _with_digest(text: str, digest: str) -> str:
    return _DIGEST.sub(f'\n  "digest": "{digest}"', text, count=1)


def _manifest_text(path: Path) -> str:
    if not path.exists():
        raise BundleError(f"{path} does not exist; expected a .pom bundle. Make one with: pom-export model.pt --out {path}")
    if not is_bundle(path):
        raise BundleError(f"{path} is not a bundle (no {MANIFEST} in it); expected a folder made by pom-export")
    try:
        return (path / MANIFEST).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path.name}/{MANIFEST} cannot be read ({error}); export the model again") from error


def _parse(text: str, path: Path) -> Manifest:
    """The manifest of known version and schema; nothing is verified yet."""
    try:
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # the last one: brackets nested beyond any manifest
        raise BundleError(f"{path.name}/{MANIFEST} cannot be read ({error}); export the model again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BundleError(f"{path.name}/{MANIFEST} is not a {FORMAT} manifest; expected a folder made by pom-export")
    version = content.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BundleError(
            f"{path.name} has manifest version {version!r}, this pom-edge reads 1 to {VERSION}; "
            "update with: pip install --upgrade pom-edge"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"{path.name}/{MANIFEST}: {where}: {first['msg']}; export the model again") from error


def _refuse_strangers(folder: Path, package: str, listed: set[str]) -> None:
    """A Core ML package is loaded as a folder, whatever lies in it: no file beside those that were exported.

    Raises:
        BundleError: there is one that neither the export nor macOS put there.
    """
    for path in sorted((folder / package).rglob("*")):
        inside = path.relative_to(folder)
        own = any(part.startswith(LEFT_BY_MACOS) or part.endswith(COMPILED_MODEL) for part in inside.parts)
        if inside.as_posix() in listed or own or (path.is_dir() and not path.is_symlink()):
            continue
        raise BundleError(
            f"{folder.name}: {inside.as_posix()} is not of the export (the manifest does not list it); delete it, copy the "
            "whole folder again, or export again"
        )


class _FileDamagedError(BundleError):
    """One file is not what the manifest says; the bundle itself is no trap."""


def _verify(folder: Path, entry: FileEntry) -> None:
    """Path, existence, size and hash of one file, in this order."""
    pure = PurePosixPath(entry.path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in entry.path or ":" in entry.path or not pure.parts:
        raise BundleError(f"{folder.name}: the manifest lists {entry.path!r}, which leaves the folder; do not use this bundle")
    path = folder / pure
    if not path.is_file():
        raise _FileDamagedError(f"{folder.name}: {entry.path} is missing; copy the whole folder again, or export again")
    if folder.resolve() not in path.resolve().parents:
        raise BundleError(f"{folder.name}: {entry.path} is a link out of the folder; do not use this bundle")
    size = path.stat().st_size
    if size != entry.bytes:
        raise _FileDamagedError(
            f"{folder.name}: {entry.path} has {size} bytes, expected {entry.bytes}: it was cut short, "
            "changed or is of another export; copy the whole folder again, or export again"
        )
    try:
        found = sha256_of(path)
    except OSError as error:
        raise _FileDamagedError(
            f"{folder.name}: {entry.path} cannot be read: {error.strerror}; check its permissions"
        ) from error
    if found != entry.sha256:
        raise _FileDamagedError(
            f"{folder.name}: {entry.path} was changed after the export or is of another one (sha256 differs); "
            "copy the whole folder again, or export again"
        )


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    """hashlib.file_digest for Python 3.10."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def write_bundle(path: Path, overwrite: bool) -> Iterator[Path]:
    """A fresh folder to write a bundle into; on success it takes the place of ``path``, else nothing has changed.

    Raises:
        BundleError: ``path`` exists and may not be replaced.
        InputError: the place cannot be written, or the disk is full.
    """
    check_destination(path, overwrite)
    with replaced_folder(_destination(path)) as folder:
        yield folder
        try:
            check_destination(path, overwrite)
        except BundleError as error:
            raise BundleError(f"while this export ran, another one wrote {path}: {error}") from error


def check_destination(path: Path, overwrite: bool) -> None:
    """Refuse early, before minutes of work, what could not be written at the end.

    Raises:
        BundleError: ``path`` exists and may not be replaced.
    """
    recover(_destination(path))
    with writing_errors(path):
        if not path.exists() and not path.is_symlink():
            _check_parent(path.parent)
            return
    if not is_bundle(path):
        raise BundleError(f"{path} exists and is not a bundle; it is left alone. Choose another --out")
    if not overwrite:
        raise BundleError(f"{path} exists; pass --overwrite to replace it, or choose another --out")


def _destination(path: Path) -> Path:
    """The folder that is replaced: a link keeps pointing where it did, and ``.`` has a name to put a new folder beside.

    Raises:
        BundleError: the root of a file system.
    """
    real = Path(os.path.realpath(path))
    if not real.name:
        raise BundleError(f"{path} is the root of a file system; expected the path of a .pom bundle")
    return real


def _check_parent(parent: Path) -> None:
    """Raise what writing into it would raise."""
    if not parent.is_dir():
        code = errno.ENOTDIR if any(p.is_file() for p in (parent, *parent.parents)) else errno.ENOENT
        raise OSError(code, os.strerror(code))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def finish_bundle(folder: Path, fields: Mapping[str, Any], golden: Mapping[str, np.ndarray]) -> Manifest:
    """Write golden data and the manifest over the artifacts that stand in ``folder``.

    Args:
        folder: as given by :func:`write_bundle`, artifacts inside.
        fields: the manifest without ``files``.
        golden: arrays by key.
    """
    with writing_errors(folder):
        save_file({key: np.array(array, order="C") for key, array in golden.items()}, folder / GOLDEN)
        follow_umask(folder / GOLDEN)  # safetensors makes it private
        files = [
            FileEntry(path=path.relative_to(folder).as_posix(), sha256=sha256_of(path), bytes=path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST
        ]
        manifest = Manifest(**fields, files=files)
        (folder / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")).encode())
    return manifest
