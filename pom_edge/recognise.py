"""The published PoM inside a user's model, known by its parameters and by what it computes rather than by its import path.

A copy of the published file in somebody's repository is the same layer, and its class is never imported. But equal tensors
do not mean equal functions: the upper bound of the activation, and the year of the mathematics, leave no trace in them (6 in
the published file, 1 in the copy that SD3.5 was distilled with). So every candidate is run beside the module on a few random
tokens, and only one that answers alike is taken; a modified layer stays what it is, and the reason can be asked for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import Mixer, PoM
from pom_edge.published import CUMULATIVE, LAYOUTS, SD35_CLAMP, build_layer
from pom_edge.tables import TABLE_NAMES, rotary_of

# The published forward arguments in their order; 1-D layers and old ones have the first few.
ARGUMENTS = ("xq", "xc", "mask", "positions", "ctx_positions", "positions_hw", "ctx_positions_hw")
PUBLISHED_CLAMP = 6.0
TOLERANCE = 1e-3  # relative; FP32 leaves 1e-5, the nearest other mathematics 3e-2
SCALES = (0.5, 3.0, 10.0)  # of the projected tokens: inside, around and far outside the bounds of the activation

# The methods that a mixer of ours is made of; one that was overridden is another mixer.
_MATHEMATICS = ("forward", "features", "activation", "projection", "selection", "selection_projection", "gate_theta", "readout")

__all__ = ["Recognised", "is_ours", "is_published", "recognise", "to_pom", "unrecognised"]


@dataclass(frozen=True)
class Recognised:
    """What a PoM-like module turned out to be.

    Attributes:
        mixer: the equivalent layer of ours, sharing the module's parameters where no conversion is needed; None if the
            module computes something else.
        layout: one of :data:`pom_edge.published.LAYOUTS`.
        reason: why there is no mixer, in words.
    """

    mixer: PoM | None
    layout: str | None = None
    reason: str = ""


def is_published(module: nn.Module) -> bool:
    """Whether a module is a published PoM or PoMRoPE that :func:`to_pom` can rebuild."""
    found = recognise(module)
    return found is not None and found.mixer is not None


def to_pom(module: nn.Module) -> PoM:
    """The layer of ours that computes what a published one does, with the same tensors. One of ours is returned as it is.

    Raises:
        InputError: the module is no PoM, or a modified one; the message says what differs.
    """
    if isinstance(module, PoM):
        return module
    found = recognise(module)
    if found is None:
        raise InputError(
            f"{type(module).__name__} is no PoM layer: expected parameters po_coeff and ag_proj with qc_proj and se_bias, or "
            "with po_proj and se_proj"
        )
    if found.mixer is None:
        raise InputError(f"{type(module).__name__} looks like the published PoM, but {found.reason}")
    return found.mixer


def unrecognised(model: nn.Module) -> dict[str, str]:
    """PoM-like submodules that stay as they are, by module path, with the reason."""
    found = {name: recognise(module) for name, module in model.named_modules()}
    return {name: result.reason for name, result in found.items() if result is not None and result.mixer is None}


def recognise(module: nn.Module) -> Recognised | None:
    """Compare a module with every published mathematics that its tensors allow.

    Returns:
        None for a module that is nothing like a PoM, or is ours (unless changed) already.
    """
    if isinstance(module, Mixer):
        reason = _changed(module)
        return Recognised(None, reason=reason) if reason else None
    if not _looks_like_pom(module):
        return None
    if _hooked(module):
        return Recognised(None, reason=_hooked(module))
    arguments = list(inspect.signature(module.forward).parameters)
    if not arguments or arguments != list(ARGUMENTS[: len(arguments)]):
        return Recognised(None, reason=f"its forward takes {', '.join(arguments) or 'nothing'}, not {', '.join(ARGUMENTS[:3])}")
    # Parameters as they are (so that they are shared), and buffers, persistent or not.
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        probe = _Probe(module, tensors, arguments)
    except Exception as error:  # whatever the foreign forward raises: it then keeps doing so, as it is
        return Recognised(None, reason=f"it cannot be run by itself on a few tokens ({type(error).__name__}: {error})")
    closest, refusal = float("inf"), ""
    for layout, clamp in _candidates(module):
        try:
            mixer = build_layer(tensors, layout, clamp=clamp).mixer
        except CheckpointError as error:
            refusal = refusal or str(error)
            continue
        assert isinstance(mixer, PoM)
        error_ratio = probe.error(mixer)
        if error_ratio <= TOLERANCE:
            return Recognised(mixer.train(module.training), layout)
        closest = min(closest, error_ratio)
    if closest < float("inf"):
        refusal = f"it computes something else than any published version (relative error at best {closest:.2g})"
    return Recognised(None, reason=refusal)


def is_ours(module: nn.Module) -> bool:
    """Whether a module is a mixer of this package that computes what its class says."""
    return isinstance(module, Mixer) and not _changed(module)


def _changed(mixer: Mixer) -> str:
    """How a mixer of ours was made to compute something else; empty where it was not."""
    for name in _MATHEMATICS:
        if name in vars(mixer):
            return f"its {name} was replaced"
        method = getattr(type(mixer), name, None)
        if method is not None and not str(method.__module__).startswith("pom_edge."):
            return f"{type(mixer).__name__} overrides {name}"
    return _hooked(mixer)


def _hooked(module: nn.Module) -> str:
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which may change what it computes: remove them to have it lowered"
    return ""


def _looks_like_pom(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters(recurse=False)} | {name for name, _ in module.named_children()}
    return {"po_coeff", "ag_proj"} <= names and ({"qc_proj", "se_bias"} <= names or {"po_proj", "se_proj"} <= names)


def _candidates(module: nn.Module) -> list[tuple[str, float | None]]:
    """Layouts and clamps to try, the most likely first."""
    own = getattr(module, "clamp_max", None)
    clamps = [float(own)] if isinstance(own, (int, float)) else []
    clamps += [clamp for clamp in (PUBLISHED_CLAMP, SD35_CLAMP) if clamp not in clamps]
    layouts = [name for name in LAYOUTS if name not in (*CUMULATIVE, "rotary-sd35")]
    clipped = [(layout, clamp) for clamp in clamps for layout in layouts if layout != "compom-2025"]
    return [*clipped, ("compom-2025", None)]


class _Probe:
    """A module's answers to a few random tokens, and how far those of a candidate are from them."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], arguments: list[str]) -> None:
        copied = copy.deepcopy(module).to(device="cpu", dtype=torch.float32).eval()
        self.bias = tensors.get("ag_proj.bias")
        self.inputs = _inputs(tensors, arguments)
        with torch.no_grad():
            self.answers = [self._centred(copied(**_published(inputs, arguments))) for inputs in self.inputs]

    def error(self, mixer: PoM) -> float:
        """The largest relative error over all inputs and scales."""
        copied = copy.deepcopy(mixer).to(device="cpu", dtype=torch.float32).eval()
        worst = 0.0
        with torch.no_grad():
            for inputs, expected in zip(self.inputs, self.answers, strict=True):
                found = self._centred(copied(**inputs))
                if found.shape != expected.shape:
                    return float("inf")
                scale = expected.norm(dim=-1)
                ratio = (found - expected).norm(dim=-1) / torch.where(scale > 0, scale, torch.ones_like(scale))
                worst = max(worst, float(ratio.nan_to_num(torch.inf).max()))
        return worst

    def _centred(self, y: Tensor) -> Tensor:
        """(B, T d) without the readout's bias, which would hide what fresh coefficients (near 0.001) contribute."""
        bias = 0.0 if self.bias is None else self.bias.detach().float().cpu()
        return (y.float() - bias).flatten(1).double()


def _inputs(tensors: Mapping[str, Tensor], arguments: list[str]) -> list[dict[str, Tensor]]:
    """Arguments of :meth:`PoM.forward`: tokens alone, and (where the module has them) a context with a padding mask."""
    generator = torch.Generator().manual_seed(20260404)
    dim, hidden = tensors["ag_proj.weight"].shape
    weight = tensors.get("qc_proj.weight", tensors.get("po_proj.weight"))
    assert weight is not None
    gain = weight.detach().float().cpu()[:hidden].flatten(1).norm(dim=1).mean().clamp(min=1e-6)
    scales = torch.tensor(SCALES).view(-1, 1, 1) / gain
    rotary = rotary_of(set(tensors))
    rows = min([4, *(tensors[name].shape[0] for name in TABLE_NAMES & set(tensors))])
    queries, tokens = min(3, rows), rows
    n = torch.arange(rows)
    positions = {"1d": n, "2d": torch.stack((n // 2, n % 2), dim=-1)}
    where = {} if rotary is None else {"positions": positions[rotary][:queries]}
    x = torch.randn(len(SCALES), queries, dim, generator=generator) * scales
    cases = [{"x": x, **where}]
    if {"xc", "mask"} <= set(arguments):
        context = torch.randn(len(SCALES), tokens, dim, generator=generator) * scales
        mask = torch.ones(len(SCALES), tokens)
        mask[:, 0] = 0.5
        where |= {} if rotary is None else {"context_positions": positions[rotary]}
        cases.append({"x": x, "context": context, "mask": mask, **where})
    return cases


def _published(inputs: Mapping[str, Tensor], arguments: list[str]) -> dict[str, Any]:
    """The same inputs under the published argument names."""
    suffix = "_hw" if inputs.get("positions", torch.zeros(1)).ndim == 2 else ""
    names = {"x": "xq", "context": "xc", "positions": f"positions{suffix}", "context_positions": f"ctx_positions{suffix}"}
    return {names.get(name, name): value for name, value in inputs.items() if names.get(name, name) in arguments}
