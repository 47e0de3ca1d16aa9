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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pom_edge.errors import BundleError
from pom_edge.exchange import recover, replaced_folder, writing_errors
from pom_edge.generated import Recipe, generate

MANIFEST = "manifest.json"
GOLDEN = "golden.safetensors"
FORMAT: Final = "pom-edge-bundle"
VERSION = 1
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")
SAMPLED_ROWS = 64
_UNSEALED = "0" * 64
_DIGEST = re.compile(r'\n  "digest": "([0-9a-f]{64})"')  # of the manifest itself: two spaces deep
PALETTES = ("p8", "p6", "p4")  # Core ML: each weight is one of 2^n values of its tensor
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "w8", "w4", *PALETTES)

__all__ = [
    "GOLDEN",
    "MANIFEST",
    "VERSION",
    "Artifact",
    "Bundle",
    "FileEntry",
    "GoldenCase",
    "Manifest",
    "Measurement",
    "TensorSpec",
    "extend_bundle",
    "is_bundle",
    "record_measurement",
    "write_bundle",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is unknown; expected one of {', '.join(known)}")
    return value


class TensorSpec(_Model):
    """A graph input or output: free axes are names, and may have bounds; where ``lengths`` lists some, there are no others."""

    name: str
    dtype: str
    shape: list[int | str]
    bounds: dict[str, tuple[int, int | None]] = Field(default_factory=dict)
    lengths: dict[str, list[int]] = Field(default_factory=dict)
    values: tuple[int, int] | None = None  # of indices into a table: runtimes take -1 for its last row, and say nothing

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        return _one_of(value, DTYPES)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} ({', '.join(map(str, self.shape))})"


class FileEntry(_Model):
    """A file of the bundle, by its path inside the folder."""

    path: str
    sha256: str
    bytes: int


class SumSpec(_Model):
    """A sum over tokens that a pass adds up; a mean is divided by ``rows`` values for each token in the end."""

    name: str
    mean: bool
    rows: int


class PassSpec(_Model):
    """One graph of the streamed form, run for every chunk (``looped``) of the tokens of ``axis``, or once."""

    file: str
    inputs: list[str]
    stores: list[str]
    sums: list[SumSpec]
    results: list[str]
    looped: bool = True
    axis: str = "tokens"
    mixers: dict[str, str] = Field(default_factory=dict)


class ImageSpec(_Model):
    """How an image becomes tokens, a token for each patch, row by row, and tokens an image again.

    Attributes:
        input: the artifact's input (B, C, h p, w p).
        patch: p, in pixels.
        patches: the passes' input (B, h w, C p p); within a patch channel, row, column.
        positions: the passes' input (h w, 2) of row and column, where they have one.
        pixels: an output of the passes (B, h w, K p p) -> the artifact's output (B, K, h p, w p) that is made of it.
    """

    input: str
    patch: int
    patches: str
    positions: str | None = None
    pixels: dict[str, str] = Field(default_factory=dict)


class StreamSpec(_Model):
    """How the passes of a streamed artifact fit together.

    ``shapes``, ``dtypes`` and ``token_axes`` are those of every named tensor for one chunk; ``axes`` names the token axis of
    each where it is not ``tokens`` (a context has its own length).
    """

    chunk: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    token_axes: dict[str, int]
    passes: list[PassSpec]
    axes: dict[str, str] = Field(default_factory=dict)
    image: ImageSpec | None = None


class Artifact(_Model):
    """One compiled form of the model."""

    target: str
    form: str
    precision: str
    file: str
    files: list[str]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    opset: int | None = None
    ir_version: int | None = None
    census: dict[str, float] = Field(default_factory=dict)
    mixers: dict[str, str] = Field(default_factory=dict)
    token_axes: dict[str, int] = Field(default_factory=dict)  # recurrent: of inputs and outputs; -1: no row for each token
    tokens: int | None = None  # of every run, where the sizes of the inputs leave no other number
    frames: bool = False  # recurrent: a chunk is a frame, whose tokens see all of it
    stream: StreamSpec | None = None
    # for each graph, what it asks of the runtime's arena in order ("+3 4*batch*tokens*768", "-3"); None: not known
    arena: list[list[str] | None] = Field(default_factory=list)
    ragged: bool = False  # recurrent: an input "mask" says which tokens of a chunk are real
    notes: list[str] = Field(default_factory=list)
    verified: str
    parity: dict[str, Any] | None = None
    remainder: str = "fp32"  # INT8: what the rest computes in
    quantization: dict[str, Any] | None = None  # INT8: calibration, and each layer's sensitivity, scale and fate
    ranges: dict[str, Any] | None = None  # half precision: how large values get, how that is known, and what stays FP32
    gemm_flops: list[str] = Field(default_factory=list)  # of each graph, a formula: operations of its matrix products
    tensorrt: dict[str, Any] | None = None  # ONNX: what a device that compiles it must know (export/tensorrt_lint.py)
    engine: dict[str, Any] | None = None  # engines: what built it, from which file, and what it is bound to

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, value: str) -> str:
        return _one_of(value, PRECISIONS)


class Measurement(_Model):
    """Memory of one run, measured on some machine after the export (``pom-edge memory --record``).

    ``predicted`` and ``measured`` are bytes by part, as ``pom-edge memory --json`` gives them.
    """

    file: str
    tokens: int | None  # None: inputs of a fixed size that do not say how many they are
    batch: int
    spill: bool
    threads: int | None
    machine: dict[str, str]
    runtime: str
    recorded: str
    predicted: dict[str, int]
    measured: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """A later measurement of the same run on the same machine takes the place of an earlier one."""
        return (self.file, self.tokens, self.batch, self.spill, self.threads, sorted(self.machine.items()), self.runtime)


class GoldenCase(_Model):
    """One recorded set of inputs; arrays are stored under the keys given here."""

    name: str
    kind: Literal["real", "random"]
    description: str
    inputs: dict[str, str]
    generated: dict[str, Recipe] = Field(default_factory=dict)  # inputs too long to be stored
    outputs: dict[str, str]
    rows: dict[str, list[int]] = Field(default_factory=dict)  # of outputs too long to be stored whole, see take_rows()
    taps: dict[str, str] = Field(default_factory=dict)
    chunks: list[int] = Field(default_factory=list)  # recurrent: how the sequence is cut

    def sampled(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of a run's outputs that were recorded; all of them for most cases."""
        return {name: take_rows(output, self.rows.get(name)) for name, output in outputs.items()}


def sampled_rows(shape: tuple[int, ...]) -> list[int]:
    """Which rows of a long output are kept: the first, the last, and evenly between."""
    length = shape[_row_axis(len(shape))] if shape else 0
    return sorted({round(i * (length - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)}) if length else []


def take_rows(output: np.ndarray, rows: list[int] | None) -> np.ndarray:
    """Those rows of an output (tokens of (B, N, d), lines of images, else samples of the batch); None takes all."""
    return output if rows is None or not output.ndim else np.take(output, rows, axis=_row_axis(output.ndim))


def _row_axis(rank: int) -> int:
    return 0 if rank < 3 else rank - 2


class Manifest(_Model):
    """Everything a device must know about a bundle."""

    format: Literal["pom-edge-bundle"] = FORMAT
    version: int = VERSION
    name: str
    created: str
    producer: str
    tools: dict[str, str]
    model: dict[str, Any]
    published_layout: str | None = None
    config_hash: str
    class_names: list[str] | None = None
    warnings: list[str] = Field(default_factory=list)
    artifacts: list[Artifact]
    golden: list[GoldenCase]
    measurements: list[Measurement] = Field(default_factory=list)  # an export writes none: two of them would differ
    files: list[FileEntry]
    digest: str = ""  # of the manifest's own text, see seal()


class Bundle:
    """An opened, verified bundle.

    Attributes:
        path: the folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

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
            cls._verify_files(path, manifest)
        except BundleError as error:
            if intact:
                raise
            raise BundleError(f"{edited}. (The first thing wrong: {error})") from error
        if not intact:
            raise BundleError(edited)
        return cls(path, manifest)

    @staticmethod
    def _verify_files(path: Path, manifest: Manifest) -> None:
        for entry in manifest.files:
            _verify(path, entry)
        listed = {entry.path for entry in manifest.files}
        folders = {parent.as_posix() for file in listed for parent in PurePosixPath(file).parents}  # of Core ML packages
        for artifact in manifest.artifacts:
            unlisted = [file for file in (artifact.file, *artifact.files) if file not in listed and file not in folders]
            if unlisted:
                raise BundleError(f"{path.name}: artifact file {unlisted[0]!r} is not among the hashed files; export again")
        if manifest.golden and GOLDEN not in listed:
            raise BundleError(f"{path.name}: {GOLDEN} is not among the hashed files; export again")

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
    with writing_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{MANIFEST}.", dir=path)
        try:
            with open(descriptor, "wb") as file:
                file.write(seal(content).encode())
                os.fsync(file.fileno())
            Path(name).chmod((path / MANIFEST).stat().st_mode)
            if _manifest_text(path) != text:
                raise BundleError(
                    f"{path.name}/{MANIFEST} was written by another process in the meantime; run the command again"
                )
            os.replace(name, path / MANIFEST)
        finally:
            Path(name).unlink(missing_ok=True)


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
    with replaced_folder(path) as folder:
        for entry in entries:
            _place(path / entry.path, folder / entry.path)
        for file in sorted(fresh):
            _place(made / file, folder / file)
            entries.append(FileEntry(path=file, sha256=sha256_of(folder / file), bytes=(folder / file).stat().st_size))
        files = sorted(entries, key=lambda entry: entry.path)
        manifest = bundle.manifest.model_copy(update={"artifacts": [*kept, *artifacts], "files": files})
        (folder / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")).encode())
        if _manifest_text(path) != text:
            raise BundleError(f"{path.name} was changed by another process in the meantime; run the command again")


def _place(source: Path, target: Path) -> None:
    """The same file under another name, without a second copy where the file system can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing_errors(target):
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


def _verify(folder: Path, entry: FileEntry) -> None:
    """Path, existence, size and hash of one file, in this order."""
    pure = PurePosixPath(entry.path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in entry.path or ":" in entry.path or not pure.parts:
        raise BundleError(f"{folder.name}: the manifest lists {entry.path!r}, which leaves the folder; do not use this bundle")
    path = folder / pure
    if not path.is_file():
        raise BundleError(f"{folder.name}: {entry.path} is missing; copy the whole folder again, or export again")
    if folder.resolve() not in path.resolve().parents:
        raise BundleError(f"{folder.name}: {entry.path} is a link out of the folder; do not use this bundle")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(f"{folder.name}: {entry.path} has {size} bytes, expected {entry.bytes}; copy the folder again")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise BundleError(f"{folder.name}: {entry.path} cannot be read: {error.strerror}; check its permissions") from error
    if found != entry.sha256:
        raise BundleError(
            f"{folder.name}: {entry.path} was changed after the export (sha256 differs); copy the folder again, or export again"
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
        files = [
            FileEntry(path=path.relative_to(folder).as_posix(), sha256=sha256_of(path), bytes=path.stat().st_size)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST
        ]
        manifest = Manifest(**fields, files=files)
        (folder / MANIFEST).write_bytes(seal(manifest.model_dump(mode="json")).encode())
    return manifest
