"""A stand-in for the published PoM and PoMRoPE classes: their constructor, attributes and forward arguments, written from the
mathematics. What a user's own repository contains, and what pom_edge.recognise must find there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PoM(nn.Module):
    """The published layer without rotary positions."""

    ceiling = 6.0  # written into the published function, out of sight of whoever reads the tensors

    def __init__(self, dim: int, degree: int, expand: int, n_groups: int, n_sel_heads: int, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.order, self.order_expand = dim, degree, expand
        self.n_groups, self.n_sel_heads = n_groups, n_sel_heads
        self.hidden = hidden = dim * expand
        gates = n_sel_heads if n_sel_heads > 1 else hidden
        if n_groups > 1:
            self.po_proj = nn.Conv1d(dim, hidden, 1, bias=bias, groups=n_groups)
            self.se_proj = nn.Linear(dim, gates)
        else:
            self.qc_proj = nn.Linear(dim, hidden + gates, bias=False)
            self.se_bias = nn.Parameter(torch.zeros(gates))
        self.po_coeff = nn.Parameter(torch.randn(hidden, degree).clamp(-0.001, 0.001))
        self.ag_proj = nn.Linear(hidden, dim, bias=bias)

    def features(self, xc: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, D), every power a tensor of its own."""
        if self.n_groups > 1:
            p = self.po_proj(xc.transpose(1, 2)).transpose(1, 2)
        else:
            p = F.linear(xc, self.qc_proj.weight[: self.hidden])
        a = torch.clamp(F.leaky_relu(p, 0.01), -0.1, self.ceiling)
        powers = torch.stack([a**k for k in range(1, self.order + 1)], dim=-1)
        return (powers * self.po_coeff).sum(-1)

    def gate(self, xq: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, H or D)."""
        if self.n_groups > 1:
            return F.hardsigmoid(self.se_proj(xq))
        return F.hardsigmoid(F.linear(xq, self.qc_proj.weight[self.hidden :]) + self.se_bias)

    def mean(self, f: Tensor, mask: object) -> Tensor:
        """The published dispatch, an (N, N) triangle included."""
        if mask is None:
            return f.mean(1, keepdim=True)
        if isinstance(mask, str):
            weights = torch.ones(f.shape[1], f.shape[1]).tril().unsqueeze(0)
        else:
            assert isinstance(mask, Tensor)
            weights = mask.to(f.dtype).unsqueeze(1) if mask.ndim == 2 else mask.to(f.dtype)
        return (weights @ f) / weights.sum(-1, keepdim=True)

    def select(self, s: Tensor, h: Tensor) -> Tensor:
        """Gate and read out."""
        if self.n_sel_heads > 1:
            s = s.repeat_interleave(self.hidden // self.n_sel_heads, -1)
        return self.ag_proj(s * h)  # type: ignore[no-any-return]

    def forward(self, xq: Tensor, xc: Tensor | None = None, mask: object = None) -> Tensor:
        return self.select(self.gate(xq), self.mean(self.features(xq if xc is None else xc), mask))


class PoMRoPE(PoM):
    """The published layer with rotary positions read from tables."""

    def __init__(
        self,
        dim: int,
        degree: int,
        expand: int,
        n_groups: int,
        n_sel_heads: int,
        bias: bool = False,
        max_seq_len: int = 64,
        max_h: int = 8,
        max_w: int = 8,
        rope_base: float = 10000.0,
        rope_2d: bool = False,
    ) -> None:
        super().__init__(dim, degree, expand, n_groups, n_sel_heads, bias)
        self.rope_2d = rope_2d
        q = self.hidden // (4 if rope_2d else 2)
        theta = rope_base ** (-torch.arange(q, dtype=torch.float32) / q)
        axes = {"row": max_h, "col": max_w} if rope_2d else {"freqs": max_seq_len}
        for axis, length in axes.items():
            angles = torch.outer(torch.arange(length, dtype=torch.float32), theta)
            self.register_buffer(f"{axis}_cos", angles.cos())
            self.register_buffer(f"{axis}_sin", angles.sin())

    def turn(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Rotate (B, N, C): one block of pairs (1-D), or a row and a column block (2-D)."""
        if positions is None:
            positions = torch.arange(x.shape[1])
        if not self.rope_2d:
            return self._pairs(x, "freqs", positions)
        rows, columns = x.chunk(2, -1)
        return torch.cat((self._pairs(rows, "row", positions[:, 0]), self._pairs(columns, "col", positions[:, 1])), -1)

    def _pairs(self, x: Tensor, axis: str, index: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        cos, sin = getattr(self, f"{axis}_cos")[index], getattr(self, f"{axis}_sin")[index]
        if cos.shape[-1] != width:  # the gate of H heads takes a strided choice of the columns
            head = self.hidden // self.n_sel_heads
            stride = head if self.rope_2d else head // 2
            cos, sin = cos[:, ::stride][:, :width], sin[:, ::stride][:, :width]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def forward(  # type: ignore[override]
        self,
        xq: Tensor,
        xc: Tensor | None = None,
        mask: object = None,
        positions: Tensor | None = None,
        ctx_positions: Tensor | None = None,
        positions_hw: Tensor | None = None,
        ctx_positions_hw: Tensor | None = None,
    ) -> Tensor:
        own = positions_hw if self.rope_2d else positions
        other = ctx_positions_hw if self.rope_2d else ctx_positions
        if other is None and (xc is None or xc is xq):
            other = own
        f = self.turn(self.features(xq if xc is None else xc), other)
        return self.select(self.turn(self.gate(xq), own), self.mean(f, mask))


class PoMRoPEOfSD35(PoMRoPE):
    """The copy that SD3.5 was distilled with: another bound on the activation, and nothing else."""

    ceiling = 1.0


class ComPoM(nn.Module):
    """The mixer before projections were fused: ``year`` 2026 computes what the current one does, 2025 does not."""

    def __init__(
        self, dim: int, degree: int, expand: int, n_groups: int, n_sel_heads: int, bias: bool = False, year: int = 2025
    ) -> None:
        super().__init__()
        self.dim, self.order, self.order_expand = dim, degree, expand
        self.n_groups, self.n_sel_heads, self.year = n_groups, n_sel_heads, year
        hidden = dim * expand
        conv = n_groups > 1
        self.po_proj = nn.Conv1d(dim, hidden, 1, bias=bias, groups=n_groups) if conv else nn.Linear(dim, hidden, bias=bias)
        self.po_coeff = nn.Parameter((2 * torch.randn(hidden, degree)).clamp(-2, 2))
        gates = n_sel_heads if year == 2025 or n_sel_heads > 1 else hidden
        self.se_proj = nn.Linear(dim, gates, bias=bias or year == 2026)
        self.ag_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, xq: Tensor, xc: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        xc = xq if xc is None else xc
        p = self.po_proj(xc.transpose(1, 2)).transpose(1, 2) if self.n_groups > 1 else self.po_proj(xc)
        a = F.leaky_relu(p, 0.01)
        first = 1
        if self.year == 2026:
            a, s = a.clamp(-0.1, 6.0), F.hardsigmoid(self.se_proj(xq))
        else:
            first, s = 1 if self.order in (2, 3, 4) else 0, torch.sigmoid(self.se_proj(xq))
        f = (torch.stack([a ** (k + first) for k in range(self.order)], dim=-1) * self.po_coeff).sum(-1)
        weights = torch.ones_like(f[..., 0]) if mask is None else mask.to(f.dtype)
        weights = weights.unsqueeze(1) if weights.ndim == 2 else weights  # (B, 1 or T, N)
        h = (weights @ f) / (1e-7 + weights.sum(-1, keepdim=True))
        return self.ag_proj(s.repeat_interleave(h.shape[-1] // s.shape[-1], -1) * h)  # type: ignore[no-any-return]
