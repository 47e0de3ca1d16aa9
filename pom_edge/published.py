"""Published PoM layers: which layout a state dict has, and the layer of ours that computes the same function.

The published code changed its parameter names and its mathematics several times, and a wrong guess loads without complaint
(0.08 to 0.82 relative error between compom-2025 and current weights of equal shapes). So the layout is read from the tensor
names, converted where that is exact, run with its own mathematics where it is not, and refused where names do not decide.

    current          qc_proj, se_bias | grouped po_proj, se_proj    hard sigmoid, activation clipped to -0.1..6
    current-rotary   and tables freqs_* | row_*, col_*              the same, rotated
    rotary-sd35      as current-rotary                              activation clipped to -0.1..1; never told by the weights
    compom-2026-03   po_proj, se_proj with bias                     as current: qc_proj = cat(po, se), se_bias = se.bias
    compom-2025      po_proj, se_proj without bias                  sigmoid, leaky ReLU without bounds; powers 0..k-1 for
                                                                    degrees other than 2, 3 and 4
    2025-02, homm    po_proj | ho_proj, (k D, d), no po_coeff       products of GELU branches, sigmoid; degree not in the shapes

Masked means of compom-2025 and 2025-02 divide by sum + 1e-7; ours divide by the sum. The two differ only where the weights of
a whole row sum to next to nothing, and a row of zeros gives zero in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import SETTINGS_KEY, CumulativePoM, PoM, horner, read_settings
from pom_edge.tables import TABLE_NAMES, read_base, rotary_of

LAYOUTS = ("current", "current-rotary", "rotary-sd35", "compom-2026-03", "compom-2025", "2025-02", "homm")
CUMULATIVE = ("2025-02", "homm")
SD35_CLAMP = 1.0

# Every tensor that some layout has, beside the rotary tables.
_KNOWN = {f"{layer}.{kind}" for layer in ("qc_proj", "po_proj", "ho_proj", "se_proj", "ag_proj") for kind in ("weight", "bias")}
_KNOWN |= {"se_bias", "po_coeff"}

__all__ = ["CUMULATIVE", "LAYOUTS", "BiasedPoM", "PublishedLayer", "build_layer", "detect_layout", "find_layers", "fuse"]


@dataclass(frozen=True)
class PublishedLayer:
    """A published layer, rebuilt.

    Attributes:
        mixer: the layer that computes the same function, in FP32 if the tensors are.
        layout: one of :data:`LAYOUTS`.
        warnings: what the user should know, one sentence each.
    """

    mixer: PoM | CumulativePoM
    layout: str
    warnings: list[str] = field(default_factory=list)


class BiasedPoM(PoM):
    """A PoM with one group and a biased projection: ComPoM of either year with ``bias=True``.

    The fused ``qc_proj`` of the current layout has no room for that bias, ``po_bias`` (D).
    """

    def __init__(self, dim: int, degree: int, expand: int, **settings: Any) -> None:
        super().__init__(dim, degree, expand, **settings)
        self.po_bias = nn.Parameter(torch.zeros(self.hidden))

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight (D, d) and bias (D)."""
        return self.qc_proj.weight[: self.hidden], self.po_bias

    def features(self, context: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG002  (the base class's arguments)
        """(B, N, d) -> (B, N, D); this layout has no rotary positions."""
        p = F.linear(context, *self.projection())
        return horner(self.activation(p), self.po_coeff.unbind(-1), self.first_power)


def find_layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Prefixes ("" or "blocks.0.mixer.") under which a PoM layer of any layout lies, in order."""
    last = "ag_proj.weight"
    prefixes = [name[: -len(last)] for name in tensors if name == last or name.endswith(f".{last}")]
    first = ("qc_proj.weight", "po_proj.weight", "ho_proj.weight")
    return [prefix for prefix in prefixes if any(prefix + name in tensors for name in first)]


def detect_layout(tensors: Mapping[str, Tensor]) -> str:
    """Which layout the tensor names of one layer have (rotary-sd35 looks like current-rotary).

    Raises:
        CheckpointError: two layouts fit (the message says which option decides), or none does.
    """
    names = set(tensors)
    rotary = rotary_of(names)
    if "po_coeff" not in names:
        if {"ho_proj.weight", "se_proj.weight"} <= names:
            return "homm"
        if {"po_proj.weight", "se_proj.weight"} <= names:
            return "2025-02"
        raise _no_layout(names)
    if {"qc_proj.weight", "se_bias"} <= names:
        return "current-rotary" if rotary else "current"
    if not {"po_proj.weight", "se_proj.weight"} <= names:
        raise _no_layout(names)
    grouped = tensors["po_proj.weight"].ndim == 3
    if "se_proj.bias" not in names:
        return "compom-2025"
    if grouped:
        return "current-rotary" if rotary else "current"
    if "po_proj.bias" in names:
        raise CheckpointError(
            "po_proj and se_proj both have biases, which fits two layouts with different mathematics: --layout compom-2026-03 "
            "(hard sigmoid, activation clipped to -0.1..6) or --layout compom-2025 (sigmoid, activation without bounds; "
            "bias=True). Say which code trained it"
        )
    return "compom-2026-03"


def build_layer(
    tensors: Mapping[str, Tensor], layout: str | None = None, degree: int | None = None, clamp: float | None = None
) -> PublishedLayer:
    """Rebuild one published layer.

    Args:
        tensors: its state dict, without prefix.
        layout: one of :data:`LAYOUTS`; None reads it from the names.
        degree: polynomial degree, for the layouts whose shapes do not tell.
        clamp: upper bound of the activation, where it is not 6.

    Weights of our own layers say themselves how they were made where that is not as published (``pom_settings``).

    Returns:
        The layer in eval mode with the same tensors (converted ones are new).

    Raises:
        CheckpointError: ambiguous without an option, options that contradict the tensors, tensors that are unknown, missing or
            of the wrong shape.
    """
    if SETTINGS_KEY in tensors:
        return _build_ours(tensors, layout, degree, clamp)
    unknown = sorted(set(tensors) - _KNOWN - TABLE_NAMES)
    if unknown:
        raise CheckpointError(f"no published PoM layer has {_some(unknown)}; is this a modified one? Then give --factory")
    integers = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if integers:
        raise CheckpointError(f"expected floating-point weights, found {_some(integers)}; give the weights before quantization")
    layout = detect_layout(tensors) if layout is None else layout
    _check_options(tensors, layout, clamp)
    try:
        if layout in CUMULATIVE:
            return _build_cumulative(tensors, layout, degree)
        return _build_pom(tensors, layout, degree, clamp)
    except CheckpointError:
        raise
    except InputError as error:  # PoM's own refusals: widths that cannot be rotated, heads that do not divide
        raise CheckpointError(f"the tensors do not make a layer of layout {layout}: {error}") from error


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """compom-2026-03 to current, exactly: qc_proj = cat(po_proj, se_proj), se_bias = se_proj.bias. One group, no po bias."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("po_proj.", "se_proj."))}
    kept["qc_proj.weight"] = torch.cat((tensors["po_proj.weight"].flatten(1), tensors["se_proj.weight"]))
    return kept | {"se_bias": tensors["se_proj.bias"]}


def _build_ours(tensors: Mapping[str, Tensor], layout: str | None, degree: int | None, clamp: float | None) -> PublishedLayer:
    """A layer that was saved by :class:`PoM` with its settings."""
    if layout is not None or clamp is not None:
        option = "--clamp" if layout is None else "--layout"
        raise CheckpointError(f"{option} does not apply: the weights carry the settings of their layer. Leave it out")
    weights = {name: tensor for name, tensor in tensors.items() if name != SETTINGS_KEY}
    try:
        settings = read_settings(tensors[SETTINGS_KEY])
        plain = build_layer(weights, "current", degree).mixer
        assert isinstance(plain, PoM)
        with torch.device("meta"):
            mixer = PoM(plain.dim, plain.degree, plain.expand, plain.n_groups, plain.n_sel_heads, plain.bias, **settings)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:  # InputError is one
        raise CheckpointError(f"the layer cannot be built from its settings: {error}") from error
    mixer.load_state_dict(plain.state_dict(), assign=True)
    return PublishedLayer(mixer.eval(), "current")


def _check_options(tensors: Mapping[str, Tensor], layout: str, clamp: float | None) -> None:
    names = set(tensors)
    if layout not in LAYOUTS:
        raise CheckpointError(f"unknown layout {layout!r}; expected one of {', '.join(LAYOUTS)}")
    unclipped = (*CUMULATIVE, "compom-2025")
    if clamp is not None and layout in unclipped:
        raise CheckpointError(f"--clamp has no meaning for layout {layout}: its activation has no upper bound. Leave it out")
    if clamp is not None and layout == "rotary-sd35" and clamp != SD35_CLAMP:
        raise CheckpointError(f"layout rotary-sd35 means --clamp {SD35_CLAMP}, found --clamp {clamp:g}; give one of the two")
    rotates = layout in ("current-rotary", "rotary-sd35")
    rotary = rotary_of(names)
    if rotates and rotary is None:
        raise CheckpointError(f"layout {layout} has rotary tables (freqs_cos, ..), this layer has none; it looks like current")
    if rotary is not None and not rotates:
        raise CheckpointError(f"the layer has rotary tables, which layout {layout} has not; it looks like current-rotary")
    fused = layout in ("current", "current-rotary", "rotary-sd35")
    if fused and "qc_proj.weight" not in names and "po_proj.weight" in names and tensors["po_proj.weight"].ndim == 2:
        raise CheckpointError(f"layout {layout} fuses its projections in qc_proj, this layer has po_proj; see compom-2026-03")
    for needed in _needed(layout):
        if needed <= names:
            optional = {"ag_proj.bias", *TABLE_NAMES}
            optional |= {name.replace("weight", "bias") for name in needed} if "se_proj.weight" in needed else set()
            if names - needed - optional:
                extra = _some(sorted(names - needed - optional))
                raise CheckpointError(f"layout {layout} has no {extra}; remove it, or give --factory if this is another layer")
            return
    wanted = " or ".join(", ".join(sorted(needed)) for needed in _needed(layout))
    raise CheckpointError(f"layout {layout} has {wanted}; found {_some(sorted(names))}")


def _needed(layout: str) -> list[set[str]]:
    if layout in CUMULATIVE:
        return [{"ho_proj.weight" if layout == "homm" else "po_proj.weight", "se_proj.weight", "ag_proj.weight"}]
    split = {"po_proj.weight", "po_coeff", "se_proj.weight", "ag_proj.weight"}
    if layout == "compom-2025":
        return [split]
    split = split | {"se_proj.bias"}
    return [split] if layout == "compom-2026-03" else [{"qc_proj.weight", "se_bias", "po_coeff", "ag_proj.weight"}, split]


def _build_pom(tensors: Mapping[str, Tensor], layout: str, degree: int | None, clamp: float | None) -> PublishedLayer:
    dim, hidden = _shape(tensors, "ag_proj.weight", None, None)
    if hidden % dim:
        raise CheckpointError(f"ag_proj.weight is ({dim}, {hidden}); expected (dim, expand * dim)")
    _, powers = _shape(tensors, "po_coeff", hidden, None)
    if degree is not None and degree != powers:
        raise CheckpointError(f"--degree is {degree}, but po_coeff has {powers} columns, one for each power. Leave it out")
    groups, converted = _split_projections(tensors, layout, dim, hidden)
    gates = converted["se"].shape[0]
    biased = "ag_proj.bias" in tensors or (groups > 1 and "po_bias" in converted)
    rotary = rotary_of(set(tensors))
    settings: dict[str, Any] = {
        "n_groups": groups,
        "n_sel_heads": 1 if gates == hidden else gates,
        "bias": biased,
        "clamp_max": (SD35_CLAMP if layout == "rotary-sd35" else 6.0) if clamp is None else clamp,
    }
    if rotary is not None:
        settings |= {"rotary": rotary, "rotary_base": read_base(tensors, rotary, hidden)}
    if layout == "compom-2025":
        settings |= {"gate": "sigmoid", "clamp_max": None, "first_power": 1 if powers in (2, 3, 4) else 0}
    kind = BiasedPoM if groups == 1 and "po_bias" in converted else PoM
    with torch.device("meta"):  # nothing is initialised: every parameter is replaced below
        mixer = kind(dim, powers, hidden // dim, **settings)
    state = {"po_coeff": tensors["po_coeff"], "ag_proj.weight": tensors["ag_proj.weight"]}
    if biased:
        state["ag_proj.bias"] = tensors.get("ag_proj.bias", converted["se"].new_zeros(dim))
    state |= _named_projections(tensors, converted, groups, biased)
    _check_shapes(state, {name: parameter.shape for name, parameter in mixer.named_parameters()})
    mixer.load_state_dict(state, assign=True)
    return PublishedLayer(mixer.eval(), layout, _notes(tensors, layout, groups, clamp))


def _split_projections(tensors: Mapping[str, Tensor], layout: str, dim: int, hidden: int) -> tuple[int, dict[str, Tensor]]:
    """Groups, and po (D, d/G), se (gates, d), se_bias, po_bias (where there is one), whatever the layout calls them."""
    if "qc_proj.weight" in tensors:
        rows, _ = _shape(tensors, "qc_proj.weight", None, dim)
        if rows <= hidden:
            raise CheckpointError(
                f"qc_proj.weight has {rows} rows; expected {hidden} of the projection and then the selection's"
            )
        weight = tensors["qc_proj.weight"]
        parts = {"po": weight[:hidden], "se": weight[hidden:], "se_bias": tensors["se_bias"]}
        groups = 1
    else:
        po = tensors["po_proj.weight"]
        if not _fits_projection(tuple(po.shape), dim, hidden):
            raise CheckpointError(
                f"po_proj.weight has shape {tuple(po.shape)}; expected ({hidden}, {dim}), or ({hidden}, {dim}/groups, 1)"
            )
        groups = dim // po.shape[1]
        _shape(tensors, "se_proj.weight", None, dim)
        se = tensors["se_proj.weight"]
        bias = tensors.get("se_proj.bias", se.new_zeros(se.shape[0]))
        parts = {"po": po.flatten(1), "se": se, "se_bias": bias}
        if "po_proj.bias" in tensors:
            parts["po_bias"] = tensors["po_proj.bias"]
        if layout == "compom-2025" and se.shape[0] == 1:  # one gate for all channels, which ours spell out
            parts |= {"se": se.expand(hidden, dim).contiguous(), "se_bias": bias.expand(hidden).contiguous()}
    gates = parts["se"].shape[0]
    if hidden % gates or (gates == 1 and hidden > 1):
        raise CheckpointError(
            f"the selection has {gates} rows; expected {hidden} (one for each channel) or heads that divide it"
        )
    if tuple(parts["se_bias"].shape) != (gates,):
        raise CheckpointError(f"the selection's bias has shape {tuple(parts['se_bias'].shape)}; expected ({gates},)")
    return groups, parts


def _fits_projection(shape: tuple[int, ...], dim: int, hidden: int) -> bool:
    """(D, d), or for a convolution of width 1 over groups (D, d/G, 1)."""
    return shape == (hidden, dim) or (
        len(shape) == 3 and shape[0] == hidden and shape[2] == 1 and shape[1] > 0 and dim % shape[1] == 0
    )


def _named_projections(
    tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor], groups: int, biased: bool
) -> dict[str, Tensor]:
    """The projections under the names of :class:`PoM`; unconverted tensors are passed on, not copied."""
    if groups > 1:
        named = {"po_proj.weight": tensors["po_proj.weight"], "se_proj.weight": parts["se"], "se_proj.bias": parts["se_bias"]}
        if biased:
            named["po_proj.bias"] = parts.get("po_bias", parts["po"].new_zeros(parts["po"].shape[0]))
        return named
    fused = tensors.get("qc_proj.weight")
    named = {"qc_proj.weight": torch.cat((parts["po"], parts["se"])) if fused is None else fused, "se_bias": parts["se_bias"]}
    return named | ({"po_bias": parts["po_bias"]} if "po_bias" in parts else {})


def _build_cumulative(tensors: Mapping[str, Tensor], layout: str, degree: int | None) -> PublishedLayer:
    first = "ho_proj" if layout == "homm" else "po_proj"
    dim, hidden = _shape(tensors, "ag_proj.weight", None, None)
    if hidden % dim:
        raise CheckpointError(f"ag_proj.weight is ({dim}, {hidden}); expected (dim, degree * expand * dim)")
    fitting = [k for k in range(1, hidden // dim + 1) if (hidden // dim) % k == 0]
    if degree is None and len(fitting) > 1:
        raise CheckpointError(
            f"layout {layout} does not tell its degree: degree * expand is {hidden // dim}. Give --degree, one of "
            f"{', '.join(map(str, fitting))}"
        )
    k = fitting[0] if degree is None else degree
    if k not in fitting:
        choices = ", ".join(map(str, fitting))
        raise CheckpointError(f"--degree is {k}, but degree * expand is {hidden // dim}; expected one of {choices}")
    biases = [name for name in (f"{first}.bias", "se_proj.bias", "ag_proj.bias") if name in tensors]
    with torch.device("meta"):
        mixer = CumulativePoM(dim, k, hidden // dim // k, bias=bool(biases))
    renamed = {name.replace("ho_proj", "po_proj"): tensor for name, tensor in tensors.items()}
    wanted = {name: parameter.shape for name, parameter in mixer.state_dict().items()}
    for name, shape in wanted.items():
        if name.endswith(".bias") and name not in renamed:
            renamed[name] = tensors["ag_proj.weight"].new_zeros(shape)
    _check_shapes(renamed, wanted)
    mixer.load_state_dict(renamed, assign=True)
    notes = []
    if layout == "homm":
        notes.append("HoMM divides a per-query masked sum by 1 + its token count; here it is a mean, as in all later layouts")
    return PublishedLayer(mixer.eval(), layout, notes)


def _notes(tensors: Mapping[str, Tensor], layout: str, groups: int, clamp: float | None) -> list[str]:
    notes = []
    if layout == "current-rotary" and clamp is None:
        notes.append(
            "the activation is clipped at 6, as in the published rotary layers; the layers distilled from SD3.5 have the same "
            "tensors but clip at 1: for those give --clamp 1.0 (or --layout rotary-sd35)"
        )
    if groups > 1:
        notes.append(
            f"{groups} groups: the published Triton kernels compute another function for grouped layers (0.66 to 0.95 relative "
            "error, silently). If they trained it on CUDA, compare with your PyTorch model on the CPU before relying on it"
        )
    if layout.startswith("current") and {"po_proj.bias", "se_proj.bias"} <= set(tensors):
        notes.append(
            "a grouped layer with biases is read as layout current; if compom 2025 code trained it (bias=True), give "
            "--layout compom-2025"
        )
    return notes


def _shape(tensors: Mapping[str, Tensor], name: str, rows: int | None, columns: int | None) -> tuple[int, int]:
    """The shape of a matrix; None accepts any size."""
    shape = tuple(tensors[name].shape)
    wanted = (rows, columns)
    if len(shape) != 2 or 0 in shape or any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
        raise CheckpointError(f"{name} has shape {shape}; expected ({rows or 'any'}, {columns or 'any'})")
    return shape[0], shape[1]


def _check_shapes(state: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    extra, missing = sorted(set(state) - set(wanted)), sorted(set(wanted) - set(state))
    if extra or missing:
        raise CheckpointError(f"the layer has {_some(extra) or 'nothing'} too many and lacks {_some(missing) or 'nothing'}")
    for name, shape in wanted.items():
        if state[name].shape != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(state[name].shape)}; expected {tuple(shape)} from the other tensors"
            )


def _no_layout(names: set[str]) -> CheckpointError:
    return CheckpointError(
        f"the tensors {_some(sorted(names))} fit no published PoM layer; expected po_coeff and ag_proj with qc_proj and "
        f"se_bias, or with po_proj and se_proj (layouts: {', '.join(LAYOUTS)})"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
