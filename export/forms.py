"""What is traced for each form. This release has one: parallel, x -> y."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.mixer import CumulativePoM, PoM

LayerMask = Literal["none", "padding", "causal"]
LAYER_MASKS: tuple[LayerMask, ...] = ("none", "padding", "causal")
EXAMPLE_BATCH, EXAMPLE_TOKENS = 2, 24

__all__ = ["LAYER_MASKS", "LayerMask", "LayerModel", "layer_example", "layer_mask"]


class LayerModel(nn.Module):
    """A bare mixer as a model: a layer's checkpoint does not say how the model around it called the layer.

    Args:
        layer: the mixer.
        mask: ``"causal"`` makes the graph causal; a padding mask is an input and needs nothing here.
    """

    def __init__(self, layer: PoM | CumulativePoM, mask: LayerMask = "none") -> None:
        super().__init__()
        self.layer = layer
        self.causal = mask == "causal"

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`pom_edge.mixer.PoM.forward`, with the causal flag fixed."""
        return self.layer(  # type: ignore[no-any-return]
            x, context=context, mask=mask, positions=positions, context_positions=context_positions, causal=self.causal
        )


def layer_mask(text: str) -> LayerMask:
    """The kind of mask that ``--mask`` names.

    Raises:
        InputError: none of the known kinds.
    """
    for mask in LAYER_MASKS:
        if text == mask:
            return mask
    raise InputError(f"--mask is {text!r}; expected one of {', '.join(LAYER_MASKS)}")


def layer_example(layer: PoM | CumulativePoM, mask: LayerMask, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs for a bare layer: x, the padding mask if asked for, a grid of positions for 2-D rotary."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(EXAMPLE_BATCH, EXAMPLE_TOKENS, layer.dim, generator=generator)}
    if mask == "padding":
        lengths = torch.tensor([EXAMPLE_TOKENS, EXAMPLE_TOKENS // 2])
        inputs["mask"] = (torch.arange(EXAMPLE_TOKENS) < lengths.unsqueeze(-1)).float()
    if layer.rotary == "2d":
        index = torch.arange(EXAMPLE_TOKENS)
        inputs["positions"] = torch.stack((index // 6, index % 6), dim=-1)
    return inputs
