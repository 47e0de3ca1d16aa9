"""A PoM in the place of nn.MultiheadAttention: as a layer of the same signature, and swapped into a whole model.

What changes: a PoM has no attention scores, so there are no weights to return and no biases to add to them; masks say which
tokens each query sees, nothing more. What cannot be honoured raises, nothing is ignored in silence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.masks import admitted, drop_tokens, is_triangle, shared_by_heads, tracing
from pom_edge.mixer import PoM

Skip = Callable[[str, nn.Module], bool]

TRANSFORMERS_MAJOR = 5

__all__ = ["MixerSettings", "PolynomialMixer", "replace_attention"]


@dataclass(frozen=True)
class MixerSettings:
    """The settings of the PoMs that take the place of attention; see :class:`pom_edge.mixer.PoM`."""

    degree: int = 3
    expand: int = 2
    n_sel_heads: int | None = None  # None: as many as the attention had heads
    n_groups: int = 1

    def build(self, dim: int, n_heads: int, bias: bool) -> PoM:
        """A fresh PoM for an attention of width ``dim`` with ``n_heads`` heads."""
        heads = n_heads if self.n_sel_heads is None else self.n_sel_heads
        return PoM(dim, self.degree, self.expand, n_groups=self.n_groups, n_sel_heads=heads, bias=bias)


class PolynomialMixer(nn.Module):
    """A PoM with the constructor and the forward of :class:`torch.nn.MultiheadAttention`.

    Args:
        embed_dim: model width d.
        num_heads: heads of the selection, unless ``n_sel_heads`` says otherwise; divides embed_dim. With 1, as everywhere
            in this package, each channel has a gate of its own.
        dropout: in training, the probability with which each context token is left out of the mean: what attention dropout
            does, once for all queries.
        bias: biases as in :class:`pom_edge.mixer.PoM`.
        add_bias_kv, add_zero_attn: must be False.
        kdim, vdim: must be None or embed_dim.
        batch_first: whether inputs are (B, T, d) rather than (T, B, d).
        device, dtype: of the parameters.
        degree, expand, n_sel_heads, n_groups: of the PoM.

    Raises:
        InputError: a setting that a polynomial mixer cannot honour.

    Example:
        >>> mixer = PolynomialMixer(64, 4, batch_first=True, degree=3)
        >>> y, _ = mixer(x, x, x, key_padding_mask=padding)
    """

    # What PyTorch's transformer layers look at before they take their fused path, which would compute an attention from
    # the weights found here: without a bias of the in-projection they call forward() (torch 2.13, nn/modules/transformer.py).
    in_proj_bias: Tensor | None = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        degree: int = 3,
        expand: int = 2,
        n_sel_heads: int | None = None,
        n_groups: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                raise InputError(f"{name} is True; a polynomial mixer has no keys and values to add to, expected False")
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width not in (None, embed_dim):
                raise InputError(
                    f"{name} is {width}, embed_dim {embed_dim}; a polynomial mixer takes context tokens of its own width: "
                    "project them first"
                )
        if num_heads < 1 or embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}")
        if not 0.0 <= dropout < 1.0:
            raise InputError(f"dropout is {dropout}; expected a probability in [0, 1)")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.kdim = self.vdim = embed_dim
        settings = MixerSettings(degree, expand, n_sel_heads, n_groups)
        self.pom = settings.build(embed_dim, num_heads, bias).to(device=device, dtype=dtype)

    @property
    def in_proj_weight(self) -> Tensor:
        """Read by nn.TransformerEncoder before it packs a padded batch; never computed with."""
        return self.pom.projection()[0]

    @property
    def out_proj(self) -> nn.Linear:
        """As :attr:`in_proj_weight`."""
        return self.pom.ag_proj

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,  # noqa: ARG002  # there are none: the second output is always None
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,  # noqa: ARG002
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Mix.

        Args:
            query: (B, T, d) or (T, B, d) by ``batch_first``, or unbatched (T, d).
            key: the context, (B, N, d), (N, B, d) or (N, d).
            value: must be ``key``, or equal to it: a PoM makes one feature of each context token.
            key_padding_mask: (B, N) or (N); bool, True ignores a token, or additive (0 keeps, -inf ignores).
            need_weights, average_attn_weights: accepted; a PoM has no weights, so None is returned in their place.
            attn_mask: (T, N) or (B * num_heads, T, N) with heads alike; bool, True ignores, or additive. The causal triangle
                is recognised by its values and mixed in linear time. Other masks cost a (B, T, N) weight.
            is_causal: mix causally, in linear time. Needs no mask; where one is given too, it must be the triangle, which
                is verified except while a graph is traced.

        Returns:
            The output, shaped as ``query``, and None. A query that sees no token gets the bias of the readout (attention
            would give NaN).

        Raises:
            InputError: nested tensors, shapes that do not fit, or a mask or value that a PoM cannot honour.
        """
        self._check_tokens(query, key, value)
        x, context = self._batch_major(query), self._batch_major(key)
        if key_padding_mask is not None:
            key_padding_mask = self._padding(key_padding_mask, query.ndim == 2, context)
        mask, causal = self._visible(attn_mask, key_padding_mask, is_causal, x, context)
        if self.training and self.dropout > 0:
            mask = drop_tokens(mask, context, self.dropout)
        y: Tensor = self.pom(x, context, mask=mask, causal=causal)
        if query.ndim == 2:
            return y.squeeze(0), None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _batch_major(self, tokens: Tensor) -> Tensor:
        """To (B, T, d)."""
        if tokens.ndim == 2:
            return tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)

    def _check_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise InputError(
                "the input is a nested tensor; a polynomial mixer takes padded tensors with key_padding_mask. Inside "
                "nn.TransformerEncoder call replace_attention on the whole encoder, or pass enable_nested_tensor=False"
            )
        if query.ndim not in (2, 3) or key.ndim != query.ndim:
            raise InputError(
                f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}; expected both (tokens, {self.embed_dim}) "
                f"or both batched"
            )
        if value is key:
            return
        if tracing():
            raise InputError("while a graph is traced, pass the same tensor as key and value: mixer(x, context, context)")
        if not torch.equal(key, value):
            raise InputError("key and value differ; a polynomial mixer makes one feature of each token: pass key twice")

    def _padding(self, mask: Tensor, unbatched: bool, context: Tensor) -> Tensor:
        """key_padding_mask -> (B, N), True for tokens that count."""
        keep = admitted(mask.unsqueeze(0) if unbatched else mask, "key_padding_mask", true_means="ignore")
        if keep.ndim != 2 or (not tracing() and keep.shape != context.shape[:2]):
            expected = tuple(context.shape[1:2] if unbatched else context.shape[:2])
            raise InputError(f"key_padding_mask has shape {tuple(mask.shape)}; expected {expected}")
        return keep

    def _visible(
        self, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, x: Tensor, context: Tensor
    ) -> tuple[Tensor | None, bool]:
        """The mask and the causal flag for the PoM."""
        if attn_mask is None or (is_causal and tracing()):
            return padding, is_causal
        seen = self._per_query(attn_mask, x, context)
        triangle = not tracing() and is_triangle(seen)
        if triangle:
            return padding, True
        if is_causal:
            raise InputError("is_causal is True, but attn_mask is not the causal triangle; give one or the other")
        return (seen if padding is None else seen & padding.unsqueeze(1)), False

    def _per_query(self, mask: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """attn_mask -> (B or 1, T, N), True where the query sees the token."""
        batch, queries, tokens = x.shape[0], x.shape[1], context.shape[1]
        allowed = ((queries, tokens), (batch * self.num_heads, queries, tokens))
        if mask.ndim not in (2, 3) or (not tracing() and tuple(mask.shape) not in allowed):
            raise InputError(f"attn_mask has shape {tuple(mask.shape)}; expected {allowed[0]} or {allowed[1]}")
        seen = admitted(mask, "attn_mask", true_means="ignore")
        if seen.ndim == 2:
            return seen.unsqueeze(0)
        return shared_by_heads(seen.reshape(batch, self.num_heads, *seen.shape[1:]), "attn_mask")


def replace_attention(
    model: nn.Module,
    degree: int = 3,
    expand: int = 2,
    n_sel_heads: int | None = None,
    *,
    n_groups: int = 1,
    skip: Skip | None = None,
) -> nn.Module:
    """Put an untrained PoM in the place of every attention of a model.

    Swaps nn.MultiheadAttention wherever it is found (nn.TransformerEncoder, -Decoder and nn.Transformer included; their
    fused inference path is switched off, so that eval computes what training does), and the attention of Hugging Face
    BERT, RoBERTa, ViT and DeiT models. Either all is swapped or, when something raises, nothing.

    Args:
        model: changed in place.
        degree, expand, n_sel_heads, n_groups: of the new PoMs; ``n_sel_heads=None`` keeps each attention's number of heads.
        skip: called with the path and the module of each attention; True leaves it, which makes a hybrid.

    Returns:
        The model.

    Raises:
        InputError: no attention was found, or one that a PoM cannot stand in for.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), num_layers=6)
        >>> replace_attention(encoder, degree=3, skip=lambda path, attention: path.startswith("layers.5."))
    """
    if _is_attention(model):
        raise InputError(
            f"the model is itself an attention ({type(model).__name__}), which cannot be swapped in place; "
            "make a PolynomialMixer instead"
        )
    settings = MixerSettings(degree, expand, n_sel_heads, n_groups)
    new: dict[nn.Module, nn.Module] = {}  # an attention that is used in two places becomes one mixer in two places
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for path, parent, name, child in _children(model):
        if not _is_attention(child) or (skip is not None and skip(path, child)):
            continue
        if child not in new:
            try:
                new[child] = _like(_replacement(child, settings), child)
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
        places.append((parent, name, child))
    if not places:
        raise InputError(
            f"found no attention to replace in {type(model).__name__}; expected a model that contains nn.MultiheadAttention, "
            "or the attention of a Hugging Face BERT or ViT"
        )
    for parent, name, attention in places:
        setattr(parent, name, new[attention])
        if _is_hugging_face(attention):
            _hugging_face().hand_on_padding(attention)
    _disable_nested_tensors(model)
    return model


def _children(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every place where a module is held: path, holder, name, module."""
    for prefix, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield f"{prefix}.{name}" if prefix else name, parent, name, child


def _is_hugging_face(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _hugging_face() -> ModuleType:
    """pom_edge.huggingface, which imports transformers: only for a model that was made with it."""
    version = importlib.import_module("transformers").__version__
    if int(version.split(".")[0]) < TRANSFORMERS_MAJOR:  # version 4 calls its attention layers with other arguments
        raise InputError(f"found transformers {version}; expected {TRANSFORMERS_MAJOR} or newer: pip install 'pom-edge[hf]'")
    return importlib.import_module("pom_edge.huggingface")


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    return _is_hugging_face(module) and bool(_hugging_face().is_attention(module))


def _replacement(attention: nn.Module, settings: MixerSettings) -> nn.Module:
    if isinstance(attention, nn.MultiheadAttention):
        return _from_multihead(attention, settings)
    mixer: nn.Module = _hugging_face().mixer_for(attention, settings)
    return mixer


def _from_multihead(attention: nn.MultiheadAttention, settings: MixerSettings) -> PolynomialMixer:
    if type(attention).forward is not nn.MultiheadAttention.forward:
        raise InputError(f"{type(attention).__name__} has a forward of its own, which is not known here; pass skip= to keep it")
    return PolynomialMixer(
        attention.embed_dim,
        attention.num_heads,
        dropout=attention.dropout,
        bias=attention.in_proj_bias is not None,
        add_bias_kv=attention.bias_k is not None,
        add_zero_attn=attention.add_zero_attn,
        kdim=attention.kdim,
        vdim=attention.vdim,
        batch_first=attention.batch_first,
        degree=settings.degree,
        expand=settings.expand,
        n_sel_heads=settings.n_sel_heads,
        n_groups=settings.n_groups,
    )


def _like(mixer: nn.Module, attention: nn.Module) -> nn.Module:
    """On the attention's device, in its dtype, training or not as it is."""
    weight = next(attention.parameters())
    return mixer.to(device=weight.device, dtype=weight.dtype).train(attention.training)


def _disable_nested_tensors(model: nn.Module) -> None:
    """nn.TransformerEncoder packs padded batches into nested tensors in eval mode, having looked at its first layer when it
    was built (torch 2.13); a PoM takes the padding mask instead."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, PolynomialMixer) for m in module.modules()):
            module.use_nested_tensor = False
            module.enable_nested_tensor = False
