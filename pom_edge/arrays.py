"""Arrays by name in .npz, .npy and .safetensors files (imports no torch)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pom_edge.errors import InputError
from pom_edge.exchange import follow_umask

FORMATS = (".npz", ".npy", ".safetensors")

__all__ = ["FORMATS", "read_arrays", "read_safetensors", "write_arrays", "write_safetensors"]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a file of arrays; the array of a ``.npy`` file is named ``x``.

    Raises:
        InputError: no such file, another format, or a damaged file.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"{path.name} is not one of {', '.join(FORMATS)}; save the inputs with numpy.savez(path, x=...)")
    if not path.is_file():
        raise InputError(f"{path} does not exist or is not a file; expected a file of arrays by tensor name")
    try:
        if path.suffix == ".safetensors":
            return read_safetensors(path)[0]
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"x": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # numpy, zipfile and safetensors each have their own
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and metadata of a ``.safetensors`` file.

    Raises:
        InputError: no such file, or a damaged one.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist or is not a file; expected a .safetensors file")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except Exception as error:  # safetensors has its own
        raise InputError(f"{path} cannot be read as .safetensors: {error}") from error


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays and metadata, whole or not at all.

    Raises:
        InputError: the place cannot be written.
    """
    contiguous = {name: np.array(array, order="C") for name, array in arrays.items()}
    _write(path, lambda temporary: save_file(contiguous, temporary, metadata=dict(metadata or {})))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, whole or not at all; a ``.npy`` file takes exactly one.

    Raises:
        InputError: another format, several arrays for ``.npy``, or a place that cannot be written.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"{path.name} is not one of {', '.join(FORMATS)}")
    if path.suffix == ".npy" and len(arrays) != 1:
        raise InputError(f"{path.name} takes one array, the model has {len(arrays)} outputs; write a .npz instead")
    if path.suffix == ".safetensors":
        write_safetensors(path, arrays)
    elif path.suffix == ".npy":
        _write(path, lambda temporary: np.save(temporary, next(iter(arrays.values()))))
    else:
        _write(path, lambda temporary: np.savez(temporary, **arrays))  # type: ignore[arg-type]  # numpy types allow_pickle into **kwds


def _write(path: Path, write: Callable[[Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        write(temporary)
        follow_umask(temporary)  # safetensors makes its files private
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
