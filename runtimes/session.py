"""One interface for every runtime: open an artifact, look at its tensors, run it, check it against PyTorch's answers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from pom_edge.bundle import Artifact, Bundle, TensorSpec
from pom_edge.errors import InputError

if TYPE_CHECKING:
    from pom_edge.runtimes.checking import CheckReport

RUNTIMES = ("ort",)

__all__ = ["RUNTIMES", "Session", "open_session"]


class Session(ABC):
    """An opened artifact. Use as a context manager, or call :meth:`close`.

    Attributes:
        bundle, artifact: what is running.
        inputs, outputs: tensor specs; free axes are names.
    """

    def __init__(self, bundle: Bundle, artifact: Artifact) -> None:
        self.bundle = bundle
        self.artifact = artifact
        self.inputs: list[TensorSpec] = artifact.inputs
        self.outputs: list[TensorSpec] = artifact.outputs

    @property
    @abstractmethod
    def runtime(self) -> str:
        """What executes the artifact, with its version."""

    @abstractmethod
    def _execute(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run validated inputs."""

    @abstractmethod
    def close(self) -> None:
        """Give the runtime's memory back; the session cannot be used afterwards."""

    def run(self, x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """Run the artifact.

        Args:
            x: the first input, for models where it needs no name.
            inputs: inputs by tensor name.

        Returns:
            The output, or all outputs by name when there are several.

        Raises:
            InputError: a name, dtype or shape does not fit; says what was found and expected.
        """
        if isinstance(x, Mapping):
            raise InputError(
                "run() takes an array, or arrays by keyword: run(x, mask=mask), run(**inputs); or run_named(inputs)"
            )
        if x is not None and self.inputs[0].name in inputs:
            raise InputError(f"input {self.inputs[0].name!r} is given twice, by position and by name; give it once")
        if x is not None:
            inputs = {self.inputs[0].name: x, **inputs}
        outputs = self.run_named(inputs)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def run_named(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As :meth:`run`, with names in and names out."""
        return self._execute(self._validate(inputs))

    def check(self) -> CheckReport:
        """Compare with the PyTorch answers that the bundle carries."""
        from pom_edge.runtimes.checking import check_session

        return check_session(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _validate(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        expected = {spec.name: spec for spec in self.inputs}
        unknown, missing = sorted(set(inputs) - set(expected)), sorted(set(expected) - set(inputs))
        if unknown or missing:
            wrong = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
            raise InputError(f"input names do not fit ({wrong}); expected {', '.join(map(str, self.inputs))}")
        sizes: dict[str, tuple[int, str]] = {}
        return {name: _fit(spec, inputs[name], sizes) for name, spec in expected.items()}


def _fit(spec: TensorSpec, value: np.ndarray, sizes: dict[str, tuple[int, str]]) -> np.ndarray:
    """The array in the graph's dtype, or one clear error."""
    array = np.asarray(value)
    wanted = np.dtype(spec.dtype)
    if array.dtype != wanted:
        array = _converted(spec, array, wanted)
    if array.ndim != len(spec.shape):
        raise InputError(f"input {spec.name!r} has shape {array.shape}; expected {spec}")
    for axis, (length, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int):
            if length != dim:
                raise InputError(f"input {spec.name!r} has {length} along axis {axis}; expected {spec}")
            continue
        if length == 0:
            raise InputError(f"input {spec.name!r} is empty along {dim} (shape {array.shape}); expected at least 1")
        known, other = sizes.setdefault(dim, (length, spec.name))
        if known != length:
            raise InputError(f"{dim} is {known} in input {other!r} but {length} in {spec.name!r}; they must be equal")
        low, high = spec.bounds.get(dim, (1, None))
        if length < low or (high is not None and length > high):
            raise InputError(f"{dim} is {length}; this artifact takes {low} to {high}")
    return np.ascontiguousarray(array)


def _converted(spec: TensorSpec, array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Lossless or customary conversions only: masks of bool or integers, half and double floats, narrower integers."""
    is_mask = "mask" in spec.name and array.dtype.kind in "bui"
    both_float = array.dtype.kind == "f" and wanted.kind == "f"
    both_integer = array.dtype.kind in "ui" and wanted.kind == "i"
    if not (is_mask or both_float or both_integer):
        raise InputError(f"input {spec.name!r} is {array.dtype}; expected {spec}")
    return array.astype(wanted)


def open_session(
    path: str | os.PathLike[str], runtime: str = "ort", artifact: str | None = None, threads: int | None = None
) -> Session:
    """Open a bundle's artifact in a runtime.

    Args:
        path: the ``.pom`` folder; its hashes are verified before any native parser sees a byte.
        runtime: ``"ort"`` (ONNX Runtime, CPU).
        artifact: file name, when the bundle holds several that this runtime could execute.
        threads: for the runtime; None leaves the choice to it.

    Raises:
        BundleError: damaged or foreign bundle.
        InputError: unknown runtime, or no artifact of the bundle fits it.
        MissingExtraError: the runtime is not installed.
    """
    if runtime not in RUNTIMES:
        raise InputError(f"unknown runtime {runtime!r}; this version has {', '.join(RUNTIMES)}")
    from pom_edge.runtimes.onnxruntime_session import OnnxRuntimeSession

    bundle = Bundle.open(Path(path))
    return OnnxRuntimeSession(bundle, select_artifact(bundle, OnnxRuntimeSession.extension, artifact), threads)


def select_artifact(bundle: Bundle, extension: str, name: str | None) -> Artifact:
    """The artifact to run: by name, or the first with the runtime's extension.

    Raises:
        InputError: none, or none of that name.
    """
    fitting = [artifact for artifact in bundle.manifest.artifacts if artifact.file.endswith(extension)]
    found = [artifact for artifact in fitting if name in (None, artifact.file)]
    if not found:
        files = ", ".join(artifact.file for artifact in bundle.manifest.artifacts) or "none"
        wanted = f"no artifact {name!r}" if name else f"no {extension} artifact"
        raise InputError(f"{bundle.path.name} has {wanted}; it holds {files}")
    return found[0]
