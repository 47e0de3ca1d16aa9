"""What a reference model is, as data: the one thing a checkpoint must carry beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from pom_edge.errors import InputError
from pom_edge.rotary import Rotary, check_rotary

Kind = Literal["classifier", "encoder", "dense", "lm"]

KINDS = ("classifier", "encoder", "dense", "lm")
BLOCKS = ("pom", "full", "local")
POSITIONS = ("none", "learned")

# For each kind of model the settings it must have, and those it may have beside the ones every kind shares.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "classifier": ("image_size", "patch_size", "channels", "num_classes"),
    "dense": ("patch_size", "channels", "num_classes"),
    "encoder": (),
    "lm": ("vocab_size",),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "classifier": (),
    "dense": ("image_size",),
    "encoder": ("input_dim", "vocab_size", "output_dim", "positions", "max_tokens"),
    "lm": ("tied_head", "positions", "max_tokens"),
}
_SPECIFIC = {name for table in (_REQUIRED, _OPTIONAL) for names in table.values() for name in names}
_COUNTS = ("dim", "depth", "degree", "expand", "n_groups", "ff_expand", "n_heads", "window")
_OPTIONAL_COUNTS = (
    "image_size",
    "patch_size",
    "channels",
    "num_classes",
    "input_dim",
    "vocab_size",
    "output_dim",
    "max_tokens",
)

__all__ = ["BLOCKS", "KINDS", "POSITIONS", "Kind", "ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Settings of a reference model.

    Args:
        kind: ``"classifier"`` (image -> class logits), ``"dense"`` (image -> logits for each pixel), ``"encoder"``
            (features or tokens -> a vector for each token), ``"lm"`` (token ids -> next-token logits, causal).
        dim: model width d.
        depth: number of blocks.
        degree, expand, n_groups, n_sel_heads, bias, rotary, rotary_base: as in :class:`pom_edge.mixer.PoM`. ``"2d"``
            rotary is for images only.
        ff_expand: hidden width of the feed-forward, in units of dim.
        norm_eps: epsilon of every LayerNorm.
        blocks: the mixer of each block, ``"pom"``, ``"full"`` (self-attention) or ``"local"`` (self-attention within a
            window); None means ``"pom"`` everywhere. Attention blocks are not rotated: in a hybrid their sense of order
            comes from ``positions="learned"`` and from the PoM blocks before them.
        n_heads: heads of the attention blocks.
        window: tokens that a local block sees: when causal the last ``window`` ones, the token itself included, else
            those at most ``window // 2`` away.
        image_size: height and width in pixels. A classifier takes this size only; for dense prediction it is merely the
            size of :func:`pom_edge.models.example_inputs`, any multiple of ``patch_size`` will do.
        patch_size, channels, num_classes: of the image models.
        input_dim: encoder: width of the input features; give this or ``vocab_size``.
        vocab_size: token ids are 0..vocab_size-1.
        output_dim: encoder: width of the output; None leaves it at dim.
        tied_head: lm: the embedding is also the output projection.
        positions: encoder and lm: ``"learned"`` adds an embedding for each of ``max_tokens`` positions. (A classifier
            without rotary always has one for each patch, since a PoM by itself does not see the order of its tokens.)
        max_tokens: the longest sequence that learned positions cover.

    Raises:
        InputError: a value out of range, settings that cannot be combined or do not belong to this kind of model.

    Example:
        >>> ModelConfig("classifier", dim=64, depth=4, image_size=28, patch_size=4, channels=1, num_classes=10)
    """

    kind: Kind
    dim: int
    depth: int
    degree: int = 3
    expand: int = 2
    n_groups: int = 1
    n_sel_heads: int = 1
    bias: bool = False
    ff_expand: int = 4
    rotary: Rotary | None = None
    rotary_base: float = 10000.0
    norm_eps: float = 1e-5
    blocks: tuple[str, ...] | None = None
    n_heads: int = 4
    window: int = 128
    image_size: int | None = None
    patch_size: int | None = None
    channels: int | None = None
    num_classes: int | None = None
    input_dim: int | None = None
    vocab_size: int | None = None
    output_dim: int | None = None
    tied_head: bool = False
    positions: str = "none"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))  # a list, as JSON has it, would not be hashable
        _check_choice("kind", self.kind, KINDS)
        _check_choice("positions", self.positions, POSITIONS)
        self._check_numbers()
        self._check_kind()
        self._check_blocks()
        self._check_positions()

    def mixers(self) -> tuple[str, ...]:
        """The mixer kind of each block."""
        return self.blocks or ("pom",) * self.depth

    def to_dict(self) -> dict[str, Any]:
        """Every setting, in types that JSON knows; the inverse of :meth:`from_dict`."""
        settings = asdict(self)
        settings["blocks"] = None if self.blocks is None else list(self.blocks)
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """Read a config back.

        Raises:
            InputError: a setting is unknown, missing or invalid.
        """
        if not isinstance(settings, Mapping):
            raise InputError(f"the model config is a {type(settings).__name__}; expected a mapping of settings")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in settings if name not in known)
        if unknown:
            raise InputError(
                f"the model config has unknown settings {', '.join(unknown)}; this release knows "
                f"{', '.join(sorted(known))}. Was it written by a newer release? Then update pom-edge"
            )
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in settings]
        if missing:
            raise InputError(f"the model config lacks {', '.join(missing)}")
        return cls(**settings)

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if not isinstance(self.n_sel_heads, int):
            raise InputError(f"n_sel_heads is {self.n_sel_heads!r}; expected a whole number (1: a gate for each channel)")
        for name in ("bias", "tied_head"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}; expected True or False")
        for name in ("norm_eps", "rotary_base"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise InputError(f"{name} is {value!r}; expected a positive number")
        if self.dim % self.n_groups:
            raise InputError(f"dim {self.dim} is not divisible by n_groups {self.n_groups}")
        hidden = self.dim * self.expand
        if self.n_sel_heads > 1 and hidden % self.n_sel_heads:
            raise InputError(f"dim * expand = {hidden} is not divisible by n_sel_heads {self.n_sel_heads}")

    def _check_kind(self) -> None:
        missing = [name for name in _REQUIRED[self.kind] if getattr(self, name) is None]
        if missing:
            raise InputError(f"a model of kind {self.kind!r} needs {', '.join(missing)}")
        defaults = {field.name: field.default for field in fields(self)}
        allowed = _REQUIRED[self.kind] + _OPTIONAL[self.kind]
        foreign = sorted(n for n in _SPECIFIC if n not in allowed and getattr(self, n) != defaults[n])
        if foreign:
            raise InputError(f"{', '.join(foreign)} has no meaning for a model of kind {self.kind!r}; leave it out")
        if self.kind == "encoder" and (self.input_dim is None) == (self.vocab_size is None):
            raise InputError("an encoder needs either input_dim (features) or vocab_size (token ids), and not both")
        if self.image_size is not None and self.patch_size is not None and self.image_size % self.patch_size:
            raise InputError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")

    def _check_blocks(self) -> None:
        if self.blocks is None:
            return
        for name in self.blocks:
            _check_choice("a block", name, BLOCKS)
        if len(self.blocks) != self.depth:
            raise InputError(f"blocks names {len(self.blocks)} mixers, but depth is {self.depth}; expected one for each block")
        if set(self.blocks) != {"pom"} and self.dim % self.n_heads:
            raise InputError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}, which attention blocks need")

    def _check_positions(self) -> None:
        if self.rotary is not None:
            check_rotary(self.rotary, self.dim * self.expand, self.n_sel_heads)
        if self.rotary == "2d" and self.kind not in ("classifier", "dense"):
            raise InputError(f"rotary '2d' needs a grid of patches; a model of kind {self.kind!r} takes None or '1d'")
        if (self.positions == "learned") != (self.max_tokens is not None):
            raise InputError(
                f"positions is {self.positions!r} and max_tokens is {self.max_tokens}; learned positions need "
                "max_tokens, "
                "and nothing else takes it"
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; expected a whole number, at least 1")
