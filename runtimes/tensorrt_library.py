"""The TensorRT of this machine, either flavour: which module, which version, which file, and its one logger."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pom_edge.errors import MissingToolError

MODULES = {"trt": "tensorrt", "rtx": "tensorrt_rtx"}
NAMES = {"trt": "TensorRT", "rtx": "TensorRT-RTX"}
LOWEST = {"trt": (10, 3), "rtx": (1, 7)}
MAX_LOG = 40

__all__ = ["MODULES", "NAMES", "library_path", "load_tensorrt", "logger_of", "short_version", "starting", "version_tuple"]


def version_tuple(text: str) -> tuple[int, ...]:
    """``"10.13.3.9"`` -> (10, 13, 3, 9); what is not a number ends it."""
    parts = []
    for part in text.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def short_version(text: str) -> str:
    """As in file names: three numbers."""
    return ".".join(map(str, version_tuple(text)[:3]))


def load_tensorrt(target: str) -> Any:
    """The module of ``"trt"`` or ``"rtx"``.

    Raises:
        MissingToolError: not installed, broken, or too old.
    """
    name, module = NAMES[target], MODULES[target]
    try:
        trt = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a placeholder that downloads, without a network
        raise MissingToolError(f"{name} cannot be imported here ({module}: {error})") from error
    version = getattr(trt, "__version__", "0")
    if version_tuple(version) < LOWEST[target]:
        lowest = ".".join(map(str, LOWEST[target]))
        raise MissingToolError(f"{name} {version} is too old; expected {lowest} or newer")
    return trt


@functools.cache
def logger_of(trt: Any) -> Any:
    """The one logger of this process, which keeps errors and warnings: TensorRT ignores a second one, with a warning."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, msg: str) -> None:
            kind = str(severity).rpartition(".")[2]
            if kind in ("INTERNAL_ERROR", "ERROR", "WARNING"):
                self.lines.append((kind, msg))

        def errors(self) -> list[str]:
            return [" ".join(text.split()) for kind, text in self.lines if kind != "WARNING"]

        def warnings(self) -> list[str]:
            texts = [" ".join(text.split()) for kind, text in self.lines if kind == "WARNING"]
            return [text for text in dict.fromkeys(texts) if "has Int64 binding" not in text][:MAX_LOG]  # ours have

    return Log()


@contextlib.contextmanager
def starting(trt: Any, target: str) -> Iterator[None]:
    """Around ``trt.Builder(...)`` and ``trt.Runtime(...)``: where CUDA does not start, the bindings raise what means nothing.

    "pybind11::init(): factory function returned nullptr" as a TypeError, with the reason in the log (seen with the bindings of
    10.3 to 11.4).

    Raises:
        MissingToolError: it does not start; says what the library says.
    """
    logger = logger_of(trt)
    logger.lines.clear()
    try:
        yield
    except (TypeError, RuntimeError) as error:
        if isinstance(error, TypeError) and "nullptr" not in str(error):
            raise
        told = " | ".join(logger.errors()[:3]) or str(error)
        raise MissingToolError(
            f"{NAMES[target]} {trt.__version__} does not start here: no NVIDIA GPU that it can use, or a driver that is "
            f"missing or too old (`pom-edge doctor` lists both). It says: {told}"
        ) from error


def library_path(trt: Any) -> str | None:
    """The native library that is loaded: a machine may have several."""
    stem = "libtensorrt_rtx" if trt.__name__.startswith("tensorrt_rtx") else "libnvinfer.so"
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(maxsplit=5)[5] for line in lines if f"/{stem}" in line), None)
