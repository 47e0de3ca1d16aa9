"""Symmetric scales: which step rounds a set of numbers best to a few bits."""

from __future__ import annotations

import torch
from torch import Tensor

CLIPS = 97  # clipping limits that are tried for activations, from the largest magnitude down to 1/8 of it
PARTS = 41  # scales that are tried for a channel of a weight, from clipping nothing down to 60 % of it

__all__ = ["best_clip", "channel_scales"]


def best_clip(magnitudes: Tensor, counts: Tensor, largest: float, limit: int) -> float:
    """The clipping limit c with the least expected squared error when magnitudes are rounded to multiples of c / limit.

    A magnitude below half a step becomes 0, one above c becomes c, others err by a step over the square root of 12.

    Args:
        magnitudes: (n), float64. counts: (n), how often each occurs.
        largest: of them.
        limit: 127, or 63 for 7 bits.
    """
    here = counts > 0
    magnitudes, counts = magnitudes[here].clamp(max=largest), counts[here]
    best, least = largest, float("inf")
    for clip in (largest * 2.0 ** (-3 * i / (CLIPS - 1)) for i in range(CLIPS)):
        step = clip / limit
        error = torch.where(magnitudes < step / 2, magnitudes**2, torch.full_like(magnitudes, step**2 / 12))
        error = torch.where(magnitudes > clip, (magnitudes - clip) ** 2 + step**2 / 12, error)
        total = float((error * counts).sum())
        if total < least:
            best, least = clip, total
    return best


def channel_scales(weight: Tensor, axis: int, limit: int, mse: bool, low: int | None = None) -> Tensor:
    """A positive scale for each slice of a weight along an axis: (C). A slice of zeros gets that of the largest slice.

    Args:
        weight: any shape.
        axis: of the channels.
        limit, low: largest and smallest integer; ``low`` is -limit unless given.
        mse: the scale with the least squared error; otherwise the one that clips nothing.
    """
    rows = weight.detach().movedim(axis, 0).flatten(1).double()  # (C, n)
    largest = rows.abs().amax(1)
    scales = largest / limit
    if mse:
        scales = _least_error(rows, largest, limit, -limit if low is None else low)
    top = scales.max() if bool(largest.max() > 0) else torch.ones((), dtype=torch.float64)
    return torch.where(largest > 0, scales, top).float().clamp(min=torch.finfo(torch.float32).tiny)


def _least_error(rows: Tensor, largest: Tensor, limit: int, low: int) -> Tensor:
    """For each row the scale, from clipping nothing down to 60 %, whose rounding errs least."""
    best, least = largest / limit, torch.full_like(largest, float("inf"))
    for part in torch.linspace(1.0, 0.6, PARTS, dtype=torch.float64):
        scale = (largest * part / limit).clamp(min=torch.finfo(torch.float64).tiny)
        rounded = (rows / scale.unsqueeze(1)).round().clamp(low, limit) * scale.unsqueeze(1)
        error = ((rows - rounded) ** 2).sum(1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best
