"""State dicts as people save them: found inside whatever holds them, cleaned, and loaded strictly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import SETTINGS_KEY, PoM, read_settings
from pom_edge.published import fuse
from pom_edge.tables import TABLE_NAMES, TABLES, read_base, rotary_of

COMPILED = "_orig_mod."  # what torch.compile puts before the names, also in the middle of them
# Averaged copies: torch's AveragedModel, timm, ema_pytorch, latent diffusion, Lightning callbacks.
_EMA = {"ema", "ema_model", "model_ema", "ema_module", "ema_net", "net_ema", "ema_denoiser", "averaged_model", "shadow"}
_EMA |= {"state_dict_ema", "ema_state_dict", "model_ema_state_dict", "params_ema", "ema_params"}
_COUNTERS = {"n_averaged", "initted", "step", "num_updates", "decay"}  # of those copies, one number each
_TOLERANCE = 1e-4  # between two rotary bases that are the same number read from tables of different length or dtype

__all__ = ["State", "check_finite", "find_state", "load_into", "some", "to_float32", "without_prefix"]


@dataclass
class State:
    """Named tensors, and what the user should know about how they were found."""

    tensors: dict[str, Tensor]
    warnings: list[str] = field(default_factory=list)


def find_state(content: object, source: str) -> State:
    """The state dict in what a file held: itself, or an entry of a training checkpoint (Lightning's and others').

    Args:
        content: what torch.load or safetensors returned.
        source: file name, for messages.

    Raises:
        CheckpointError: no tensors, or several state dicts none of which is called ``state_dict``.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{source} holds a {type(content).__name__}; expected a state dict: {_HOW_TO_SAVE}")
    direct = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    entries = {str(key): value for key, value in content.items() if _holds_tensors(value)}
    live = [key for key in entries if not _is_ema(key)]
    averaged = [key for key in entries if _is_ema(key)] + [key for key in map(str, content) if key.startswith("ema_params")]
    if direct and not entries:
        return _checked(_without_copies(direct), source)
    if "state_dict" in live:
        live = ["state_dict"]
    if len(live) > 1:
        raise CheckpointError(
            f"{source} holds several state dicts ({some(live)}); expected one. Save the one you want alone: {_HOW_TO_SAVE}"
        )
    if live:
        state = _without_copies(_named(entries[live[0]]))
        if averaged:
            state.warnings.append(
                f"the weights of {live[0]!r} were loaded; the file also holds an averaged copy ({some(averaged)}). To use that "
                "one, save it alone as a state dict"
            )
        return _checked(state, source)
    if averaged and averaged[0] in entries:
        note = f"only an averaged copy of the weights ({averaged[0]!r}) was found, and loaded"
        return _checked(State(_named(entries[averaged[0]]), [note]), source)
    raise CheckpointError(
        f"{source} holds no weights, only {some([str(key) for key in content]) or 'an empty dict'}; expected a state dict: "
        f"{_HOW_TO_SAVE}"
    )


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN and Inf.

    Raises:
        CheckpointError: naming the first such tensor and how many of its values are bad.
    """
    bad = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            finite = torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())
            if not bool(finite.all()):
                bad.append((name, int((~finite).sum()), int(tensor.isnan().sum()), tensor.numel()))
    if bad:
        name, count, nans, numel = bad[0]
        others = f"; {len(bad) - 1} more tensors have some" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{source}: {name} holds {count} values that are not finite ({nans} NaN, {count - nans} Inf) of {numel}{others}. "
            "Expected a model that trained without diverging: go back to an earlier checkpoint"
        )


def to_float32(tensors: Mapping[str, Tensor]) -> State:
    """Widen (or from float64 narrow) weights to FP32, the precision everything is computed in, and say so.

    Rotary tables keep their type: how far they were rounded says how well their base is known.
    """
    weights = {name: t for name, t in tensors.items() if t.is_floating_point() and name.rpartition(".")[2] not in TABLE_NAMES}
    kinds = Counter(tensor.dtype for tensor in weights.values() if tensor.dtype != torch.float32)
    notes = []
    if kinds:
        listed = ", ".join(f"{count} as {str(dtype).removeprefix('torch.')}" for dtype, count in kinds.items())
        notes.append(f"weights are stored in another precision ({listed}); they are computed in FP32")
    return State({**tensors, **{name: tensor.float() for name, tensor in weights.items()}}, notes)


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> list[str]:
    """Load a state dict strictly: every tensor of the model, in its shape, and none left over.

    A common prefix (``module.``, ``denoiser.net.``, ...) is removed or added where that makes the names meet; rotary tables
    of another length are checked and not needed; tied weights may be stored once.

    Args:
        model: changed in place.
        tensors: FP32 (see :func:`to_float32`).
        source: file name, for messages.

    Returns:
        Warnings.

    Raises:
        CheckpointError: names or shapes that do not fit; the first few of each are listed.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    target = {name.replace(COMPILED, ""): value for name, value in own.items()}
    given, warnings = _align({name.replace(COMPILED, ""): tensor for name, tensor in tensors.items()}, target, source)
    _check_settings(given, target, model)
    warnings += _convert_old(given, target)
    warnings += _drop_tables(given, target, model)
    _fill_tied(given, target)
    problems = _differences(given, target)
    if problems:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: {'; '.join(problems)}. Expected the state dict of exactly the "
            "model that the factory builds: are its settings those of the training run?"
        )
    whole = {name: given[plain] for name in own if (plain := name.replace(COMPILED, "")) in target}
    model.load_state_dict(whole, strict=False)  # every name of the model is there, see above
    return warnings


_HOW_TO_SAVE = "torch.save(model.state_dict(), 'weights.pt')"


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _named(entry: Any) -> dict[str, Tensor]:
    return {str(name): tensor for name, tensor in entry.items() if isinstance(tensor, Tensor)}


def _is_ema(name: str) -> bool:
    """Whether the name starts with that of an averaged copy; deeper in, a module may well be called ``ema``."""
    parts = name.replace(COMPILED, "").split(".")
    return parts[0] in _EMA or (parts[0] in ("module", "model") and len(parts) > 2 and parts[1] in _EMA)


def _without_copies(tensors: dict[str, Tensor]) -> State:
    """Leave out averaged copies that lie beside the weights in one flat dict."""
    tensors = {name: tensor for name, tensor in tensors.items() if not (name in _COUNTERS and tensor.numel() == 1)}
    copies = [name for name in tensors if "." in name and _is_ema(name)]
    live = {name: tensor for name, tensor in tensors.items() if name not in set(copies)}
    if not copies or not live:
        return State(tensors, ["only an averaged copy of the weights was found, and loaded"] if copies else [])
    return State(live, [f"an averaged copy of the weights was left out ({some(copies)}); to use that one, save it alone"])


def _checked(state: State, source: str) -> State:
    for name, tensor in state.tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "without data" if tensor.is_meta else str(tensor.layout)
            raise CheckpointError(
                f"{source}: {name} is {kind}; expected plain dense tensors, as before quantization or pruning"
            )
    if not state.tensors:
        raise CheckpointError(f"{source} holds no weights; expected a state dict: {_HOW_TO_SAVE}")
    check_finite(state.tensors, source)
    return state


def _align(given: dict[str, Tensor], target: Mapping[str, Tensor], source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Add or remove the prefix that makes the names of the file those of the model."""
    removable = _prefixes(given, target)
    if removable and removable[0][0] != "":
        best = [prefix for prefix, votes in removable if votes == removable[0][1]]
        if len(best) > 1:
            raise CheckpointError(
                f"{source} holds this model {len(best)} times, under {some([repr(p) for p in best])}; expected once. Save the "
                "one you want alone"
            )
        inside = without_prefix(given, best[0])
        outside = [name for name in given if not name.startswith(best[0])]
        note = f"only the tensors under {best[0]!r} belong to the model; left out: {some(outside)}"
        return inside, [note] if outside else []
    addable = _prefixes(target, given)
    if not removable and addable:
        return {addable[0][0] + name: tensor for name, tensor in given.items()}, []
    return given, []


def _prefixes(longer: Mapping[str, Tensor], shorter: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Prefixes of ``longer`` before names of ``shorter``, by how many of a sample they fit; "" wins a draw."""
    votes: Counter[str] = Counter()
    for name in list(shorter)[:: max(1, len(shorter) // 32)]:
        votes.update(key[: -len(name)] for key in longer if key == name or key.endswith(f".{name}"))
    return sorted(votes.items(), key=lambda item: (-item[1], item[0] != ""))


def _check_settings(given: dict[str, Tensor], target: dict[str, Tensor], model: nn.Module) -> None:
    """Settings that were saved with the weights agree with the model's; then both are done with them.

    Raises:
        CheckpointError: a layer was trained with others, or with others than the published ones where the model has no PoM.
    """
    for name in [name for name in given if name.rpartition(".")[2] == SETTINGS_KEY]:
        owner = name.rpartition(".")[0]
        layer = _submodule(model, owner)
        if isinstance(layer, PoM):
            try:
                layer.check_settings(read_settings(given.pop(name)), owner or "the layer")
            except InputError as error:
                raise CheckpointError(str(error)) from error
    for name in [name for name in target if name.rpartition(".")[2] == SETTINGS_KEY]:
        del target[name]


def _convert_old(given: dict[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """compom-2026-03 tensors where the model has the current layout: the published training code migrates them as well."""
    converted = []
    for name in target:
        prefix = name.removesuffix("qc_proj.weight")
        old = {f"{prefix}{key}" for key in ("po_proj.weight", "se_proj.weight", "se_proj.bias")}
        if prefix == name or name in given or not old <= set(given) or f"{prefix}po_proj.bias" in given:
            continue
        layer = {key.removeprefix(prefix): given.pop(key) for key in old}
        given |= {prefix + key: tensor for key, tensor in fuse(layer).items()}
        converted.append(prefix.rstrip(".") or "the layer")
    return [f"converted from layout compom-2026-03: {some(converted)}"] if converted else []


def _drop_tables(given: dict[str, Tensor], target: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Rotary tables: of another length than the model's, or not needed by it, as long as they say the same base."""
    owners = sorted({name.rpartition(".")[0] for name in given if name.rpartition(".")[2] in TABLE_NAMES})
    resized = []
    for owner in owners:
        prefix = f"{owner}." if owner else ""
        tables = {name: given[prefix + name] for name in TABLE_NAMES if prefix + name in given}
        own = {name: target[prefix + name] for name in tables if prefix + name in target}
        layer = _submodule(model, owner)
        if not own and isinstance(layer, PoM) and layer.rotary is not None and rotary_of(set(tables)) == layer.rotary:
            base = read_base(tables, layer.rotary, layer.hidden)
            if abs(base / layer.rotary_base - 1) > _TOLERANCE:
                raise CheckpointError(
                    f"{owner or 'the layer'} has rotary_base {layer.rotary_base:g}, the tables in the file were made with "
                    f"{base:g}; build the model with rotary_base={base:g}"
                )
            for name in tables:
                del given[prefix + name]
        elif len(own) == len(tables) and _replaceable(own, tables):
            given |= {prefix + name: table for name, table in own.items()}
            resized.append(owner or "the layer")
    if not resized:
        return []
    return [f"rotary tables of another length or precision were left out; the model's own have the same base: {some(resized)}"]


def _replaceable(own: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> bool:
    """Whether the model's own tables stand for those of the file: other rows or rounding, the same base."""
    if all(own[name].shape == tables[name].shape and own[name].dtype == tables[name].dtype for name in own):
        return False  # nothing to replace: they load as they are
    if any(own[n].ndim != 2 or tables[n].ndim != 2 or own[n].shape[1] != tables[n].shape[1] for n in own):
        return False  # another width: reported as a shape that does not fit
    rotary = rotary_of(set(own))
    if rotary is None:
        return False
    hidden = own[TABLES[rotary][0][0]].shape[1] * 2 * len(TABLES[rotary])
    ours, theirs = read_base(own, rotary, hidden), read_base(tables, rotary, hidden)
    if abs(ours / theirs - 1) > _TOLERANCE:
        raise CheckpointError(
            f"the rotary tables in the file were made with base {theirs:g}, those of the model with {ours:g}; build the model "
            f"with rope_base={theirs:g}"
        )
    return True


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    modules = {name.replace(COMPILED, ""): module for name, module in model.named_modules()}
    return modules.get(path)


def _fill_tied(given: dict[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """A weight that the model uses twice may be stored once (safetensors does)."""
    stored = {(value.data_ptr(), value.shape): given[name] for name, value in target.items() if name in given and value.numel()}
    for name, value in target.items():
        if name not in given and (value.data_ptr(), value.shape) in stored:
            given[name] = stored[value.data_ptr(), value.shape]


def _differences(given: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    problems = []
    missing = [name for name in target if name not in given]
    unexpected = [name for name in given if name not in target]
    both = [name for name in target if name in given]
    shapes = [
        f"{name} is {tuple(given[name].shape)}, expected {tuple(target[name].shape)}"
        for name in both
        if given[name].shape != target[name].shape
    ]
    dtypes = [
        f"{name} is {given[name].dtype}, expected {target[name].dtype}"
        for name in both
        if given[name].is_floating_point() != target[name].is_floating_point()
    ]
    for what, found in (("missing", missing), ("unexpected", unexpected), ("other shapes", shapes), ("other types", dtypes)):
        if found:
            problems.append(f"{len(found)} {what} ({some(found, 4)})")
    return problems


def some(names: list[str], count: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
