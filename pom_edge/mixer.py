"""The Polynomial Mixer (arXiv 2604.06129): the module people train, and the truth every artifact is checked against.

Shapes used throughout: B batch, T query tokens, N context tokens, d model width (``dim``), D = expand * d hidden width,
k degree, H selection heads, G groups.

    a_n = clip(leaky_relu(W_po x_n, 0.01), -0.1, 6)          (D)   projection and activation
    f_n = sum_p c_p a_n^p                                    (D)   polynomial, c = po_coeff
    h   = mean of f over the tokens that the mask admits     (D)   aggregation
    s_t = clip(W_se x_t / 6 + 1/2 + b_se / 6, 0, 1)          (D or H)   selection
    y_t = W_ag (s_t * h)                                     (d)   readout; a head gates a contiguous block of D/H channels

Means, not sums, and a hard sigmoid, not a sigmoid: the published code differs there from the paper, and trained weights
obey the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.rotary import Rotary, blocks_of, check_rotary, cos_sin, frequencies, gate_frequencies, rotate

Gate = Literal["hardsigmoid", "sigmoid"]
Mask = Tensor | Literal["causal"] | None

CLAMP_MIN = -0.1  # lower bound of the activation; the upper one is a setting (6, or 1 in the distilled SD3.5)
LEAKY_SLOPE = 0.01
SETTINGS_KEY = "pom_settings"  # in a state dict: the settings that leave no trace in the shapes of the weights
_PUBLISHED: dict[str, Any] = {"rotary": None, "rotary_base": 10000.0, "clamp_max": 6.0, "gate": "hardsigmoid", "first_power": 1}
SUM_BLOCK = 256  # tokens in a block of the two-level running sum: a plain FP32 running sum falls to 80 dB at 100k tokens

__all__ = ["SETTINGS_KEY", "CumulativePoM", "Mixer", "PoM", "PoMState", "coefficient_penalty", "read_settings"]


@dataclass
class PoMState:
    """What a causal mixer remembers of the past: D floats, whatever the degree and the number of tokens.

    The running mean is kept as an unevaluated sum of two FP32 tensors, since one alone drifts (75 dB after a million
    single-token steps), and the tokens are counted in int64, since an FP32 count stops at 2^24.
    """

    mean: Tensor  # (B, 1, D) float32
    mean_low: Tensor  # (B, 1, D) float32, |mean_low| <= half an ulp of mean
    count: Tensor  # (B,) int64, tokens seen


class Mixer(nn.Module):
    """What every polynomial mixer shares: aggregation, readout, masks, streaming.

    A subclass says what a token contributes (:meth:`features`) and what it selects (:meth:`selection`).
    """

    dim: int
    hidden: int  # width of the aggregated vector
    n_sel_heads: int
    rotary: Rotary | None = None
    ag_proj: nn.Linear

    def features(self, context: Tensor, positions: Tensor | None) -> Tensor:
        """Token-wise polynomial features, (B, N, d) -> (B, N, hidden)."""
        raise NotImplementedError

    def selection(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Token-wise gate, (B, T, d) -> (B, T, H) or (B, T, hidden)."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: query tokens, (B, T, d).
            context: context tokens, (B, N, d); None mixes ``x`` with itself. Passing ``x`` again means the same.
            mask: None; ``"causal"`` (the same as ``causal=True``); (B, N) padding mask of 0/1, bool or non-negative
                weights; or (B or 1, T, N) weights for each query. A 2-D mask is always (B, N). A row that admits no token
                gives a zero mean, so y is the bias of the readout.
            positions: rotary only, int64, (T,) for 1-D (default 0..T-1), (T, 2) of row and column for 2-D.
            context_positions: the same for ``context``; defaults to ``positions`` when the tokens mix with themselves.
            causal: token t sees tokens 0..t only, in linear time and memory. May be combined with a (B, N) mask.

        Returns:
            y, (B, T, d).

        Raises:
            InputError: shapes, mask kind or positions do not fit; the message says what was found and expected.
        """
        if isinstance(mask, str):
            if mask != "causal":
                raise InputError(f"mask is {mask!r}; expected None, 'causal', a (B, N) or a (B, T, N) tensor")
            mask, causal = None, True
        source = x if context is None else context
        self._check_tokens(x, source, mask, causal)
        positions = self._positions(positions, x)
        if context_positions is None and context is None:
            context_positions = positions
        context_positions = self._positions(context_positions, source)
        h = aggregate(self.features(source, context_positions), mask, causal)
        return self.readout(self.selection(x, positions), h)

    def step(
        self,
        chunk: Tensor,
        state: PoMState | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, PoMState]:
        """Mix a chunk with everything seen before it: exact for chunks of any length, prefill and decode alike.

            h_t = h + cumsum(f - h)_t / (n + t),   n tokens seen before, t = 1..T

        Args:
            chunk: the next tokens, (B, T, d), T >= 1.
            state: what the previous step returned; None at the start of a stream.
            causal: False makes the chunk a frame: each of its tokens sees the whole frame and the past.
            mask: (B, T) of 0/1 or bool for ragged batches: tokens marked 0 are neither counted nor remembered.
            positions: rotary only; default (1-D) the number of tokens seen, counted for each sequence.

        Returns:
            y (B, T, d), and the new state.

        Raises:
            InputError: an empty chunk, or shapes that do not fit the layer or the state.
        """
        if state is None:
            zeros = chunk.new_zeros(chunk.shape[0], 1, self.hidden, dtype=torch.float32)
            state = PoMState(zeros, zeros.clone(), torch.zeros(chunk.shape[0], dtype=torch.int64, device=chunk.device))
        self._check_chunk(chunk, state, mask)
        weights = torch.ones_like(chunk[..., 0], dtype=torch.int64) if mask is None else mask.to(torch.int64)  # (B, T)
        seen = state.count.unsqueeze(-1) + weights.cumsum(1)  # (B, T) int64, tokens up to and including each
        if positions is None and self.rotary == "1d":
            positions = (seen - weights).unsqueeze(-1)  # (B, T, 1)
        else:
            positions = self._positions(positions, chunk)

        deviation = (self.features(chunk, positions) - state.mean - state.mean_low) * weights.unsqueeze(-1)
        if causal:
            shift = running_sum(deviation) / seen.clamp(min=1).unsqueeze(-1)  # (B, T, D)
        else:
            shift = deviation.sum(1, keepdim=True) / seen[:, -1:].clamp(min=1).unsqueeze(-1)  # (B, 1, D)
        shift = shift + state.mean_low
        h = (state.mean + shift).to(chunk.dtype)  # the state is FP32 even where the layer is not
        y = self.readout(self.selection(chunk, positions), h)
        mean, mean_low = two_sum(state.mean, shift[:, -1:])
        return y, PoMState(mean, mean_low, seen[:, -1])

    def readout(self, s: Tensor, h: Tensor) -> Tensor:
        """y = W_ag (s * h): s (B, T, H or hidden), h (B, 1 or T, hidden) -> (B, T, d)."""
        if self.n_sel_heads > 1:
            heads = h.unflatten(-1, (self.n_sel_heads, -1))  # (B, 1|T, H, hidden/H)
            return self.ag_proj((s.unsqueeze(-1) * heads).flatten(-2))  # type: ignore[no-any-return]
        return self.ag_proj(s * h)  # type: ignore[no-any-return]

    def _positions(self, positions: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Positions as (N, blocks) int64, or None without rotary."""
        if self.rotary is None:
            if positions is not None:
                raise InputError("positions were given, but this mixer has no rotary positions (rotary=None)")
            return None
        if positions is None:
            if self.rotary == "2d":
                raise InputError("2-D rotary positions are needed: pass positions of shape (tokens, 2), row and column")
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.rotary == "1d" and positions.ndim == 1:
            positions = positions.unsqueeze(-1)
        if positions.ndim not in (2, 3) or positions.shape[-1] != blocks_of(self.rotary):
            expected = "(tokens,)" if self.rotary == "1d" else "(tokens, 2)"
            raise InputError(f"positions have shape {tuple(positions.shape)}; expected {expected} for {self.rotary} rotary")
        if not torch.compiler.is_compiling() and positions.shape[-2] != tokens.shape[1]:
            raise InputError(f"{positions.shape[-2]} positions were given for {tokens.shape[1]} tokens")
        return positions

    def _check_tokens(self, x: Tensor, source: Tensor, mask: Tensor | None, causal: bool) -> None:
        for name, tensor in (("x", x), ("context", source)):
            if tensor.ndim != 3 or tensor.shape[-1] != self.dim:
                raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected (batch, tokens, {self.dim})")
        if mask is not None and mask.ndim not in (2, 3):
            raise InputError(f"mask has shape {tuple(mask.shape)}; expected (B, N) or (B, T, N)")
        if mask is not None and causal and mask.ndim == 3:
            raise InputError("a mask for each query, (B, T, N), already says what each token sees: drop causal")
        if torch.compiler.is_compiling():  # sizes are symbols here: comparing them would pin them
            if causal and source is not x:  # but here they must be one: a single query would be broadcast to N rows
                torch._check(x.shape[1] == source.shape[1], lambda: "causal mixing needs as many queries as context tokens")
            return
        batch, queries, tokens = x.shape[0], x.shape[1], source.shape[1]
        if source.shape[0] != batch:
            raise InputError(f"context has batch {source.shape[0]}, x has {batch}; they must be equal")
        if min(queries, tokens) == 0:
            raise InputError(f"found {queries} query and {tokens} context tokens; at least one of each is needed")
        if causal and queries != tokens:
            raise InputError(
                f"causal mixing pairs query t with context 0..t, but there are {queries} queries for {tokens} context "
                "tokens; use step() to decode against a past, or a (B, T, N) mask"
            )
        if mask is not None and mask.ndim == 2 and tuple(mask.shape) != (batch, tokens):
            raise InputError(
                f"a 2-D mask is (B, N) = {(batch, tokens)}, found {tuple(mask.shape)}; a mask for each query is (1, T, N)"
            )
        if mask is not None and mask.ndim == 3 and tuple(mask.shape) not in ((batch, queries, tokens), (1, queries, tokens)):
            raise InputError(f"a 3-D mask is (B or 1, T, N) = {(batch, queries, tokens)}, found {tuple(mask.shape)}")

    def _check_chunk(self, chunk: Tensor, state: PoMState, mask: Tensor | None) -> None:
        if chunk.ndim != 3 or chunk.shape[-1] != self.dim:
            raise InputError(f"the chunk has shape {tuple(chunk.shape)}; expected (batch, tokens, {self.dim})")
        if torch.compiler.is_compiling():
            return
        if chunk.shape[1] == 0:
            raise InputError("the chunk is empty; expected at least one token")
        expected = (chunk.shape[0], 1, self.hidden)
        if tuple(state.mean.shape) != expected or tuple(state.count.shape) != expected[:1]:
            raise InputError(
                f"the state has mean {tuple(state.mean.shape)} and count {tuple(state.count.shape)}; expected {expected} "
                f"and {expected[:1]}: it belongs to another layer or batch size"
            )
        if mask is not None and tuple(mask.shape) != tuple(chunk.shape[:2]):
            raise InputError(f"mask has shape {tuple(mask.shape)}; expected {tuple(chunk.shape[:2])}")
        if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
            raise InputError("step() counts tokens, so its mask is 0 or 1 (or bool) for each token; found other values")


class PoM(Mixer):
    """The Polynomial Mixer, with the published parameter names.

    Args:
        dim: model width d.
        degree: polynomial degree k >= 1.
        expand: D = expand * dim.
        n_groups: groups of the projection; 1 fuses it with the selection into ``qc_proj``.
        n_sel_heads: selection heads H; 1, 0 and negative all mean one gate for each channel.
        bias: biases for the readout and (grouped only, as published) the projection.
        rotary: None, ``"1d"`` or ``"2d"``: f is rotated before the mean, the gate after the hard sigmoid.
        rotary_base: base of the rotary frequencies.
        clamp_max: upper bound of the activation; None leaves the leaky ReLU unbounded (compom 2025).
        gate: ``"hardsigmoid"``, or ``"sigmoid"`` (compom 2025).
        first_power: 1 for powers 1..k; 0 for powers 0..k-1 (compom 2025, degrees outside 2, 3, 4).

    Settings that the shapes of the weights do not tell (the last five) travel in the state dict, as ``pom_settings``, where
    they are not the published ones; loading weights into a layer of other settings is refused.

    Raises:
        InputError: settings that cannot be combined.

    Example:
        >>> layer = PoM(64, degree=3, expand=2, n_sel_heads=4)
        >>> y = layer(torch.randn(2, 10, 64), mask="causal")
        >>> y, state = layer.step(torch.randn(2, 5, 64))
    """

    def __init__(
        self,
        dim: int,
        degree: int,
        expand: int,
        n_groups: int = 1,
        n_sel_heads: int = 1,
        bias: bool = False,
        rotary: Rotary | None = None,
        *,
        rotary_base: float = 10000.0,
        clamp_max: float | None = 6.0,
        gate: Gate = "hardsigmoid",
        first_power: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("degree", degree), ("expand", expand), ("n_groups", n_groups)):
            if value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")
        hidden = dim * expand
        if dim % n_groups:
            raise InputError(f"dim {dim} is not divisible by n_groups {n_groups}")
        if n_sel_heads > 1 and hidden % n_sel_heads:
            raise InputError(f"dim * expand = {hidden} is not divisible by n_sel_heads {n_sel_heads}")
        if gate not in ("hardsigmoid", "sigmoid"):
            raise InputError(f"gate is {gate!r}; expected 'hardsigmoid' or 'sigmoid'")
        if first_power not in (0, 1):
            raise InputError(f"first_power is {first_power}; expected 0 or 1")
        if rotary is not None:
            check_rotary(rotary, hidden, n_sel_heads)
        self.dim, self.degree, self.expand, self.hidden = dim, degree, expand, hidden
        self.n_groups, self.n_sel_heads, self.bias = n_groups, n_sel_heads, bias
        self.rotary, self.rotary_base = rotary, rotary_base
        # A float even where an int was meant: clamp(min=-0.1, max=6) mixes types, which torch's ONNX exporter refuses.
        self.clamp_max = None if clamp_max is None else float(clamp_max)
        self.gate, self.first_power = gate, first_power

        self.n_gates = n_sel_heads if n_sel_heads > 1 else hidden
        if n_groups == 1:
            self.qc_proj = nn.Linear(dim, hidden + self.n_gates, bias=False)
            self.se_bias = nn.Parameter(torch.zeros(self.n_gates))
        else:
            self.po_proj = nn.Conv1d(dim, hidden, kernel_size=1, bias=bias, groups=n_groups)
            self.se_proj = nn.Linear(dim, self.n_gates)
        self.po_coeff = nn.Parameter(torch.randn(hidden, degree).clamp(-0.001, 0.001))  # the published initialisation
        self.ag_proj = nn.Linear(hidden, dim, bias=bias)

    def extra_repr(self) -> str:
        heads = self.n_sel_heads if self.n_sel_heads > 1 else "per channel"
        shapes = f"{self.dim}, degree={self.degree}, expand={self.expand}, groups={self.n_groups}, gate heads={heads}"
        return ", ".join([shapes, *(f"{name}={value}" for name, value in self.unpublished_settings().items())])

    def unpublished_settings(self) -> dict[str, Any]:
        """The settings that neither the weights' shapes nor the published code tell, by the constructor's names."""
        return {name: getattr(self, name) for name, value in _PUBLISHED.items() if getattr(self, name) != value}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        settings = self.unpublished_settings()
        if settings:
            text = json.dumps(settings, sort_keys=True).encode()
            destination[prefix + SETTINGS_KEY] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        _, _, _, unexpected, errors = args
        stored = state_dict.get(prefix + SETTINGS_KEY)
        if stored is not None:  # weights without it are the published code's, or of the published settings
            try:
                self.check_settings(read_settings(stored), prefix.rstrip(".") or type(self).__name__)
            except InputError as error:
                errors.append(str(error))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + SETTINGS_KEY in unexpected:
            unexpected.remove(prefix + SETTINGS_KEY)

    def check_settings(self, stored: Mapping[str, Any], name: str) -> None:
        """Whether weights that were saved with these settings mean this layer.

        Raises:
            InputError: they do not; lists what differs.
        """
        trained = {**_PUBLISHED, **stored}
        wrong = [
            f"{key}={value!r}, here {getattr(self, key)!r}" for key, value in trained.items() if getattr(self, key) != value
        ]
        if wrong:
            raise InputError(
                f"{name}: the weights were saved from a layer with {'; '.join(wrong)}. Build it with those settings"
            )

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection: (D, d) for one group, (D, d/G) grouped; bias (D) or None."""
        if self.n_groups == 1:
            return self.qc_proj.weight[: self.hidden], None
        return self.po_proj.weight.squeeze(-1), self.po_proj.bias

    def selection_projection(self) -> tuple[Tensor, Tensor]:
        """Weight (H or D, d) and bias (H or D) of the selection."""
        if self.n_groups == 1:
            return self.qc_proj.weight[self.hidden :], self.se_bias
        return self.se_proj.weight, self.se_proj.bias

    def activation(self, p: Tensor) -> Tensor:
        """clip(leaky_relu(p, 0.01), -0.1, clamp_max)."""
        a = F.leaky_relu(p, LEAKY_SLOPE)
        return a if self.clamp_max is None else a.clamp(CLAMP_MIN, self.clamp_max)

    def features(self, context: Tensor, positions: Tensor | None) -> Tensor:
        weight, bias = self.projection()
        if self.n_groups == 1:
            p = F.linear(context, weight)
        else:
            p = F.conv1d(context.transpose(1, 2), weight.unsqueeze(-1), bias, groups=self.n_groups).transpose(1, 2)
        f = horner(self.activation(p), self.po_coeff.unbind(-1), self.first_power)
        if self.rotary is None or positions is None:
            return f
        return rotate(f, *cos_sin(positions, frequencies(self.hidden, self.rotary, self.rotary_base), f.dtype))

    def selection(self, x: Tensor, positions: Tensor | None) -> Tensor:
        logits = F.linear(x, *self.selection_projection())
        s = F.hardsigmoid(logits) if self.gate == "hardsigmoid" else torch.sigmoid(logits)
        if self.rotary is None or positions is None:
            return s
        return rotate(s, *cos_sin(positions, self.gate_theta(), s.dtype))

    def gate_theta(self) -> Tensor:
        """Rotary frequencies of the gate, float64."""
        assert self.rotary is not None
        theta = frequencies(self.hidden, self.rotary, self.rotary_base)
        if self.n_sel_heads <= 1:
            return theta
        return gate_frequencies(theta, self.rotary, self.n_sel_heads, self.hidden // self.n_sel_heads)


class CumulativePoM(Mixer):
    """The mixer of the 2025-02 layout (and of HoMM before it): products of GELU branches instead of coefficients.

        g_1..g_k = chunks of gelu(W_po x);  f = [g_1, g_1 g_2, ..., g_1 ... g_k]  (k D);  y = W_ag (sigmoid(W_se x) * mean f)

    Args:
        dim, degree, expand: d, k and D = expand * dim; the aggregated vector is k * D wide.
        bias: biases for all three projections.
    """

    def __init__(self, dim: int, degree: int, expand: int, bias: bool = True) -> None:
        super().__init__()
        if min(dim, degree, expand) < 1:
            raise InputError(f"dim {dim}, degree {degree}, expand {expand}; each must be at least 1")
        self.dim, self.degree, self.expand, self.bias = dim, degree, expand, bias
        self.hidden, self.n_sel_heads = degree * expand * dim, 1
        self.po_proj = nn.Linear(dim, self.hidden, bias=bias)
        self.se_proj = nn.Linear(dim, self.hidden, bias=bias)
        self.ag_proj = nn.Linear(self.hidden, dim, bias=bias)

    def features(self, context: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        branches = F.gelu(self.po_proj(context)).chunk(self.degree, dim=-1)
        products = [branches[0]]
        for branch in branches[1:]:
            products.append(branch * products[-1])
        return torch.cat(products, dim=-1)

    def selection(self, x: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG002 - the base's signature
        return torch.sigmoid(self.se_proj(x))


def horner(a: Tensor, coefficients: tuple[Tensor, ...], first_power: int = 1) -> Tensor:
    """f = a (c_1 + a (c_2 + ... a c_k)): no tensor of all powers, and finite wherever f is. first_power 0 drops one a."""
    f = coefficients[-1].expand_as(a) if len(coefficients) == 1 else a * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        f = f * a + c
    return f * a if first_power else f


def aggregate(f: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Mean of f (B, N, D) over the admitted tokens: (B, 1, D), or (B, T, D) when causal or masked for each query."""
    if mask is None and not causal:
        return f.mean(1, keepdim=True)
    if mask is None:
        count = torch.arange(1, f.shape[1] + 1, device=f.device)
        return running_sum(f) / count.unsqueeze(-1).to(f.dtype)
    weights = mask.to(f.dtype)
    if weights.ndim == 3:
        return divide_or_zero(weights @ f, weights.sum(-1, keepdim=True))
    weights = weights.unsqueeze(-1)  # (B, N, 1)
    if causal:
        return divide_or_zero(running_sum(f * weights), running_sum(weights))
    return divide_or_zero((f * weights).sum(1, keepdim=True), weights.sum(1, keepdim=True))


def divide_or_zero(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, and 0 where no token is admitted (weight 0 makes total 0 too)."""
    return total / (weight + (weight == 0).to(weight.dtype))


def running_sum(f: Tensor) -> Tensor:
    """Inclusive running sum over tokens, (B, N, C): within blocks, then over block totals, so that FP32 errors stay small."""
    tokens = f.shape[1]
    if isinstance(tokens, int) and tokens <= SUM_BLOCK:
        return f.cumsum(1)
    # For an export-time symbol one or two spare blocks: torch.export would pin a count that could be 1 (torch 2.13).
    blocks = -(-tokens // SUM_BLOCK) if isinstance(tokens, int) else tokens // SUM_BLOCK + 2
    padded = F.pad(f, (0, 0, 0, blocks * SUM_BLOCK - tokens)).unflatten(1, (blocks, SUM_BLOCK))  # (B, blocks, block, C)
    within = padded.cumsum(2)
    totals = within[:, :, -1]  # (B, blocks, C)
    before = totals.cumsum(1) - totals
    total: Tensor = (within + before.unsqueeze(2)).flatten(1, 2)
    return total[:, :tokens]


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b = s + e exactly (Knuth's TwoSum): s is the rounded sum, e what rounding lost."""
    s = a + b
    shadow = s - a
    return s, (a - (s - shadow)) + (b - shadow)


def read_settings(stored: Tensor) -> dict[str, Any]:
    """The settings in a state dict's ``pom_settings`` (whatever type a script has cast it to since).

    Raises:
        InputError: the entry is damaged, or of a later version.
    """
    try:
        settings = dict(json.loads(bytes(stored.double().round().to(torch.uint8).tolist())))
        unknown = sorted(set(settings) - set(_PUBLISHED))
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{SETTINGS_KEY} in the weights cannot be read ({error}); save them again") from error
    if unknown:
        raise InputError(
            f"{SETTINGS_KEY} in the weights names {', '.join(unknown)}, which this version does not know; update it"
        )
    return settings


def mixers_of(model: nn.Module) -> Iterator[tuple[str, PoM]]:
    """Every PoM of a model, with its module path, in order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PoM))


def coefficient_penalty(model: nn.Module, order: int = 2) -> Tensor:
    """Polynomial regularisation: keeps high powers from dominating, which is also what keeps ranges small in FP16.

        sum over mixers of mean over channels of sum_p p |c_p|^order

    No public training code contains such a term (a summary of the paper names one); this form is ours.

    Args:
        model: any module that contains PoM layers (or is one).
        order: 2 shrinks all coefficients, 1 makes them sparse.

    Returns:
        A scalar to be scaled and added to the loss.

    Raises:
        InputError: the model contains no PoM layer.

    Example:
        >>> loss = criterion(model(x), target) + 1e-4 * coefficient_penalty(model)
    """
    terms = []
    for _, mixer in mixers_of(model):
        degrees = torch.arange(1, mixer.degree + 1, device=mixer.po_coeff.device, dtype=mixer.po_coeff.dtype)
        terms.append((mixer.po_coeff.abs().pow(order) * degrees).sum(-1).mean())
    if not terms:
        raise InputError("coefficient_penalty: the model contains no PoM layer")
    return torch.stack(terms).sum()
