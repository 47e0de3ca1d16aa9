"""The recurrent form: (chunk, state) -> (outputs, next state), for models whose tokens interact only through causal mixers.

A causal mean needs nothing of the past but the mean itself. In deviations from it, which stay small (pom.md: a running sum
overflows FP16 after 20,000 tokens, and a mean updated by itself drifts):

    h_t = h + (sum_{i<=t} (f_i - h)) / (n + t),   n tokens seen before, t = 1..T
    a frame (block-causal): every token of the chunk gets h_T

h is kept as an unevaluated sum of two FP32 tensors, n in int64. A causal attention with a window of w tokens needs the keys
and values of the last w tokens. Everything else acts on one token at a time and is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.blocks import FullAttention, LocalAttention, attention, score_bias
from pom_edge.errors import InputError
from pom_edge.export.lowering import LoweredMixer, lower, running_sum
from pom_edge.export.reference import named_outputs
from pom_edge.mixer import Mask, two_sum
from pom_edge.models import Encoder, LanguageModel

STATE, NEXT, COUNT = "state.", "next.", "state.count"
# Tokens in a block of the running sum: a single token pays for two blocks, so they are smaller than in the parallel form.
STEP_BLOCK = 16

__all__ = ["COUNT", "NEXT", "STATE", "RecurrentModel", "make_recurrent"]


@dataclass
class Flow:
    """What the mixers of one step share: tokens seen before, which tokens of the chunk are real, states in and out.

    Attributes:
        frames: mixers that see all tokens see those of the chunk and of the past.
        count: (B,) int64, tokens seen before this chunk.
        admitted: (B, T) float 0/1, or None where all tokens are real.
        states: one dict of tensors for each call of a stateful layer, in order; missing ones start from zero.
        next_states: the same after the chunk.
        tokens: T, once a layer has said how long the chunk is.
    """

    frames: bool = False
    count: Tensor | None = None
    admitted: Tensor | None = None
    states: Sequence[dict[str, Tensor]] = ()
    next_states: list[dict[str, Tensor]] = field(default_factory=list)
    _seen: Tensor | None = None

    def begin(self, count: Tensor | None, admitted: Tensor | None, states: Sequence[dict[str, Tensor]]) -> None:
        """Start a step."""
        self.count, self.admitted, self.states = count, admitted, states
        self.next_states, self._seen = [], None

    def state(self, x: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The state of the layer that is running now; shapes are without the batch."""
        index = len(self.next_states)
        if index < len(self.states):
            return self.states[index]
        return {name: x.new_zeros(x.shape[0], *shape) for name, shape in shapes.items()}

    def seen(self, x: Tensor) -> Tensor:
        """(B, T) int64: how many tokens the stream has had up to and including each token of the chunk x (B, T, d)."""
        if self._seen is None:
            count = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if self.count is None else self.count
            if self.admitted is None:
                steps = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(0)  # (1, T)
            else:
                steps = running_sum(self.admitted.unsqueeze(1), STEP_BLOCK).squeeze(1).to(torch.int64)
            self._seen = count.unsqueeze(1) + steps
        return self._seen

    def positions(self, x: Tensor) -> Tensor:
        """(B, T) int64: the position of each token of the chunk; a padded token has that of the next real one."""
        seen = self.seen(x)
        return seen - (1 if self.admitted is None else self.admitted.to(torch.int64))

    def next_count(self) -> Tensor:
        """(B,) int64."""
        assert self._seen is not None
        return self._seen[:, -1]


class RunningMean(nn.Module):
    """The mean of all tokens so far, from the state's and the features of a chunk. Stays in FP32 by its name, see
    :class:`pom_edge.export.lowering.Aggregate`."""

    def forward(
        self, f: Tensor, mean: Tensor, mean_low: Tensor, weights: Tensor | None, seen: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """f (B, D, T), state (B, 1, D) twice, weights (B, T), seen (B, T) -> h (B, D, 1 or T) and the next state."""
        mean, low = mean.transpose(1, 2), mean_low.transpose(1, 2)  # (B, D, 1)
        deviation = f - mean - low  # (B, D, T)
        if weights is not None:
            deviation = deviation * weights.unsqueeze(1)
        count = seen.clamp(min=1).to(deviation.dtype).unsqueeze(1)  # (B, 1, T)
        total = running_sum(deviation, STEP_BLOCK) if causal else deviation.sum(-1, keepdim=True)
        shift = total / (count if causal else count[..., -1:]) + low
        new_mean, new_low = two_sum(mean, shift[..., -1:])
        return mean + shift, new_mean.transpose(1, 2), new_low.transpose(1, 2)


class SteppedMixer(nn.Module):
    """A lowered mixer that goes on from a state."""

    def __init__(self, lowered: LoweredMixer, flow: Flow) -> None:
        super().__init__()
        self.lowered = lowered
        self.pom_mean = RunningMean()
        self.flow = [flow]  # in a list: no part of the module

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """As :meth:`pom_edge.mixer.Mixer.forward`, for a chunk.

        Raises:
            InputError: the layer mixes in a way that needs more of the past than a mean.
        """
        flow = self.flow[0]
        if isinstance(mask, str):
            mask, causal = None, True
        if context is not None and context is not x:
            raise InputError("a mixer with a context of its own has no recurrent form: its context is not a stream")
        if mask is not None and mask.ndim == 3:
            raise InputError("a mixer with a mask for each query has no recurrent form; use causal mixing")
        if not causal and not flow.frames:
            raise InputError(
                "a mixer of this model sees all tokens, later ones too, which no stream can give it. The recurrent form is for "
                "causal models (published layers: --mask causal); where each chunk is a frame that sees itself and the past, "
                "say --mask frames; other models have the parallel and the streamed form"
            )
        if context_positions is not None and context_positions is not positions:
            raise InputError("a mixer whose context has other positions than its queries has no recurrent form")
        counted = positions is None and getattr(self.lowered, "pom_angles", None) is not None
        turn = self.lowered.angles(flow.positions(x).unsqueeze(-1) if counted else positions, x, nonnegative=counted)
        state = flow.state(x, {"mean": (1, self.lowered.hidden), "mean_low": (1, self.lowered.hidden)})
        weights = flow.admitted
        if mask is not None:
            weights = mask.to(x.dtype) if weights is None else weights * mask
        features, seen = self.lowered.features(x, turn), flow.seen(x)
        h, mean, low = self.pom_mean(features, state["mean"], state["mean_low"], weights, seen, causal)
        flow.next_states.append({"mean": mean, "mean_low": low})
        return self.lowered.biased(self.lowered.readout(x, turn, h, pooled=not causal))


class SteppedLocalAttention(nn.Module):
    """A causal :class:`LocalAttention` that remembers the keys and values of its last ``window`` tokens.

    Queries come in small blocks of c; each block looks at the w keys before it and at its own.
    """

    def __init__(self, layer: LocalAttention, flow: Flow) -> None:
        super().__init__()
        self.layer = layer
        self.flow = [flow]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,  # noqa: ARG002  # as the layer itself: not used
        causal: bool = False,
    ) -> Tensor:
        """As :meth:`pom_edge.blocks.Attention.forward`, for a chunk.

        Raises:
            InputError: not causal.
        """
        flow, layer, w = self.flow[0], self.layer, self.layer.window
        if not causal:
            raise InputError("an attention of this model sees later tokens too, which no stream can give it: no recurrent form")
        state = flow.state(x, {"keys": (w, layer.dim), "values": (w, layer.dim)})
        q, k, v = layer.qkv_proj(x).chunk(3, dim=-1)  # each (B, T, d)
        k, v = (torch.cat((state[name], new), 1) for name, new in (("keys", k), ("values", v)))  # (B, w + T, d)
        own = torch.ones_like(x[..., 0]) if flow.admitted is None else flow.admitted  # (B, T)
        if mask is not None:
            own = own * (mask > 0).to(own.dtype)
        before = flow.positions(x)[:, :1] + torch.arange(-w, 0, device=x.device)  # (B, w): positions of the remembered keys
        admitted = torch.cat(((before >= 0).to(own.dtype), own), 1)  # (B, w + T)
        y = self._attend(q, k, v, admitted)
        flow.next_states.append({"keys": self._last(k, flow), "values": self._last(v, flow)})
        return layer.out_proj(y)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, admitted: Tensor) -> Tensor:
        """q (B, T, d), k and v (B, w + T, d), admitted (B, w + T) -> (B, T, d)."""
        w, heads, tokens = self.layer.window, self.layer.n_heads, q.shape[1]
        c = min(STEP_BLOCK, w)
        back = -(-w // c)  # blocks of c that hold the window
        blocks = -(-tokens // c) if isinstance(tokens, int) else tokens // c + 2  # see lowering._block_count
        after = blocks * c - tokens
        q = F.pad(q, (0, 0, 0, after)).unflatten(1, (blocks, c)).unflatten(-1, (heads, -1)).transpose(2, 3)  # (B, b, H, c, e)
        k, v, seen = (
            F.pad(t, (0, 0, back * c - w, after)) for t in (k, v, admitted.unsqueeze(-1))
        )  # (B, (back + blocks) c, ..)
        k, v = (self._windows(t, back, blocks, c).unflatten(-1, (heads, -1)).transpose(2, 3) for t in (k, v))
        seen = self._windows(seen, back, blocks, c).transpose(-1, -2) > 0  # (B, b, 1, (back + 1) c)
        row = torch.arange(c, device=q.device)[:, None] + back * c
        distance = row - torch.arange((back + 1) * c, device=q.device)  # (c, (back + 1) c): how far back each key lies
        near = (distance >= 0) & (distance < w)
        bias = score_bias((seen & near).unsqueeze(2), q.dtype)  # (B, b, 1, c, (back + 1) c)
        return attention(q, k, v, bias).transpose(2, 3).flatten(-2).flatten(1, 2)[:, :tokens]

    @staticmethod
    def _windows(t: Tensor, back: int, blocks: int, c: int) -> Tensor:
        """(B, (back + blocks) c, e) -> (B, blocks, (back + 1) c, e): each block with those before it."""
        rows = [t[:, i * c : i * c + blocks * c].unflatten(1, (blocks, c)) for i in range(back + 1)]
        return torch.cat(rows, dim=2)

    def _last(self, t: Tensor, flow: Flow) -> Tensor:
        """The last ``window`` real tokens of (B, w + T, d); real tokens lead in each row."""
        w = self.layer.window
        if flow.admitted is None:
            return t[:, -w:]
        index = flow.admitted.sum(1).to(torch.int64).unsqueeze(1) + torch.arange(w, device=t.device)  # (B, w)
        return t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[-1]))


class SteppedPositions(nn.Module):
    """A table of learned positions that counts on from the tokens seen."""

    def __init__(self, table: nn.Embedding, flow: Flow) -> None:
        super().__init__()
        self.table = table
        self.flow = [flow]

    @property
    def num_embeddings(self) -> int:
        """Of the table."""
        return self.table.num_embeddings

    def forward(self, index: Tensor) -> Tensor:
        """Positions (T,) of the chunk -> (B, T, d)."""
        count = self.flow[0].count
        return self.table(index if count is None else index + count.unsqueeze(1))  # type: ignore[no-any-return]


class RecurrentModel(nn.Module):
    """A model that takes its inputs for one chunk and the state by name, and returns its outputs and the next state.

    Args:
        model: lowered, with stepped layers.
        flow: what those share.
        ragged: an input ``mask`` (B, T) of 0/1 says which tokens are real; they lead in each row. Outputs of others are 0.
    """

    def __init__(self, model: nn.Module, flow: Flow, ragged: bool) -> None:
        super().__init__()
        self.model = model
        self.ragged = ragged
        self.flow = [flow]

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The model's inputs, ``mask`` where ragged, ``state.count`` and ``state.I.*``; no state starts a stream."""
        flow = self.flow[0]
        own = {name: value for name, value in inputs.items() if not name.startswith(STATE)}
        admitted = own.pop("mask") if self.ragged else None
        states: dict[str, dict[str, Tensor]] = {}
        for name, value in inputs.items():
            if name.startswith(STATE) and name != COUNT:
                index, _, part = name.removeprefix(STATE).partition(".")
                states.setdefault(index, {})[part] = value
        flow.begin(inputs.get(COUNT), admitted, [states[index] for index in sorted(states, key=int)])
        outputs = named_outputs(self.model(**own))
        if not flow.next_states:
            raise InputError("no mixer of the model ran, so there is nothing to carry from chunk to chunk")
        if admitted is not None:
            outputs = {name: _real_rows(value, admitted) for name, value in outputs.items()}
        following = {f"{NEXT}{i}.{part}": t for i, parts in enumerate(flow.next_states) for part, t in parts.items()}
        return {**outputs, f"{NEXT}count": flow.next_count(), **following}


def _real_rows(value: Tensor, admitted: Tensor) -> Tensor:
    """(B, T, ..) with zeros where a token is none."""
    return value * admitted.to(value.dtype).reshape(*admitted.shape, *(1 for _ in value.shape[2:]))


def make_recurrent(model: nn.Module, frames: bool = False, ragged: bool = False) -> tuple[RecurrentModel, list[str]]:
    """The recurrent form of a model.

    Args:
        model: any module; left unchanged.
        frames: each chunk is a frame that sees itself and the past.
        ragged: with an input that says which tokens are real.

    Returns:
        The model, and the module paths of its mixers in the original.

    Raises:
        InputError: the model has an attention over all tokens.
    """
    flow = Flow(frames)
    lowered, names = lower(model, lambda mixer: SteppedMixer(mixer, flow))
    for path, module in list(lowered.named_modules()):
        if isinstance(module, (FullAttention, nn.MultiheadAttention)):
            raise InputError(
                f"{path} is an attention over all tokens, whose memory grows with the stream: no recurrent form. Attention "
                "with a window (LocalAttention) has one; the model as it is has the parallel form"
            )
        if isinstance(module, LocalAttention):
            parent, _, child = path.rpartition(".")
            setattr(lowered.get_submodule(parent), child, SteppedLocalAttention(module, flow))
    if isinstance(lowered, (LanguageModel, Encoder)) and lowered.pos_embed is not None:
        lowered.pos_embed = SteppedPositions(lowered.pos_embed, flow)  # type: ignore[assignment]
    return RecurrentModel(lowered, flow, ragged).eval(), names
