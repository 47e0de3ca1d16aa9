"""Training images as other hands and other cameras would have made them, a batch at a time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 28
CLEAN_SHARE = 0.1  # of the images stay as they are: every resampling blurs a little, real test images are sharp
PHOTO_SHARE = 0.5  # of the others get a camera's faults; all of them get another hand's

__all__ = ["augment"]


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random variants of a batch.

    Args:
        images: (B, 1, 28, 28) float32 in 0..1, ink bright.
        generator: source of all randomness.

    Returns:
        The same shape and range.
    """
    x = F.grid_sample(images, _warp(len(images), generator), mode="bilinear", align_corners=False)
    x = _stroke(x, generator)
    x = torch.where(_uniform(0, 1, len(x), generator) < PHOTO_SHARE, _camera(x, generator), x)
    return torch.where(_uniform(0, 1, len(x), generator) < CLEAN_SHARE, images, x)


def _uniform(low: float, high: float, count: int, generator: torch.Generator) -> Tensor:
    """(count, 1, 1, 1), between low and high."""
    return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator)


def _warp(count: int, generator: torch.Generator) -> Tensor:
    """Sampling grids (B, 28, 28, 2): turn, lean, size, place, and an elastic wobble of the hand."""
    angle, lean, size, ratio = (
        _uniform(-limit, limit, count, generator).flatten() for limit in (math.radians(13), 0.2, 0.13, 0.08)
    )
    matrix = torch.zeros(count, 2, 3)
    matrix[:, 0, 0] = angle.cos() * (1 + size + ratio)
    matrix[:, 0, 1] = -angle.sin() + lean
    matrix[:, 1, 0] = angle.sin()
    matrix[:, 1, 1] = angle.cos() * (1 + size - ratio)
    matrix[:, :, 2] = (torch.rand(count, 2, generator=generator) - 0.5) * 2 * (1.8 / (SIDE / 2))
    grid = F.affine_grid(matrix, [count, 1, SIDE, SIDE], align_corners=False)
    coarse = torch.randn(count, 2, 6, 6, generator=generator) * (0.75 / (SIDE / 2))
    return grid + F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=False).permute(0, 2, 3, 1)


def _stroke(x: Tensor, generator: torch.Generator) -> Tensor:
    """Thinner or thicker pens: blend towards the neighbourhood's minimum or maximum."""
    thick = F.max_pool2d(x, 3, stride=1, padding=1)
    thin = -F.max_pool2d(-x, 3, stride=1, padding=1)
    amount = _uniform(-0.6, 0.7, len(x), generator)
    return x + amount.clamp(min=0) * (thick - x) + amount.clamp(max=0) * (x - thin)


def _camera(x: Tensor, generator: torch.Generator) -> Tensor:
    """What the preprocessing leaves of a photo: blur, faded or blown contrast, uneven paper, noise."""
    count = len(x)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, stride=1)
    x = torch.lerp(x, blurred, _uniform(0, 0.8, count, generator))
    x = (x.clamp(min=0) + 1e-6) ** torch.exp(_uniform(-0.5, 0.5, count, generator))  # gamma
    x = x * _uniform(0.6, 1.3, count, generator)
    slope = F.interpolate(torch.randn(count, 1, 2, 2, generator=generator), size=(SIDE, SIDE), mode="bilinear")
    x = x + 0.06 * slope + _uniform(-0.05, 0.05, count, generator)
    noise = torch.randn(x.shape, generator=generator) * _uniform(0, 0.08, count, generator)
    return (x + noise).clamp(0, 1)
