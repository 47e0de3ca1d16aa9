"""The blocks of the reference models: pre-norm, residual, with a PoM or an attention as the mixer.

    x <- x + mixer(norm1(x));  x <- x + ff(norm2(x)),  ff = Linear, GELU, Linear

Every mixer is called alike, ``mixer(x, mask=, positions=, causal=)``, so that hybrids need no branches.
Shapes: B batch, N tokens, d model width, H attention heads, e = d / H, w window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.config import ModelConfig
from pom_edge.mixer import PoM

# What a masked score gets: exp() of it is 0 in every precision, yet it fits FP16, where finfo.min becomes -inf
# (coremltools#2669) and -inf makes NaN of a row that sees nothing.
MASKED = -30000.0

__all__ = ["Attention", "Block", "FullAttention", "LocalAttention", "build_mixer"]


class Block(nn.Module):
    """One pre-norm block; ``kind`` is ``"pom"``, ``"full"`` or ``"local"``."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        hidden = config.ff_expand * config.dim
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mixer = build_mixer(config, kind)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.ff = nn.Sequential(nn.Linear(config.dim, hidden), nn.GELU(), nn.Linear(hidden, config.dim))

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, causal: bool = False) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        x = x + self.mixer(self.norm1(x), mask=mask, positions=positions, causal=causal)
        x = x + self.ff(self.norm2(x))
        return x


def build_mixer(config: ModelConfig, kind: str) -> nn.Module:
    """The mixer of one block."""
    if kind == "full":
        return FullAttention(config.dim, config.n_heads)
    if kind == "local":
        return LocalAttention(config.dim, config.n_heads, config.window)
    return PoM(
        config.dim,
        config.degree,
        config.expand,
        n_groups=config.n_groups,
        n_sel_heads=config.n_sel_heads,
        bias=config.bias,
        rotary=config.rotary,
        rotary_base=config.rotary_base,
    )


class Attention(nn.Module):
    """Multi-head self-attention; a subclass says which tokens see which (:meth:`attend`)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.dim, self.n_heads = dim, n_heads
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,  # noqa: ARG002  # only PoM blocks rotate, but every mixer is called alike
        causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            x: tokens, (B, N, d).
            mask: (B, N) of 0/1 or bool, 1 for tokens that may be seen. Weights count as 1. Where a token sees none, its
                output is meaningless but finite.
            positions: not used.
            causal: token t sees tokens 0..t only.

        Returns:
            (B, N, d).
        """
        qkv: Tensor = self.qkv_proj(x)
        qkv = qkv.reshape(*x.shape[:2], 3, self.n_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, N, e)
        y: Tensor = self.out_proj(self.attend(q, k, v, mask, causal).transpose(1, 2).flatten(2))
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q, k, v and the result are (B, H, N, e)."""
        raise NotImplementedError


class FullAttention(Attention):
    """Every token sees every other one: quadratic, and fused where PyTorch can."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        exporting = torch.compiler.is_exporting()
        if mask is None and not exporting:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        index = torch.arange(q.shape[2], device=q.device)
        seen = index[:, None] >= index if causal else None  # (N, N)
        if mask is not None:
            admitted = mask[:, None, None, :] > 0  # (B, 1, 1, N)
            seen = admitted if seen is None else admitted & seen
        bias = None if seen is None else score_bias(seen, q.dtype)
        if exporting:  # onnxscript 0.7.1 translates the fused operator into nodes of unknown shape, whose cost has no bound
            return attention(q, k, v, bias)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class LocalAttention(Attention):
    """Every token sees its neighbourhood, in memory linear in N.

    Queries come in blocks of w tokens; each block looks at its own keys and at those of the adjacent blocks.

    Args:
        dim, n_heads: d and H.
        window: tokens seen: the last ``window`` ones when causal, else those at most ``window // 2`` away.
    """

    def __init__(self, dim: int, n_heads: int, window: int) -> None:
        super().__init__(dim, n_heads)
        self.window = window

    def extra_repr(self) -> str:
        return f"window={self.window}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        tokens = q.shape[2]
        blocks = block_count(tokens, self.window)
        padding = blocks * self.window - tokens
        q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))  # (B, H, blocks w, e)
        q = q.reshape(*q.shape[:2], blocks, self.window, -1)
        k, v = (self._with_neighbours(t, blocks, causal) for t in (k, v))  # (B, H, blocks, c w, e), c = 2 or 3
        admitted = q.new_ones(1, tokens) if mask is None else (mask > 0).to(q.dtype)
        admitted = F.pad(admitted, (0, padding))[:, None, :, None]  # (B or 1, 1, blocks w, 1)
        admitted = self._with_neighbours(admitted, blocks, causal).transpose(-1, -2) > 0  # (.., blocks, 1, c w)
        seen = admitted & self.band(causal, q.device)  # (.., blocks, w, c w)
        y = attention(q, k, v, score_bias(seen, q.dtype))  # (B, H, blocks, w, e)
        return y.flatten(2, 3)[:, :, :tokens]

    def band(self, causal: bool, device: torch.device) -> Tensor:
        """Which key of the row of adjacent blocks (c w) each query of a block (w) sees, bool (w, c w)."""
        own = torch.arange(self.window, device=device)
        keys = torch.arange(-self.window, self.window if causal else 2 * self.window, device=device)
        distance: Tensor = own[:, None] - keys
        if causal:
            return (distance >= 0) & (distance < self.window)
        return distance.abs() <= self.window // 2

    def _with_neighbours(self, t: Tensor, blocks: int, causal: bool) -> Tensor:
        """(B, H, blocks w, e) -> (B, H, blocks, c w, e): previous, own and (not causal) next block; zeros outside."""
        shifts = (-1, 0) if causal else (-1, 0, 1)
        w, tokens = self.window, t.shape[2]
        padded = F.pad(t, (0, 0, w, w))  # (B, H, w + blocks w + w, e)
        rows = [padded[:, :, (1 + s) * w : (1 + s) * w + tokens] for s in shifts]
        return torch.cat([row.reshape(*row.shape[:2], blocks, w, -1) for row in rows], dim=3)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(e) + bias) v: q (.., T, e), k and v (.., N, e), bias broadcast to (.., T, N) -> (.., T, e)."""
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ v


def score_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores: 0 where ``seen`` (bool), else MASKED."""
    return (1.0 - seen.to(dtype)) * MASKED


def block_count(tokens: int, block: int) -> int:
    """Blocks that hold ``tokens``: exact for a number, one or two more for an export-time symbol.

    The rounded-up division of a symbol, and a count that may be one, make torch.export specialise (torch 2.13).
    """
    return -(-tokens // block) if isinstance(tokens, int) else tokens // block + 2
