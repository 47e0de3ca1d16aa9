"""Calibration data: real inputs from files or a callable, checked against the model before anything runs.

.npz, .npy, .safetensors     arrays by input name, samples along the first axis
a folder                     every such file in it, in the order of their names
module:callable              returns or yields batches: arrays by input name, or one array for the first input
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pom_edge.arrays import FORMATS, read_arrays
from pom_edge.errors import InputError
from pom_edge.examples import named_inputs
from pom_edge.export.inputs import Axes
from pom_edge.imports import call_named
from pom_edge.words import counted

FEW = 8  # samples below which ranges are a matter of luck
OUTLYING = 1000.0  # a value this many times the 99.9th percentile of the magnitudes is no measurement
MAX_BATCHES = 4096  # of a callable: one that yields for ever would never end

__all__ = ["Calibration", "load_calibration"]


@dataclass
class Calibration:
    """Batches of inputs.

    Attributes:
        source: where they came from, in words, without folders.
        batches: tensors by input name.
        samples: how many there are in all.
        warnings: what the user should know, one sentence each.
    """

    source: str
    batches: list[dict[str, Tensor]]
    samples: int = 0
    warnings: list[str] = field(default_factory=list)


def load_calibration(
    source: str | Path | Mapping[str, Any] | Iterable[Any],
    example: Mapping[str, Tensor],
    axes: Axes,
    masks: Collection[str] = (),
) -> Calibration:
    """Read calibration data and check it against a model's inputs.

    Args:
        source: a file, a folder, ``"module:callable"``, a mapping of arrays, or batches.
        example: one example of each input.
        axes: of the inputs: free axes by name, others as numbers.
        masks: padding masks (B, N) that a batch may leave out: then every token of the first input counts.

    Raises:
        InputError: nothing to read, no data, or data that does not fit the model: another name, dtype or shape, NaN, infinity,
            nothing but zeros.
    """
    label = f"--calibration {source}" if isinstance(source, (str, Path)) else "calibration"
    batches: list[dict[str, Tensor]] = []
    for where, batch in _batches(source, example, label):
        if len(batches) == MAX_BATCHES:
            raise InputError(f"{label} gives more than {MAX_BATCHES} batches; a few hundred samples are enough")
        batches.append(_checked(_masked(named_inputs(batch, where), example, masks), example, axes, where))
    if not batches:
        raise InputError(f"{label} holds no data; expected batches of the inputs {_listed(example)}")
    name = _source_name(source) if isinstance(source, (str, Path)) else "given arrays"
    found = Calibration(name, batches, sum(_rows(batch, axes) for batch in batches))
    _look_at_values(found, example, label)
    return found


def _source_name(source: str | Path) -> str:
    """Without the folders of this machine."""
    if Path(source).exists():
        return Path(source).name
    module, _, function = str(source).rpartition(":")
    return f"{Path(module).name}:{function}"


def _batches(source: Any, example: Mapping[str, Tensor], label: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in FORMATS)
            if not files:
                raise InputError(f"{label}: the folder holds no file of {', '.join(FORMATS)}; save inputs with numpy.savez")
            for file in files:
                yield (
                    f"{label}: {file.name}",
                    _named(read_arrays(file), example, file.suffix == ".npy", f"{label}: {file.name}"),
                )
            return
        if path.suffix in FORMATS or ":" not in str(source):
            yield label, _named(read_arrays(path), example, path.suffix == ".npy", label)
            return
        source = call_named(str(source), "--calibration")
    if isinstance(source, (Tensor, np.ndarray, Mapping)):
        yield label, _named(source, example, False, label)
        return
    if not isinstance(source, Iterable):
        raise InputError(f"{label} gave a {type(source).__name__}; expected batches: {{input name: array}}, or arrays")
    iterator = iter(source)
    for count in range(MAX_BATCHES + 1):
        where = f"{label}: batch {count}"
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except InputError:
            raise
        except Exception as error:  # whatever a user's generator can raise
            raise InputError(f"{where} raised {type(error).__name__}: {error}") from error
        yield where, _named(batch, example, False, where)


def _named(batch: Any, example: Mapping[str, Tensor], alone: bool, where: str) -> Mapping[Any, Any]:
    """By input name; a single array is the first input."""
    first = next(iter(example))
    if isinstance(batch, (Tensor, np.ndarray)):
        return {first: batch}
    if not isinstance(batch, Mapping):
        raise InputError(f"{where} is a {type(batch).__name__}; expected {{input name: array}}, or the array of {first!r}")
    return {first: next(iter(batch.values()))} if alone else batch


def _masked(batch: dict[str, Tensor], example: Mapping[str, Tensor], masks: Collection[str]) -> dict[str, Tensor]:
    """With the masks that it left out: every token counts."""
    first = batch.get(next(iter(example)))
    if first is None or first.ndim < 2:
        return batch  # and the check says what is wrong with it
    return {name: torch.ones(first.shape[:2], dtype=example[name].dtype) for name in masks} | batch


def _checked(batch: dict[str, Tensor], example: Mapping[str, Tensor], axes: Axes, where: str) -> dict[str, Tensor]:
    missing, extra = [n for n in example if n not in batch], [n for n in batch if n not in example]
    if missing or extra:
        raise InputError(f"{where} has the arrays {_listed(batch) or 'none'}; expected {_listed(example)}, the model's inputs")
    sizes: dict[str, tuple[str, int]] = {}
    checked = {}
    for name, like in example.items():
        tensor = _cast(name, batch[name], like, where)
        expected = ", ".join(str(dim) for dim in axes[name])
        if tensor.ndim != like.ndim or any(
            isinstance(d, int) and d != n for d, n in zip(axes[name], tensor.shape, strict=True)
        ):
            raise InputError(f"{where}: {name!r} has the shape {tuple(tensor.shape)}; expected ({expected})")
        if not tensor.numel():
            raise InputError(
                f"{where}: {name!r} is empty, of shape {tuple(tensor.shape)}; expected ({expected}) with data in it"
            )
        for dim, length in zip(axes[name], tensor.shape, strict=True):
            other, known = sizes.setdefault(dim, (name, length)) if isinstance(dim, str) else (name, length)
            if known != length:
                raise InputError(f"{where}: {name!r} has {length} {dim}, {other!r} has {known}; expected as many in both")
        checked[name] = tensor
    return checked


def _cast(name: str, tensor: Tensor, like: Tensor, where: str) -> Tensor:
    if tensor.dtype == like.dtype:
        return tensor
    if like.is_floating_point() and tensor.dtype in (torch.bool, torch.int64) and name == "mask":
        return tensor.to(like.dtype)
    if like.is_floating_point():
        raise InputError(
            f"{where}: {name!r} holds {_dtype(tensor)}, the model takes {_dtype(like)}; "
            "prepare the data as the model was trained on it (scaled, normalised) and save it as float32"
        )
    if not tensor.is_floating_point():
        return tensor.to(like.dtype)
    raise InputError(f"{where}: {name!r} holds {_dtype(tensor)}; expected integers, as the model takes them")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in names)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _rows(batch: Mapping[str, Tensor], axes: Axes) -> int:
    return next((int(batch[name].shape[0]) for name, dims in axes.items() if dims and dims[0] == "batch"), 1)


def _look_at_values(found: Calibration, example: Mapping[str, Tensor], label: str) -> None:
    if found.samples < FEW:
        found.warnings.append(
            f"calibration on {counted(found.samples, 'sample')}: ranges of other inputs may be wider; a hundred are better"
        )
    for name, like in example.items():
        if not like.is_floating_point() or name == "mask":
            continue
        values = torch.cat([batch[name].abs().flatten() for batch in found.batches])
        largest = float(values.max())
        if largest == 0:
            raise InputError(
                f"{label}: {name!r} is zero throughout, so its INT8 scale would be 0; give inputs as they are in use"
            )
        typical = float(np.partition(values.numpy(), k := int(0.999 * (len(values) - 1)))[k])
        if typical and largest > OUTLYING * typical:
            found.warnings.append(
                f"{label}: the largest value of {name!r} is {largest:g}, 99.9 % are below {typical:g}: outliers may take the "
                "range; look at the data"
            )
