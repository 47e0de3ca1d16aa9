"""The schema of a bundle's manifest: artifacts, golden cases, files, measurements. Imports no torch and no onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pom_edge.generated import Recipe

FORMAT: Final = "pom-edge-bundle"
VERSION = 1
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")
SAMPLED_ROWS = 64
PALETTES = ("p8", "p6", "p4")  # Core ML: each weight is one of 2^n values of its tensor
# int8 is W8A8 in graphs and engines; Core ML says w8a8 for it (a package of an older bundle may still say int8)
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "w8", "w4", "w8a8", *PALETTES)

__all__ = [
    "DTYPES", "FORMAT", "PRECISIONS", "SAMPLED_ROWS", "VERSION", "Artifact", "FileEntry", "GoldenCase", "ImageSpec", "Manifest",
    "Measurement", "PassSpec", "StreamSpec", "SumSpec", "TensorSpec", "sampled_rows", "take_rows",
]  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is unknown; expected one of {', '.join(known)}")
    return value


class TensorSpec(_Model):
    """A graph input or output: free axes are names; they may have bounds and a usual length, or be one of ``lengths``."""

    name: str
    dtype: str
    shape: list[int | str]
    bounds: dict[str, tuple[int, int | None]] = Field(default_factory=dict)
    lengths: dict[str, list[int]] = Field(default_factory=dict)  # listed: there are no others
    usual: dict[str, int] = Field(default_factory=dict)  # the OPT of MIN:OPT:MAX, for which engines are tuned
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
    deployment_target: str | None = None  # Core ML: the oldest system that takes it
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
