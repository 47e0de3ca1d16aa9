"""The mixer evaluated the way the published code does it, written from the mathematics: the yardstick, not the product.

All powers, made by multiplication (as the published code does up to degree 4; ONNX Runtime's Pow takes several times as long),
are concatenated into a (B, N, D, k) tensor; the gated (B, N, D) tensor goes through the whole readout, and the
causal mean is a product with an (N, N) triangle. The clamp bounds are floats (with the published mix of float and int
torch's exporter refuses the model).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.export.lowering import replace_mixers
from pom_edge.mixer import Mixer, PoM

__all__ = ["PublishedForm", "published_encoder"]


class PublishedForm(nn.Module):
    """Shares the weights of a one-group PoM without rotary positions."""

    def __init__(self, mixer: PoM, causal: bool = False) -> None:
        super().__init__()
        self.qc_proj, self.ag_proj = mixer.qc_proj, mixer.ag_proj
        self.se_bias, self.po_coeff = mixer.se_bias, mixer.po_coeff
        self.hidden, self.degree, self.causal = mixer.hidden, mixer.degree, causal
        self.heads = mixer.n_sel_heads if mixer.n_sel_heads > 1 else mixer.hidden  # else a gate for each channel

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        both = self.qc_proj(x)
        a = F.leaky_relu(both[..., : self.hidden], 0.01).clamp(-0.1, 6.0).unsqueeze(-1)  # (B, N, D, 1)
        powers = [a]
        for _ in range(self.degree - 1):
            powers.append(powers[-1] * a)
        f = (torch.cat(powers, dim=-1) * self.po_coeff).sum(-1)  # of (B, N, D, k)
        if self.causal:
            triangle = torch.ones(x.shape[1], x.shape[1]).tril()
            h = torch.einsum("bnd,mn->bmd", f, triangle) / triangle.sum(-1).unsqueeze(-1)
        else:
            h = f.mean(1, keepdim=True)
        s = F.hardsigmoid(both[..., self.hidden :] + self.se_bias)
        gated = s.unsqueeze(-1) * h.unflatten(-1, (self.heads, -1))  # (B, N, H, D/H)
        return self.ag_proj(gated.flatten(-2))  # type: ignore[no-any-return]


class _InBlock(nn.Module):
    """Takes what a block of the reference models gives its mixer; without a mask and positions."""

    def __init__(self, form: PublishedForm) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, mask: None = None, positions: None = None, causal: bool = False) -> Tensor:
        assert mask is None
        assert positions is None
        assert not causal
        return self.form(x)  # type: ignore[no-any-return]


def published_encoder(model: nn.Module) -> nn.Module:
    """A copy of an encoder with the published form of every mixer."""

    def make(mixer: Mixer) -> nn.Module:
        assert isinstance(mixer, PoM)
        return _InBlock(PublishedForm(mixer))

    return replace_mixers(model, make)[0]
