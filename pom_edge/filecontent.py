"""What torch.save and safetensors files hold, read without running code from them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pom_edge.errors import CheckpointError
from pom_edge.fileformat import EXPECTED, identify
from pom_edge.imports import import_path

__all__ = ["Stored", "pickled_module", "read_content"]


@dataclass(frozen=True)
class Stored:
    """What a file holds: an object of plain types and tensors (or a pickled module), safetensors metadata, warnings."""

    content: Any
    metadata: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_content(path: Path, unsafe_pickle: bool = False) -> Stored:
    """Read a torch.save or safetensors file onto the CPU.

    Args:
        path: the file.
        unsafe_pickle: unpickle what the weights-only reader refuses. That runs code from the file.

    Raises:
        CheckpointError: another kind of file, a damaged one, or pickled objects without ``unsafe_pickle``.
    """
    if identify(path) == "safetensors":
        content, metadata = _read_safetensors(path)
        return Stored(content, metadata)
    loaded, warnings = _read_torch(path, unsafe_pickle)
    return Stored(loaded, {}, warnings)


def pickled_module(content: Any) -> nn.Module | None:
    """A whole module, by itself or as the one entry of a training checkpoint, without its parallel or compiled wrapper."""
    if isinstance(content, Mapping):
        modules = [value for value in content.values() if isinstance(value, nn.Module)]
        content = modules[0] if len(modules) == 1 else None
    if not isinstance(content, nn.Module):
        return None
    inner = getattr(content, "_orig_mod", None) or (content.module if isinstance(content, nn.DataParallel) else None)
    return inner if isinstance(inner, nn.Module) else content


def _read_torch(path: Path, unsafe_pickle: bool) -> tuple[Any, list[str]]:
    """The content of a torch.save file, and a warning where reading it ran code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True), []
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error):
            if unsafe_pickle:
                return _read_pickle(path), [
                    f"{path.name} was unpickled, which ran code from it: only do so with files you trust"
                ]
            raise CheckpointError(
                f"{path} holds pickled Python objects, and loading those runs code from the file; expected weights only. In "
                "the environment that made it: torch.save(model.state_dict(), 'weights.pt') (of a training checkpoint its "
                "state_dict entry), then give --factory. If you trust the file and its author, --unsafe-pickle loads it "
                f"as it is (refused: {_refused(error)})"
            ) from error
        raise _damaged(path, error) from error
    except Exception as error:  # zip, storage and size errors of a damaged file
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read by torch.load ({_reason(error)}): it is truncated or damaged, or a pickle of something else. "
        f"Copy or save it again; {EXPECTED}"
    )


def _read_pickle(path: Path) -> Any:
    try:
        with import_path(Path.cwd()):
            return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be unpickled here: {_reason(error)}. Its classes must be importable, from an installed package or "
            "the current directory, in the version that saved them"
        ) from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {_reason(error)}; copy or save it again") from error


def _refused(error: pickle.UnpicklingError) -> str:
    """The class or function that the weights-only reader met."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found.group(1) if found else _reason(error)


def _reason(error: Exception) -> str:
    """The first line of a loader's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
