"""Exact rewrites of every PoM for inference: one function, one identity, its algebra in the first lines.

A lowered mixer works channels-major, (B, D, N): the projection is W x^T, so that the mean over tokens runs over the last
axis. There ONNX Runtime adds in blocks (103 dB against float64 at 100,000 tokens, measured); tokens-major it adds one
token after the other (77 dB) and takes a quarter more time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.mixer import CumulativePoM, Mask, Mixer, PoM, divide_or_zero, horner
from pom_edge.recognise import is_ours, is_published, to_pom
from pom_edge.rotary import frequencies, rotate

RUNNING_BLOCK = 32  # tokens in a block of the running sum: 2 * 32 operations an element, against 2 d for the projection
Turn = tuple[Tensor, Tensor]  # cosine and sine, (N, blocks, q) or (B, N, blocks, q)
TABLE_ROWS = 256  # rows of one rotary table; a position is read as digits of this base
DIGITS = 4

__all__ = [
    "LoweredCumulativePoM",
    "LoweredPoM",
    "RotaryTables",
    "channel_readout",
    "collapsed_readout",
    "headed_readout",
    "lower",
    "mean_over_tokens",
    "project_channels",
    "replace_mixers",
    "running_sum",
]


def project_channels(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
    """(W x_n + b) for every token, channels-major.

    W x^T, grouped: W is (G, D/G, d/G) and x^T is (B, G, d/G, N), so a grouped convolution of width 1 is a plain MatMul.

    Args:
        x: (B, N, d). weight: (D, d), grouped (D, d/G). bias: (D) or None.

    Returns:
        (B, D, N).
    """
    columns = x.transpose(1, 2)  # (B, d, N)
    if groups > 1:
        columns = columns.unflatten(1, (groups, -1))  # (B, G, d/G, N)
        p = torch.matmul(weight.unflatten(0, (groups, -1)), columns).flatten(1, 2)
    else:
        p = torch.matmul(weight, columns)
    return p if bias is None else p + bias.unsqueeze(-1)


def mean_over_tokens(f: Tensor, mask: Tensor | None) -> Tensor:
    """sum m f / sum m over the last axis; without a mask the plain mean. f (B, D, N), mask (B, N) -> (B, D, 1)."""
    if mask is None:
        return f.mean(-1, keepdim=True)
    weights = mask.to(f.dtype).unsqueeze(1)  # (B, 1, N)
    return divide_or_zero((f * weights).sum(-1, keepdim=True), weights.sum(-1, keepdim=True))


def mean_per_query(f: Tensor, mask: Tensor) -> Tensor:
    """sum_n m_tn f_n / sum_n m_tn as one MatMul. f (B, D, N), mask (B or 1, T, N) -> (B, D, T)."""
    weights = mask.to(f.dtype)
    return divide_or_zero(f @ weights.transpose(1, 2), weights.sum(-1).unsqueeze(1))


def running_sum(f: Tensor, block: int = RUNNING_BLOCK, levels: int = 3) -> Tensor:
    """Inclusive running sum over the last axis from MatMul alone: (B, C, N) -> (B, C, N), linear in N.

        S = [f_1 .. f_N] triu(1);  in blocks of c:  S_b = f_b triu(1)_c + (running sum of the earlier blocks' totals)

    The totals are summed the same way; after ``levels`` levels the rest, N / c^2 of them, is one dense triangle (977
    columns for a million tokens). No CumSum: TensorRT before 10.8 runs it as a loop over tokens, later versions confuse
    several of them (TensorRT#4513, onnx-tensorrt#1034).
    """
    tokens = f.shape[-1]
    if levels == 1:
        return f @ torch.ones(tokens, tokens, dtype=f.dtype, device=f.device).triu()
    triangle = torch.ones(block, block, dtype=f.dtype, device=f.device).triu()
    blocks = _block_count(tokens, block)
    padded = F.pad(f, (0, blocks * block - tokens)).reshape(*f.shape[:-1], blocks, block)  # (B, C, blocks, c)
    within = padded @ triangle
    totals = within[..., -1]  # (B, C, blocks)
    before = running_sum(totals, block, levels - 1) - totals
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :tokens]


def _block_count(tokens: int, block: int) -> int:
    """Blocks that hold ``tokens``: exact for a number, two more than the full ones for an export-time symbol.

    For a symbol the rounded-up division and the count of one both make torch.export specialise (its guards ask whether
    the division is exact and whether the size is 1, torch 2.13); this count is always a multiple and at least 2.
    """
    return -(-tokens // block) if isinstance(tokens, int) else tokens // block + 2


def causal_mean(f: Tensor, mask: Tensor | None) -> Tensor:
    """h_t = sum_{n<=t} m_n f_n / sum_{n<=t} m_n. f (B, D, N), mask (B, N) or None -> (B, D, N)."""
    if mask is None:
        count = torch.arange(1, f.shape[-1] + 1, device=f.device).to(f.dtype)
        return running_sum(f) / count
    weights = mask.to(f.dtype).unsqueeze(1)
    return divide_or_zero(running_sum(f * weights), running_sum(weights))


def collapsed_readout(s: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """W_ag (s_t * h) = s_t M with M[j] = sum over the channels c of head j of W_ag[:, c] h[c], when h is the same for all t.

    The (N x D x d) product becomes (N x H x d) and one (D x d) product for each sequence: about half of the mixer's
    arithmetic is gone (pom.md calls it the collapsed readout).

    Args:
        s: (B, T, H). h: (B, D, 1). weight: W_ag^T by heads, (H, D/H, d).

    Returns:
        (B, T, d).
    """
    rows = h.transpose(1, 2).unflatten(-1, (weight.shape[0], -1)).transpose(1, 2)  # (B, H, 1, D/H)
    return torch.matmul(s, torch.matmul(rows, weight).squeeze(2))  # (B, T, H) @ (B, H, d)


def headed_readout(s: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """W_ag (s_t * h_t): s (B, T, H), h (B, D, T), weight W_ag^T (D, d) -> (B, T, d)."""
    gated = s.transpose(1, 2).unsqueeze(2) * h.unflatten(1, (s.shape[-1], -1))  # (B, H, D/H, T)
    return torch.matmul(gated.flatten(1, 2).transpose(1, 2), weight)


def channel_readout(s: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """W_ag (s_t * h_t) with one gate for each channel: s (B, D, T), h (B, D, 1 or T), weight W_ag^T (D, d) -> (B, T, d)."""
    return torch.matmul((s * h).transpose(1, 2), weight)


class RotaryTables(nn.Module):
    """Cosine and sine of any position from small float64-made tables.

        p = p_0 + 256 p_1 + 256^2 p_2 + 256^3 p_3;   cos(p theta), sin(p theta) by adding the angles of the four digits

    A table for each digit keeps the graph in FP32 and exact to rounding (FP32 angles lose 40 dB by position 10,000), and
    reaches 4.29 billion positions; one beyond that is an index error at run time.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        place = torch.tensor([float(TABLE_ROWS**i) for i in range(DIGITS)], dtype=torch.float64)
        rows = torch.arange(TABLE_ROWS, dtype=torch.float64)
        angles = place[:, None, None] * rows[:, None] * theta  # (4, 256, q)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, positions: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
        """positions int64 (..., blocks), which may be negative where ``signed`` -> cos, sin (..., blocks, q)."""
        if signed:  # cos(-a) = cos a, sin(-a) = -sin a; as digits a negative position would be another one
            cos, sin = self(positions.abs(), signed=False)
            return cos, sin * positions.sign().to(sin.dtype).unsqueeze(-1)
        digit = positions % TABLE_ROWS
        cos, sin = F.embedding(digit, self.cos[0]), F.embedding(digit, self.sin[0])
        for place in range(1, DIGITS):
            # An exact division: a float holds every multiple of 256 up to 2^32, and integer division exports as 8 nodes.
            positions = ((positions - digit).float() * (1 / TABLE_ROWS)).long()
            # The last digit is not reduced: a position beyond the tables is an index error, not another angle.
            digit = positions % TABLE_ROWS if place < DIGITS - 1 else positions
            c, s = F.embedding(digit, self.cos[place]), F.embedding(digit, self.sin[place])
            cos, sin = cos * c - sin * s, sin * c + cos * s
        return cos, sin


def rotate_channels(f: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of f (B, C, N) by the angles of cos, sin (N, blocks, q) or (B, N, blocks, q), C = 2 blocks q."""
    blocks, q = cos.shape[-2:]
    cos, sin = cos.movedim(-3, -1), sin.movedim(-3, -1)  # (.., blocks, q, N)
    first, second = f.unflatten(1, (blocks, 2, q)).unbind(2)  # each (B, blocks, q, N)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2).flatten(1, 3)


class Aggregate(nn.Module):
    """Features to their mean over tokens. A module, so that every node of it carries its name: it stays in FP32."""

    def forward(self, f: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """f (B, D, N), mask None, (B, N) or (B, T, N) -> (B, D, 1 or T)."""
        if mask is not None and mask.ndim == 3:
            return mean_per_query(f, mask)
        return causal_mean(f, mask) if causal else mean_over_tokens(f, mask)


class LoweredMixer(nn.Module):
    """A mixer rewritten for inference: same function, same arguments, fewer and cheaper operations.

    A subclass gives the features and the gated readout; how features are summed over tokens is decided here, and elsewhere
    for the other forms (:mod:`pom_edge.export.recurrent`).

    Args:
        mixer: the trained layer.
    """

    ag_bias: Tensor | None

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.hidden = mixer.hidden
        self.pom_mean = Aggregate()

    def features(self, context: Tensor, turn: Turn | None) -> Tensor:
        """(B, N, d) -> (B, hidden, N)."""
        raise NotImplementedError

    def readout(self, x: Tensor, turn: Turn | None, h: Tensor, pooled: bool) -> Tensor:
        """Gate h (B, hidden, 1 or T) by the selection of x and project: (B, T, d). ``pooled``: h is one for all tokens."""
        raise NotImplementedError

    def angles(self, positions: Tensor | None, tokens: Tensor, nonnegative: bool = False) -> Turn | None:  # noqa: ARG002
        """Cosine and sine of the positions (default 0, 1, 2, ..), which are known not to be negative; None without rotary."""
        if positions is not None:
            raise InputError("positions were given, but this mixer has no rotary positions")
        return None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """As :meth:`pom_edge.mixer.Mixer.forward`."""
        if isinstance(mask, str):
            mask, causal = None, True
        source = x if context is None else context
        turn = self.angles(positions, x)
        source_turn = turn if context is None and context_positions is None else self.angles(context_positions, source)
        h = self.pom_mean(self.features(source, source_turn), mask, causal)
        return self.biased(self.readout(x, turn, h, pooled=not causal and (mask is None or mask.ndim == 2)))

    def step(self, *_: object, **__: object) -> None:
        """Refused: the graph keeps the state itself.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the model calls step() of its mixer and keeps the state; export one that calls the mixer itself, with --form "
            "recurrent"
        )

    def biased(self, y: Tensor) -> Tensor:
        """y plus the readout's bias, where there is one."""
        return y if self.ag_bias is None else y + self.ag_bias


class LoweredPoM(LoweredMixer):
    """A PoM rewritten for inference.

    Args:
        mixer: the trained layer; its weights are shared, not copied.
        tables: rotary tables to share between layers of equal width.
    """

    se_weight: Tensor
    se_bias: Tensor
    po_weight: Tensor
    po_bias: Tensor | None
    coefficients: Tensor
    ag_weight: Tensor

    def __init__(self, mixer: PoM, tables: RotaryTables | None = None) -> None:
        super().__init__(mixer)
        self.source = [mixer]  # in a list: settings are read from it, but it is no submodule and exports nothing
        self.pom_angles = tables
        heads = mixer.n_sel_heads if mixer.n_sel_heads > 1 else 1
        weight, bias = mixer.projection()
        se_weight, se_bias = mixer.selection_projection()
        by_heads = mixer.ag_proj.weight.t().unflatten(0, (heads, -1))  # (H, D/H, d)
        self._constants(po_weight=weight, po_bias=bias, se_weight=se_weight, se_bias=se_bias)
        self._constants(coefficients=mixer.po_coeff.t().unsqueeze(-1), ag_weight=by_heads, ag_bias=mixer.ag_proj.bias)

    def _constants(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach().float().contiguous())

    @property
    def mixer(self) -> PoM:
        """The layer this one was made from."""
        return self.source[0]

    def features(self, context: Tensor, turn: Turn | None) -> Tensor:
        p = project_channels(context, self.po_weight, self.po_bias, self.mixer.n_groups)
        f = horner(self.mixer.activation(p), self.coefficients.unbind(0), self.mixer.first_power)
        return f if turn is None else rotate_channels(f, *turn)

    def readout(self, x: Tensor, turn: Turn | None, h: Tensor, pooled: bool) -> Tensor:
        gate = F.hardsigmoid if self.mixer.gate == "hardsigmoid" else torch.sigmoid
        if self.mixer.n_sel_heads <= 1:
            s = gate(project_channels(x, self.se_weight, self.se_bias))  # (B, D, T)
            s = s if turn is None else rotate_channels(s, *turn)
            return channel_readout(s, h, self.ag_weight.squeeze(0))
        s = gate(F.linear(x, self.se_weight, self.se_bias))  # (B, T, H)
        s = s if turn is None else rotate(s, *self._gate_angles(turn))
        if pooled:
            return collapsed_readout(s, h, self.ag_weight)
        return headed_readout(s, h, self.ag_weight.flatten(0, 1))

    def angles(self, positions: Tensor | None, tokens: Tensor, nonnegative: bool = False) -> Turn | None:
        if self.pom_angles is None:
            return super().angles(positions, tokens, nonnegative)
        if positions is not None:
            positions = positions.unsqueeze(-1) if positions.ndim == 1 else positions
            return self.pom_angles(positions, signed=not nonnegative)  # type: ignore[no-any-return]
        if self.mixer.rotary == "2d":
            raise InputError("2-D rotary positions are needed: give an example input 'positions' of shape (tokens, 2)")
        counted = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(-1)
        return self.pom_angles(counted, signed=False)  # type: ignore[no-any-return]

    def _gate_angles(self, turn: Turn) -> Turn:
        """The gate of H heads uses a strided choice of the same columns (see rotary.gate_frequencies)."""
        width = self.mixer.hidden // self.mixer.n_sel_heads
        stride = width // 2 if self.mixer.rotary == "1d" else width
        count = self.mixer.n_gates // (2 * turn[0].shape[-2])
        return turn[0][..., ::stride][..., :count], turn[1][..., ::stride][..., :count]


class LoweredCumulativePoM(LoweredMixer):
    """A CumulativePoM (2025-02 layout) rewritten channels-major; per-channel gates leave nothing to collapse."""

    def __init__(self, mixer: CumulativePoM) -> None:
        super().__init__(mixer)
        self.degree = mixer.degree
        self.po_proj, self.se_proj, self.ag_proj = mixer.po_proj, mixer.se_proj, mixer.ag_proj
        self.ag_bias = mixer.ag_proj.bias

    def features(self, context: Tensor, turn: Turn | None) -> Tensor:  # noqa: ARG002  # the base's signature
        branches = F.gelu(project_channels(context, self.po_proj.weight, self.po_proj.bias))
        products: list[Tensor] = []
        for branch in branches.chunk(self.degree, dim=1):
            products.append(branch * products[-1] if products else branch)
        return torch.cat(products, dim=1)

    def readout(self, x: Tensor, turn: Turn | None, h: Tensor, pooled: bool) -> Tensor:  # noqa: ARG002
        s = torch.sigmoid(project_channels(x, self.se_proj.weight, self.se_proj.bias))
        return channel_readout(s, h, self.ag_proj.weight.t())


class PublishedAdapter(nn.Module):
    """Gives a lowered mixer the published forward arguments, so that the model around it need not change."""

    def __init__(self, lowered: nn.Module) -> None:
        super().__init__()
        self.lowered = lowered

    def forward(
        self,
        xq: Tensor,
        xc: Tensor | None = None,
        mask: Mask = None,
        positions: Tensor | None = None,
        ctx_positions: Tensor | None = None,
        positions_hw: Tensor | None = None,
        ctx_positions_hw: Tensor | None = None,
    ) -> Tensor:
        """The published arguments; rows and columns (``*_hw``) are the positions of a 2-D rotary layer."""
        positions = positions if positions_hw is None else positions_hw
        ctx_positions = ctx_positions if ctx_positions_hw is None else ctx_positions_hw
        context = None if xc is xq else xc  # the published class tests identity too, but here both branches agree
        return self.lowered(xq, context, mask, positions, ctx_positions)  # type: ignore[no-any-return]


def lower(model: nn.Module, form: Callable[[LoweredMixer], nn.Module] | None = None) -> tuple[nn.Module, list[str]]:
    """Replace every PoM of a model, ours or the published class, by its lowered form.

    Args:
        model: any module; left unchanged.
        form: turns each lowered mixer into that of another form; None keeps it (parallel).

    Returns:
        A lowered copy in eval mode, and the module paths of its mixers in order. ``""`` is the model itself.
    """
    shared: dict[tuple[int, str, float], RotaryTables] = {}

    def make(mixer: Mixer) -> nn.Module:
        lowered: LoweredMixer
        if isinstance(mixer, PoM):
            lowered = LoweredPoM(mixer, _tables(mixer, shared))
        else:
            assert isinstance(mixer, CumulativePoM)
            lowered = LoweredCumulativePoM(mixer)
        return lowered if form is None else form(lowered)

    return replace_mixers(model, make)


def replace_mixers(model: nn.Module, make: Callable[[Mixer], nn.Module]) -> tuple[nn.Module, list[str]]:
    """Put something else of the same arguments in the place of every mixer, ours or the published class.

    Returns:
        A changed copy in eval mode, and the module paths of the mixers in order. ``""`` is the model itself.
    """
    changed = copy.deepcopy(model).eval().requires_grad_(False)
    places: dict[nn.Module, list[str]] = {}  # a mixer may have several names: a shared layer
    for name, module in changed.named_modules(remove_duplicate=False):
        if module in places or is_ours(module) or is_published(module):
            places.setdefault(module, []).append(name)
    for module, names in places.items():
        made = (make(module) if isinstance(module, Mixer) else PublishedAdapter(make(to_pom(module)))).eval()
        if names == [""]:
            return made, names
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(changed.get_submodule(parent), child, made)
    return changed, [names[0] for names in places.values()]


def _tables(mixer: PoM, shared: dict[tuple[int, str, float], RotaryTables]) -> RotaryTables | None:
    if mixer.rotary is None:
        return None
    key = (mixer.hidden, mixer.rotary, mixer.rotary_base)
    if key not in shared:
        shared[key] = RotaryTables(frequencies(mixer.hidden, mixer.rotary, mixer.rotary_base))
    return shared[key]
