"""Rotary positions (1-D and 2-D) for the Polynomial Mixer.

Rotate-half convention: channel k is paired with channel k + C/2 of its block and turned by the angle position * theta_k,
theta_k = base^(-k / q) for k = 0..q-1. A 1-D rotation is one block of D channels (q = D/2); a 2-D rotation is two blocks
of D/2 channels, the first turned by the row, the second by the column (q = D/4). Both are one piece of code here: the
channels are viewed as (blocks, 2, q) and the positions as (tokens, blocks).

Angles are formed in float64. FP32 angles, as in the published tables, lose 20 dB for every factor of ten in the position
(80 dB at position 10,000, 40 dB at 1,000,000), and a table ends somewhere; here any int64 position is as good as the first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pom_edge.errors import InputError

Rotary = Literal["1d", "2d"]

__all__ = ["Rotary", "blocks_of", "check_rotary", "cos_sin", "frequencies", "gate_frequencies", "rotate"]


def blocks_of(rotary: Rotary) -> int:
    """How many position coordinates a token has: 1 for ``"1d"``, 2 (row, column) for ``"2d"``."""
    return 1 if rotary == "1d" else 2


def check_rotary(rotary: str, hidden: int, n_sel_heads: int) -> None:
    """Refuse widths that cannot be paired.

    Raises:
        InputError: ``hidden`` (D) or ``n_sel_heads`` (H > 1) does not split into blocks of pairs.
    """
    if rotary not in ("1d", "2d"):
        raise InputError(f"rotary is {rotary!r}; expected None, '1d' or '2d'")
    multiple = 2 * blocks_of(rotary)  # type: ignore[arg-type]  # narrowed by the test above
    if hidden % multiple:
        raise InputError(f"rotary {rotary} needs dim * expand divisible by {multiple}, found {hidden}")
    if n_sel_heads > 1 and (n_sel_heads % multiple or hidden // n_sel_heads < multiple):
        raise InputError(
            f"rotary {rotary} needs n_sel_heads divisible by {multiple} and heads at least {multiple} channels wide, "
            f"found {n_sel_heads} heads of {hidden // n_sel_heads} channels"
        )


def frequencies(hidden: int, rotary: Rotary, base: float) -> Tensor:
    """theta_k, float64, shape (q,) with q = D/2 (1-D) or D/4 (2-D)."""
    q = hidden // (2 * blocks_of(rotary))
    return torch.pow(torch.tensor(base, dtype=torch.float64), -torch.arange(q, dtype=torch.float64) / q)


def gate_frequencies(theta: Tensor, rotary: Rotary, n_sel_heads: int, head_width: int) -> Tensor:
    """The frequencies of a gate of H > 1 heads: every head takes the column at its own stride, shape (H/2,) or (H/4,)."""
    stride = head_width // 2 if rotary == "1d" else head_width  # as published: D/2 columns hold two heads' pairs, D/4 one
    return theta[::stride][: n_sel_heads // (2 * blocks_of(rotary))]


def cos_sin(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta, computed in float64.

    Args:
        positions: int64, (..., N, blocks).
        theta: float64, (q,).
        dtype: of the result.

    Returns:
        Two tensors (..., N, blocks, q).
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * theta.to(positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels of ``x`` (..., N, C) by the angles of ``cos``, ``sin`` (..., N, blocks, q), C = 2 blocks q."""
    blocks, q = cos.shape[-2:]
    first, second = x.unflatten(-1, (blocks, 2, q)).unbind(-2)  # each (..., N, blocks, q)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).flatten(-3)
