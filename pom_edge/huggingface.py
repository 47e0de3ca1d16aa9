"""A PoM in the place of the attention of Hugging Face encoders: BERT, RoBERTa, ViT, DeiT. Tried with transformers 5.24.

Their models build a (B, 1, N, N) mask before the first layer. Here they are told that the attention is called
``pom_edge``, registered below with a mask function that hands the (B, N) padding on: nothing quadratic is made, in the
exported graph neither, and what the mask means is known even while a graph is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from pom_edge.attention import MixerSettings
from pom_edge.errors import InputError
from pom_edge.masks import admitted, drop_tokens, is_triangle, rows_alike, shared_by_heads, tracing
from pom_edge.mixer import PoM

IMPLEMENTATION = "pom_edge"  # of transformers' registry of attention functions

# Class -> whether it attends to another sequence. RoBERTa's and DeiT's classes are copies of BERT's and ViT's.
SUPPORTED = {
    "BertSelfAttention": False,
    "BertCrossAttention": True,
    "RobertaSelfAttention": False,
    "RobertaCrossAttention": True,
    "ViTAttention": False,
    "DeiTAttention": False,
}
# Arguments that the layers pass down and that change nothing here; any other that is set raises.
HARMLESS = frozenset({"position_ids", "output_hidden_states", "return_dict", "use_cache", "num_items_in_batch"})

__all__ = ["HuggingFaceMixer", "hand_on_padding", "is_attention", "mixer_for"]


class HuggingFaceMixer(nn.Module):
    """A PoM that is called as the attention layers of transformers are, and answers as they do.

    In BERT the layer keeps its own output projection behind this one; in ViT this one takes its place.

    Args:
        pom: the mixer.
        cross: whether it mixes in ``encoder_hidden_states``.
        causal: whether it is a decoder's self-attention.
        dropout: see :class:`pom_edge.attention.PolynomialMixer`.
    """

    def __init__(self, pom: PoM, cross: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.pom, self.cross, self.is_causal, self.dropout = pom, cross, causal, dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Mix hidden_states (B, T, d), or encoder_hidden_states (B, N, d) into them.

        Args:
            attention_mask: None; (B, N), nonzero for tokens that count; or (B, 1, 1 or T, N), bool (True keeps) or additive.

        Returns:
            The mixed states (B, T, d), and None in the place of attention weights.

        Raises:
            InputError: a mask, a cache or another argument that a PoM cannot honour.
        """
        _refuse_unknown(kwargs)
        context = encoder_hidden_states if self.cross else hidden_states
        if context is None:
            raise InputError("a cross-attention needs encoder_hidden_states, found None")
        mask, causal = self._visible(attention_mask, context.shape[0])
        if self.training and self.dropout > 0:
            mask = drop_tokens(mask, context, self.dropout)
        return self.pom(hidden_states, context, mask=mask, causal=causal), None

    def _visible(self, mask: Tensor | None, batch: int) -> tuple[Tensor | None, bool]:
        """The mask and the causal flag for the PoM. A 4-D mask says all there is to say, the causal pattern included."""
        if mask is None:
            return None, self.is_causal
        if mask.ndim == 2:
            return mask != 0, self.is_causal
        if mask.ndim != 4:
            raise InputError(f"attention_mask has shape {tuple(mask.shape)}; expected (B, N) or (B, 1, T, N)")
        seen = shared_by_heads(admitted(mask, "attention_mask", true_means="keep"), "attention_mask")  # (B, 1 or T, N)
        if tracing():
            return seen, False
        last = seen[:, -1]  # under a causal mask the last token sees all that are no padding
        if rows_alike(seen):
            return last.expand(batch, -1), False
        if is_triangle(seen, last):
            return last.expand(batch, -1), True
        return seen, False


def is_attention(module: nn.Module) -> bool:
    """Whether a module of transformers is an attention, and not merely the holder of one (as BertAttention is)."""
    inner = list(module.modules())[1:]
    return type(module).__name__.endswith("Attention") and not any(type(m).__name__.endswith("Attention") for m in inner)


def mixer_for(attention: nn.Module, settings: MixerSettings) -> HuggingFaceMixer:
    """A fresh mixer for an attention of transformers.

    Raises:
        InputError: it is of a kind that is not supported.
    """
    name = type(attention).__name__
    if name not in SUPPORTED:
        raise InputError(f"{name} is not supported; expected one of {', '.join(SUPPORTED)}, or skip= to keep it")
    config: Any = attention.config
    heads = config.num_attention_heads
    pom = settings.build(config.hidden_size, heads if config.hidden_size % heads == 0 else 1, bias=True)
    return HuggingFaceMixer(
        pom,
        cross=SUPPORTED[name],
        causal=bool(getattr(attention, "is_causal", False)),
        dropout=float(config.attention_probs_dropout_prob),
    )


def hand_on_padding(attention: nn.Module) -> None:
    """Make the model around a replaced attention pass (B, N) padding on, through the config that all its layers share."""
    config: Any = attention.config
    config._attn_implementation = IMPLEMENTATION


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    unknown = sorted(k for k, v in arguments.items() if k not in HARMLESS and v is not None and v is not False)
    if not unknown:
        return
    hint = "; pass use_cache=False: a cache holds keys and values" if "cache" in unknown else ""
    raise InputError(f"{', '.join(unknown)} cannot be honoured by a polynomial mixer{hint}")


def _padding_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """transformers' mask function of ``pom_edge``: the (B, N) padding as it is; causality is a property of the layer."""
    if mask_function not in (bidirectional_mask_function, causal_mask_function):
        raise InputError(
            "the model asks for a mask that is neither plain nor causal (sliding window, packed sequences); a polynomial "
            "mixer cannot honour it: pass attention_mask explicitly, or keep the attention with skip="
        )
    return attention_mask


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention function of ``pom_edge``: what the layers that were skipped compute, from (B, N) padding."""
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = (attention_mask != 0)[:, None, None, :]
        if getattr(module, "is_causal", False):
            triangle = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
            attention_mask = attention_mask & triangle
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output, None


AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)
AttentionInterface.register(IMPLEMENTATION, _attention)
