"""Arrays by name in .npz, .npy and .safetensors files (imports no torch)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pom_edge.errors import InputError

FORMATS = (".npz", ".npy", ".safetensors")

__all__ = ["FORMATS", "read_arrays", "write_arrays"]


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
            from safetensors.numpy import load_file

            return dict(load_file(path))
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"x": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # numpy, zipfile and safetensors each have their own
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, whole or not at all; a ``.npy`` file takes exactly one.

    Raises:
        InputError: another format, several arrays for ``.npy``, or a place that cannot be written.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"{path.name} is not one of {', '.join(FORMATS)}")
    if path.suffix == ".npy" and len(arrays) != 1:
        raise InputError(f"{path.name} takes one array, the model has {len(arrays)} outputs; write a .npz instead")
    temporary = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        if path.suffix == ".npy":
            np.save(temporary, next(iter(arrays.values())))
        elif path.suffix == ".npz":
            np.savez(temporary, **arrays)  # type: ignore[arg-type]  # numpy types its allow_pickle flag into **kwds
        else:
            from safetensors.numpy import save_file

            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
