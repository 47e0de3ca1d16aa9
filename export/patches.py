"""The reference image models over patches that were cut before: what the streamed form cuts into passes.

The stem acts on one patch at a time, so outside of the graph the image becomes tokens (:mod:`pom_edge.runtimes.patches`):

    Conv2d(kernel p, stride p) of patch n  =  W x_n + b,   W (d, C, p, p) -> (d, C p p), x_n the patch in the same order
    pixel_shuffle                          =  the p x p pixels of token n, put where its patch was
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.bundle import ImageSpec
from pom_edge.export.inputs import TOKENS, Axes
from pom_edge.models import Classifier, DensePredictor, grid_positions

PATCHES, POSITIONS, PIXELS = "patches", "positions", "pixels"
HEIGHT, WIDTH = "height", "width"  # names of free axes

__all__ = ["HEIGHT", "WIDTH", "PatchModel", "count", "cut", "image_axes", "image_spec", "takes_images"]


def takes_images(model: nn.Module) -> bool:
    """Whether a model is one of the reference image models; a subclass may compute anything."""
    return type(model) in (Classifier, DensePredictor)


class PatchModel(nn.Module):
    """A reference image model whose input is its patches. Module paths are those of the model.

    Args:
        model: a Classifier or DensePredictor, lowered or not; its modules are shared.
    """

    def __init__(self, model: Classifier | DensePredictor) -> None:
        super().__init__()
        self.stem, self.blocks, self.norm, self.head = model.stem, model.blocks, model.norm, model.head
        self.pos_embed = getattr(model, "pos_embed", None)
        self._whole = [model]  # in a list: no part of the module

    def forward(self, patches: Tensor, positions: Tensor | None = None) -> Tensor:
        """Patches (B, h w, C p p), and rows and columns (h w, 2) for 2-D rotary -> logits (B, K), or pixels (B, h w, K p p)."""
        model = self._whole[0]
        tokens = F.linear(patches, self.stem.proj.weight.flatten(1), self.stem.proj.bias)
        if self.pos_embed is not None:
            index = torch.arange(patches.shape[1], device=patches.device)
            tokens = tokens + F.embedding(index, self.pos_embed.squeeze(0))
        mixed = model.mix(tokens, positions=positions)
        return self.head(mixed.mean(1) if isinstance(model, Classifier) else mixed)  # type: ignore[no-any-return]


def image_spec(model: Classifier | DensePredictor, name: str) -> ImageSpec:
    """How sessions cut the input ``name`` and put the output together."""
    positions = POSITIONS if model.config.rotary == "2d" else None
    pixels = {PIXELS: "y"} if isinstance(model, DensePredictor) else {}
    return ImageSpec(input=name, patch=model.stem.patch, patches=PATCHES, positions=positions, pixels=pixels)


def image_axes(model: Classifier | DensePredictor, image: Tensor, name: str) -> Axes:
    """Which axes of the image are free: height and width, where the model takes any."""
    free = isinstance(model, DensePredictor)
    return {name: [*image.shape[:2], HEIGHT, WIDTH] if free else list(image.shape)}


def count(model: nn.Module, image: Tensor) -> int:
    """How many patches an image (B, C, h p, w p) has for a reference image model."""
    assert isinstance(model, (Classifier, DensePredictor))
    return (image.shape[2] // model.stem.patch) * (image.shape[3] // model.stem.patch)


def cut(image: Tensor, spec: ImageSpec) -> tuple[dict[str, Tensor], Axes]:
    """The passes' inputs for an image, and their axes."""
    batch, channels, height, width = image.shape
    p = spec.patch
    patches = F.unfold(image, p, stride=p).transpose(1, 2)  # (B, h w, C p p)
    inputs, axes = {PATCHES: patches}, {PATCHES: [batch, TOKENS, channels * p * p]}
    if spec.positions is not None:
        inputs[POSITIONS] = grid_positions(height // p, width // p, image.device)
        axes[POSITIONS] = [TOKENS, 2]
    return inputs, axes  # type: ignore[return-value]  # a list of int | str, made in steps
