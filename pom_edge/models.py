"""Reference models built from a config: image classifier, dense prediction, sequence encoder, causal language model.

Small on purpose: they are what the demos train, what our own checkpoints hold, and what the exporter is tested on. The
arguments of each ``forward`` are the input names of the exported graph; every mixer is found at ``blocks.I.mixer``.

Shapes: B batch, N tokens, d model width, (h, w) grid of patches, p patch size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.blocks import Block
from pom_edge.config import ModelConfig
from pom_edge.errors import InputError

EMBEDDING_STD = 0.02  # of fresh embeddings: with a tied head, PyTorch's 1.0 would start from huge logits

__all__ = ["Classifier", "DensePredictor", "Encoder", "LanguageModel", "ModelConfig", "build_model", "example_inputs"]


class _Stack(nn.Module):
    """The blocks and the final norm that all reference models share."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.mixers())
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)

    def mix(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, causal: bool = False) -> Tensor:
        """All blocks and the final norm, (B, N, d) -> (B, N, d)."""
        for block in self.blocks:
            x = block(x, mask=mask, positions=positions, causal=causal)
        return self.norm(x)  # type: ignore[no-any-return]


class Classifier(_Stack):
    """Image -> class logits: patch stem, blocks, mean over the patches, linear head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(_of_kind(config, "classifier"))
        assert config.image_size is not None and config.num_classes is not None  # noqa: PT018  # no test
        self.stem = PatchStem(config)
        patches = (config.image_size // self.stem.patch) ** 2
        self.pos_embed: nn.Parameter | None = None
        if config.rotary is None:
            self.pos_embed = nn.Parameter(torch.randn(1, patches, config.dim) * EMBEDDING_STD)
        self.head = nn.Linear(config.dim, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, image_size, image_size) -> logits (B, num_classes).

        Raises:
            InputError: images of another size or number of channels.
        """
        size = self.config.image_size
        if tuple(x.shape[1:]) != (self.config.channels, size, size):
            raise InputError(f"images have shape {tuple(x.shape)}; expected (batch, {self.config.channels}, {size}, {size})")
        tokens, (height, width) = self.stem(x)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed
        positions = grid_positions(height, width, x.device) if self.config.rotary == "2d" else None
        return self.head(self.mix(tokens, positions=positions).mean(1))  # type: ignore[no-any-return]


class DensePredictor(_Stack):
    """Image -> logits for each pixel: every patch token predicts its p x p pixels. Any multiple of the patch size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(_of_kind(config, "dense"))
        assert config.num_classes is not None
        self.stem = PatchStem(config)
        self.head = nn.Linear(config.dim, config.num_classes * self.stem.patch**2)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, h p, w p) -> logits (B, num_classes, h p, w p).

        Raises:
            InputError: another number of channels, or sides that are no multiples of the patch size.
        """
        patch, channels = self.stem.patch, self.config.channels
        sizes_known = not torch.compiler.is_compiling()  # else they are symbols, and a comparison would pin them
        if x.ndim != 4 or x.shape[1] != channels or (sizes_known and (x.shape[2] % patch or x.shape[3] % patch)):
            raise InputError(
                f"images have shape {tuple(x.shape)}; expected (batch, {channels}, height, width) with sides that are "
                f"multiples of {patch}"
            )
        tokens, (height, width) = self.stem(x)
        positions = grid_positions(height, width, x.device) if self.config.rotary == "2d" else None
        logits = self.head(self.mix(tokens, positions=positions))  # (B, h w, classes p p)
        return F.pixel_shuffle(logits.transpose(1, 2).unflatten(2, (height, width)), patch)


class Encoder(_Stack):
    """Features or token ids -> a vector for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(_of_kind(config, "encoder"))
        self.embed: nn.Module
        if config.vocab_size is not None:
            self.embed = _embedding(config.vocab_size, config.dim)
        else:
            assert config.input_dim
            self.embed = nn.Linear(config.input_dim, config.dim)
        self.pos_embed = _position_embedding(config)
        self.head = nn.Identity() if config.output_dim is None else nn.Linear(config.dim, config.output_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode.

        Args:
            x: features (B, N, input_dim), or int64 ids (B, N).
            mask: (B, N) of 0/1 or bool, 1 for real tokens; outputs at padded ones are to be ignored.

        Returns:
            (B, N, output_dim or d).
        """
        _check_sequence(self.config, x)
        return self.head(self.mix(_add_positions(self.embed(x), self.pos_embed), mask=mask))  # type: ignore[no-any-return]


class LanguageModel(_Stack):
    """Token ids -> next-token logits, causal. Without rotary or learned positions a PoM still sees order, through its
    running mean."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(_of_kind(config, "lm"))
        assert config.vocab_size
        self.embed = _embedding(config.vocab_size, config.dim)
        self.pos_embed = _position_embedding(config)
        # A tied head is the embedding itself, not a second parameter: safetensors holds no tensor twice.
        self.head = None if config.tied_head else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """int64 ids (B, N) -> logits (B, N, vocab_size)."""
        _check_sequence(self.config, x)
        y = self.mix(_add_positions(self.embed(x), self.pos_embed), causal=True)
        return F.linear(y, self.embed.weight if self.head is None else self.head.weight)


class PatchStem(nn.Module):
    """Image -> a token for each patch, row by row: (B, c, h p, w p) -> (B, h w, d) and the grid (h, w)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.channels is not None and config.patch_size is not None  # noqa: PT018  # no test
        self.patch = config.patch_size
        self.proj = nn.Conv2d(config.channels, config.dim, kernel_size=self.patch, stride=self.patch)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        patches = self.proj(x)  # (B, d, h, w)
        return patches.flatten(2).transpose(1, 2), (patches.shape[2], patches.shape[3])


def grid_positions(height: int, width: int, device: torch.device) -> Tensor:
    """Row and column of every patch, row by row: int64 (height * width, 2)."""
    index = torch.arange(height * width, device=device)
    return torch.stack((index // width, index % width), dim=-1)


def build_model(config: ModelConfig) -> nn.Module:
    """A freshly initialised model of the config's kind.

    Example:
        >>> config = ModelConfig("lm", dim=64, depth=2, vocab_size=256)
        >>> build_model(config)(torch.zeros(1, 8, dtype=torch.int64)).shape
        torch.Size([1, 8, 256])
    """
    models = {"classifier": Classifier, "dense": DensePredictor, "encoder": Encoder, "lm": LanguageModel}
    return models[config.kind](config)


def example_inputs(
    config: ModelConfig, batch: int = 2, tokens: int = 16, seed: int = 0, mask: bool = True
) -> dict[str, Tensor]:
    """Random inputs by name, for export and for tests.

    Args:
        config: of the model.
        batch: B.
        tokens: N of sequence models; image models take ``image_size`` (dense without one: 4 x 4 patches).
        seed: fixes the values.
        mask: encoder: give a padding mask too, float32, whose rows admit fewer and fewer tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    if config.kind in ("classifier", "dense"):
        size = config.image_size or 4 * (config.patch_size or 1)
        return {"x": torch.randn(batch, config.channels or 1, size, size, generator=generator)}
    if config.vocab_size is not None:
        x = torch.randint(config.vocab_size, (batch, tokens), generator=generator)
    else:
        x = torch.randn(batch, tokens, config.input_dim or 1, generator=generator)
    if config.kind == "lm" or not mask:
        return {"x": x}
    lengths = torch.arange(tokens, tokens - batch, -1).clamp(min=1)
    return {"x": x, "mask": (torch.arange(tokens) < lengths.unsqueeze(1)).to(torch.float32)}


def _of_kind(config: ModelConfig, kind: str) -> ModelConfig:
    if config.kind != kind:
        raise InputError(f"the config describes a model of kind {config.kind!r}, not {kind!r}; use build_model(config)")
    return config


def _embedding(count: int, dim: int) -> nn.Embedding:
    embed = nn.Embedding(count, dim)
    nn.init.normal_(embed.weight, std=EMBEDDING_STD)
    return embed


def _position_embedding(config: ModelConfig) -> nn.Embedding | None:
    return None if config.max_tokens is None else _embedding(config.max_tokens, config.dim)


def _add_positions(x: Tensor, pos_embed: nn.Embedding | None) -> Tensor:
    """(B, N, d) plus the first N learned positions."""
    if pos_embed is None:
        return x
    if not torch.compiler.is_compiling() and x.shape[1] > pos_embed.num_embeddings:
        raise InputError(f"found {x.shape[1]} tokens; the learned positions of this model end at {pos_embed.num_embeddings}")
    # Looked up, not sliced: a slice makes torch.export demand that every length the graph may see is within the table.
    return x + pos_embed(torch.arange(x.shape[1], device=x.device))  # type: ignore[no-any-return]


def _check_sequence(config: ModelConfig, x: Tensor) -> None:
    if config.vocab_size is not None:
        if x.ndim != 2 or x.is_floating_point():
            raise InputError(f"token ids are {x.dtype} of shape {tuple(x.shape)}; expected int64 (batch, tokens)")
    elif x.ndim != 3 or x.shape[-1] != config.input_dim:
        raise InputError(f"features have shape {tuple(x.shape)}; expected (batch, tokens, {config.input_dim})")
