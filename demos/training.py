"""What the demos' training scripts share: AdamW's parameter groups for a PoM model, and a learning-rate schedule."""

from __future__ import annotations

import math

from torch import nn

COEFFICIENT_RATE = 5.0  # po_coeff learns this much faster, see parameter_groups

__all__ = ["parameter_groups", "schedule_of"]


def parameter_groups(model: nn.Module, rate: float, decay: float) -> list[dict[str, object]]:
    """AdamW groups: matrices decay, vectors do not, and the polynomial's coefficients learn faster.

    Coefficients start within +-0.001, so a fresh mixer is nearly silent and the gradient of its projection, which is
    proportional to them, nearly zero. A larger step (Adam's is about the rate, whatever the gradient) wakes them within
    the warm-up; decay would pull them back to silence, `--penalty` is the tool for keeping them small.
    """
    coefficients: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.endswith("po_coeff"):
            coefficients.append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    return [
        {"params": matrices, "lr": rate, "weight_decay": decay},
        {"params": vectors, "lr": rate, "weight_decay": 0.0},
        {"params": coefficients, "lr": rate * COEFFICIENT_RATE, "weight_decay": 0.0},
    ]


def schedule_of(step: int, steps: int) -> float:
    """Factor of the learning rate: warm-up over a tenth of the steps, then a cosine down to zero."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
