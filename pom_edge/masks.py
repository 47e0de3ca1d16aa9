"""From what attention layers are told about visibility to what a PoM takes: (B, N) or (B, T, N) of bool, or causal.

Attention masks come bool or additive, per token or per query, per head or shared. A PoM knows one weight for each pair of
query and token at most, so an additive mask can only say yes (0) or no (-inf), and all heads must say the same. Values are
checked where they are known; while a graph is traced they are not, and a mask for each query then stays one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pom_edge.errors import InputError

IGNORED = -1e4  # exp() of it is 0 beside any score

__all__ = ["admitted", "drop_tokens", "is_triangle", "rows_alike", "shared_by_heads", "tracing"]


def tracing() -> bool:
    """Whether a graph is being recorded: tensor values are then unknown, and sizes may be symbols."""
    return torch.compiler.is_compiling()


def admitted(mask: Tensor, name: str, true_means: str) -> Tensor:
    """What a mask admits, bool.

    Args:
        mask: bool; or additive: 0 admits, -inf (or what stands for it: -10,000 and below) does not.
        name: for messages.
        true_means: ``"ignore"`` (nn.MultiheadAttention's bool masks) or ``"keep"`` (scaled_dot_product_attention's).

    Raises:
        InputError: integers, or an additive mask of other values: a PoM has no scores to add them to.
    """
    if mask.dtype == torch.bool:
        return mask.logical_not() if true_means == "ignore" else mask
    if not mask.is_floating_point():
        raise InputError(f"{name} is {mask.dtype}; expected bool, or an additive mask of 0 and -inf")
    keep = mask == 0
    if not tracing() and not (keep | (mask <= IGNORED)).all():
        raise InputError(
            f"{name} holds values other than 0 and -inf, found up to {float(mask.abs().max()):g}; a polynomial mixer has no "
            "attention scores that a bias could be added to: give 0 (keep), -inf (ignore), or a bool mask"
        )
    return keep


def shared_by_heads(seen: Tensor, name: str) -> Tensor:
    """(B, H, T, N) -> (B, T, N), since a PoM aggregates once for all heads.

    Raises:
        InputError: the heads see different tokens, or, while tracing, it cannot be known that they do not.
    """
    if seen.shape[1] > 1:
        if tracing():
            raise InputError(f"{name} has a mask for each head; for export give one that all heads share")
        if not (seen == seen[:, :1]).all():
            raise InputError(f"{name} differs between heads; a polynomial mixer aggregates once for all of them")
    return seen[:, 0]


def is_triangle(seen: Tensor, padding: Tensor | None = None) -> bool:
    """Whether row t of (B or 1, T, N) admits exactly those of tokens 0..t that (B, N) padding admits. Values must be known."""
    if seen.shape[-2] != seen.shape[-1]:
        return False
    triangle = torch.ones_like(seen[0]).tril()
    return bool((seen == (triangle if padding is None else triangle & padding.unsqueeze(1))).all())


def rows_alike(seen: Tensor) -> bool:
    """Whether all queries of (B, T, N) see the same tokens. Values must be known."""
    return bool((seen == seen[:, :1]).all())


def drop_tokens(mask: Tensor | None, context: Tensor, probability: float) -> Tensor:
    """The counterpart of dropout on attention weights: each context token is left out of the mean with this probability.

    No rescaling is needed, since a PoM divides by the weights that are left.

    Args:
        mask: bool (B, N) or (B or 1, T, N), or None.
        context: (B, N, d).

    Returns:
        The mask without the dropped tokens.
    """
    kept = torch.rand(context.shape[:2], device=context.device) >= probability  # (B, N)
    if mask is None:
        return kept
    return mask & (kept if mask.ndim == 2 else kept.unsqueeze(1))
