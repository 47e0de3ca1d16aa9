"""From a drawn or recorded case (numpy) to our module and its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pom_edge.mixer import PoM, PoMState
from tests.oracle import Case

SNR_DB = 100.0  # FP32 against float64; FP32 rounding alone leaves 130 to 145 dB

__all__ = ["SNR_DB", "answer", "build", "lively", "stream", "tensors"]


def build(case: Case) -> PoM:
    """The module of a case with its parameters, in eval mode."""
    layer = PoM(**case.config)
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in case.params.items()})
    return layer.eval()


def tensors(case: Case) -> dict[str, Tensor]:
    """The inputs of a case by argument name."""
    return {name: torch.from_numpy(value) for name, value in case.inputs.items()}


@torch.no_grad()
def answer(case: Case) -> NDArray[Any]:
    """Our module's y for a case, in FP32."""
    return build(case)(**tensors(case), causal=case.causal).numpy()  # type: ignore[no-any-return]


@torch.no_grad()
def stream(
    layer: PoM,
    x: Tensor,
    chunks: Iterable[int],
    causal: bool = True,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    state: PoMState | None = None,
) -> tuple[Tensor, PoMState]:
    """Feed x (B, T, d) to ``step`` in chunks of the given lengths: y (B, T, d) and the last state."""
    pieces, start = [], 0
    for length in chunks:
        part = slice(start, start + length)
        start += length
        y, state = layer.step(
            x[:, part],
            state,
            causal=causal,
            mask=None if mask is None else mask[:, part],
            positions=None if positions is None else positions[part],
        )
        pieces.append(y)
    assert state is not None and start == x.shape[1], "the chunks must cover x"
    return torch.cat(pieces, 1), state


def lively(layer: PoM, seed: int = 0) -> PoM:
    """Redraw the coefficients and the gate's bias, so that every power and every branch of the gate matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        powers = torch.arange(layer.degree) + layer.first_power
        layer.po_coeff.copy_(torch.randn(layer.po_coeff.shape, generator=generator) / 3.0**powers)
        _, bias = layer.selection_projection()
        bias.copy_(torch.randn(bias.shape, generator=generator))
    return layer.eval()
