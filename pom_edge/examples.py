"""``--example``: files of inputs, or a callable that makes them, to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pom_edge.arrays import FORMATS, read_arrays
from pom_edge.errors import InputError
from pom_edge.imports import call_named

_WIDENED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float32}
_INTEGERS = (torch.int8, torch.int16, torch.int32)  # uint8 stays: an image in bytes is not a token id

__all__ = ["load_example", "named_inputs"]


def load_example(spec: str) -> dict[str, Tensor]:
    """Example inputs by name, from ``--example FILE|module:callable``.

    Args:
        spec: a ``.npz``, ``.npy`` (its array is named ``x``) or ``.safetensors`` file, or a callable that returns a mapping of
            input name to tensor or array.

    Returns:
        Tensors by name; floats as float32 and integers as int64, the types that graph inputs have; bool and uint8 stay.

    Raises:
        InputError: unreadable, empty, not named tensors, or holding NaN or Inf.
    """
    path = Path(spec)
    if path.suffix in FORMATS or (":" not in spec):
        found: Any = read_arrays(path)
    else:
        found = call_named(spec, "--example")
    if isinstance(found, (Tensor, np.ndarray)):
        found = {"x": found}
    if not isinstance(found, Mapping) or not found:
        raise InputError(
            f"--example {spec} gave {_describe(found)}; expected a mapping of input name to tensor, for example "
            '{"x": torch.randn(2, 16, 64)}'
        )
    return named_inputs(found, f"--example {spec}")


def named_inputs(found: Mapping[Any, Any], source: str) -> dict[str, Tensor]:
    """Tensors, arrays and numbers as the types that graph inputs have, see :func:`load_example`.

    Args:
        found: by input name.
        source: for messages.

    Raises:
        InputError: something else, or NaN or Inf.
    """
    return {str(name): _as_input(str(name), value, source) for name, value in found.items()}


def _as_input(name: str, value: Any, source: str) -> Tensor:
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(np.array(value, order="C"))
    if not isinstance(value, Tensor):
        raise InputError(f"{source}: input {name!r} is {_describe(value)}; expected a tensor or a numeric array")
    tensor = value.detach().to("cpu")
    if tensor.is_floating_point():
        bad = int((~torch.isfinite(tensor.float())).sum())
        if bad:
            raise InputError(f"{source}: input {name!r} holds {bad} NaN or Inf of {tensor.numel()} values")
    if tensor.dtype in _INTEGERS:
        return tensor.long()
    return tensor.to(_WIDENED.get(tensor.dtype, tensor.dtype))


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a dict" if value else "an empty mapping"
    return f"a {type(value).__name__}"
