"""model.pt in and out: what is in a file, decided by its bytes and its tensor names, never by guessing.

our own format      torch.save or safetensors, weights only, with config, real samples, labels and class names
a published layer   bare state dict; the layout is read from the names (pom_edge.published)
any other model     state dict, safetensors or Lightning .ckpt, and a factory that builds the module
.pt2                torch.export archive, taken as it is
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.examples import call_named, load_example
from pom_edge.exchange import writing_errors
from pom_edge.fileformat import identify
from pom_edge.mixer import CumulativePoM, PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.program import load_program
from pom_edge.published import build_layer, find_layers
from pom_edge.weights import check_finite, find_state, load_into, some, to_float32, without_prefix

FORMAT = "pom-edge"
VERSION = 1

__all__ = ["LoadedModel", "load", "load_checkpoint", "load_example", "save_checkpoint"]


@dataclass
class LoadedModel:
    """What a model file held.

    Attributes:
        model: the module in eval mode, FP32; None for a ``.pt2``.
        format: in words, for people.
        config: of a reference model.
        published_layout: of a published layer.
        layer: the layer itself, where the file holds nothing else.
        samples: real inputs by tensor name.
        warnings: what the user should know, one sentence each.
    """

    model: nn.Module | None
    format: str
    exported_program: torch.export.ExportedProgram | None = None
    config: ModelConfig | None = None
    published_layout: str | None = None
    layer: PoM | CumulativePoM | None = None
    samples: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    class_names: list[str] | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Options:
    factory: str | Callable[[], nn.Module] | None
    layout: str | None
    degree: int | None
    clamp: float | None
    unsafe_pickle: bool

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Options that would be ignored are refused, so that nobody believes they worked."""
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise InputError(f"{flags}: {why}; leave it out")


LAYER_OPTIONS = ("layout", "degree", "clamp")


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    factory: str | Callable[[], nn.Module] | None = None,
    layout: str | None = None,
    degree: int | None = None,
    clamp: float | None = None,
    unsafe_pickle: bool = False,
) -> LoadedModel:
    """Load a model file.

    Args:
        path: the file.
        factory: ``"package.module:callable"``, ``"file.py:callable"`` or a callable that returns the module whose weights the
            file holds.
        layout, degree, clamp: settings of a published layer that its tensors do not tell.
        unsafe_pickle: also load what the weights-only reader refuses. That runs code from the file.

    Raises:
        CheckpointError: the file is missing, damaged, of another kind, ambiguous, or does not fit the module.
        InputError: options that do not apply to this kind of file.
    """
    options = _Options(factory, layout, degree, clamp, unsafe_pickle)
    path = Path(path)
    kind = identify(path)
    if kind == "pt2":
        options.refuse((*LAYER_OPTIONS, "factory"), "a .pt2 is a complete program")
        return LoadedModel(None, "torch.export archive", exported_program=load_program(path, unsafe_pickle))
    content, metadata = _read_safetensors(path) if kind == "safetensors" else (_read_torch(path, unsafe_pickle), {})
    if isinstance(content, nn.Module):
        return _from_pickle(content, options)
    if metadata.get("format") == FORMAT:
        content = _unpack(content, metadata, path)
    if isinstance(content, Mapping) and content.get("format") == FORMAT:
        options.refuse(
            (*LAYER_OPTIONS, "factory"), f"{path.name} is a pom-edge checkpoint and says itself how its model is built"
        )
        return _from_ours(content, path)
    return _from_state(content, options, path)


def load(path: str | os.PathLike[str], **options: Any) -> nn.Module:
    """The module that a file holds; options as for :func:`load_checkpoint`. A published layer gives that layer.

    Raises:
        CheckpointError: as :func:`load_checkpoint`; also for a ``.pt2``, which holds a program and no module.
    """
    loaded = load_checkpoint(path, **options)
    if loaded.model is None:
        raise CheckpointError(f"{path} is a torch.export archive; load it with torch.export.load(path).module()")
    return loaded.model


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    config: ModelConfig,
    *,
    samples: Mapping[str, Tensor] | None = None,
    labels: Tensor | None = None,
    class_names: Sequence[str] | None = None,
) -> None:
    """Write a reference model, whole or not at all; a name ending in ``.safetensors`` chooses that format.

    Args:
        path: where to.
        model: built by :func:`pom_edge.build_model` from ``config``.
        config: its settings.
        samples: a few real inputs by tensor name: they become golden and calibration data.
        labels: of the samples.
        class_names: of a classifier.

    Raises:
        InputError: the place cannot be written, or the weights are not finite.
    """
    path = Path(path)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    check_finite(state, path.name)
    samples = {name: tensor.detach().cpu().contiguous() for name, tensor in (samples or {}).items()}
    names = list(class_names) if class_names is not None else None
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing_errors(path):
            if path.suffix == ".safetensors":
                tensors = {
                    f"model.{name}": tensor.clone() for name, tensor in state.items()
                }  # clone: tied weights share memory
                tensors |= {f"sample.{name}": tensor for name, tensor in samples.items()}
                tensors |= {} if labels is None else {"labels": labels.cpu().contiguous()}
                metadata = {"format": FORMAT, "version": str(VERSION), "config": json.dumps(config.to_dict())}
                save_file(tensors, temporary, {**metadata, "class_names": json.dumps(names)})
            else:
                content = {"format": FORMAT, "version": VERSION, "config": config.to_dict(), "state_dict": state}
                torch.save({**content, "samples": samples, "labels": labels, "class_names": names}, temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_torch(path: Path, unsafe_pickle: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if unsafe_pickle:
            return _read_pickle(path)
        raise CheckpointError(
            f"{path} holds pickled Python objects, and loading those runs code from the file; expected weights only. In the "
            "environment that made it: torch.save(model.state_dict(), 'weights.pt'), then give --factory. If you trust the "
            f"file, --unsafe-pickle loads it ({_reason(error)})"
        ) from error
    except Exception as error:  # zip, storage and size errors of a damaged file
        raise CheckpointError(
            f"{path} cannot be read: {_reason(error)}. The file is truncated or damaged; copy or save it again"
        ) from error


def _read_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be unpickled here: {_reason(error)}; its classes must be importable") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unsupported = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return ((unsupported or lines)[0] if lines else type(error).__name__)[:200]


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {_reason(error)}; copy or save it again") from error


def _unpack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Our safetensors file as the dict that our torch.save files hold."""
    try:
        version = int(metadata["version"])
        config, class_names = json.loads(metadata["config"]), json.loads(metadata.get("class_names", "null"))
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the metadata of this pom-edge checkpoint is damaged ({error}); save it again"
        ) from error
    return {
        "format": FORMAT,
        "version": version,
        "config": config,
        "state_dict": without_prefix(tensors, "model."),
        "samples": without_prefix(tensors, "sample."),
        "labels": tensors.get("labels"),
        "class_names": class_names,
    }


def _from_ours(content: Mapping[str, Any], path: Path) -> LoadedModel:
    version = content.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} is a pom-edge checkpoint of version {version!r}, this release reads 1 to {VERSION}; "
            "update with: pip install --upgrade pom-edge"
        )
    config, state = content.get("config"), content.get("state_dict")
    if not isinstance(config, Mapping) or not isinstance(state, Mapping):
        raise CheckpointError(f"{path} lacks config or state_dict; expected what pom_edge.save_checkpoint writes")
    try:
        settings = ModelConfig.from_dict(config)
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error
    check_finite(state, path.name)
    widened = to_float32(state)
    model = build_model(settings)
    warnings = widened.warnings + load_into(model, widened.tensors, path.name)
    return LoadedModel(
        model.eval(),
        "pom-edge checkpoint",
        config=settings,
        samples=dict(content.get("samples") or {}),
        labels=content.get("labels"),
        class_names=content.get("class_names"),
        warnings=warnings,
    )


def _from_pickle(model: nn.Module, options: _Options) -> LoadedModel:
    options.refuse((*LAYER_OPTIONS, "factory"), "the file holds a complete pickled module")
    check_finite(model.state_dict(), type(model).__name__)
    note = "the module was unpickled, which ran code from the file; a state dict with --factory does not need that"
    return LoadedModel(model.float().eval(), "pickled module", warnings=[note])


def _from_state(content: Any, options: _Options, path: Path) -> LoadedModel:
    """A state dict: weights for the factory's module, or one published layer."""
    state = find_state(content, path.name)
    check_finite(state.tensors, path.name)
    widened = to_float32(state.tensors)
    warnings = state.warnings + widened.warnings
    if options.factory is not None:
        options.refuse(LAYER_OPTIONS, "the factory's model says itself how its layers are built")
        model = _build(options.factory)
        warnings += load_into(model, widened.tensors, path.name)
        return LoadedModel(model.eval(), "state dict", warnings=warnings)
    prefixes = find_layers(widened.tensors)
    if not prefixes:
        raise CheckpointError(
            f"{path} is a state dict without a PoM layer (it holds {some(list(widened.tensors))}); expected a pom-edge "
            "checkpoint, a published PoM layer, or give --factory module:callable to say which model these weights belong to"
        )
    prefix = prefixes[0]
    others = [name for name in widened.tensors if not name.startswith(prefix)]
    if len(prefixes) > 1 or others:
        what = f"{len(prefixes)} PoM layers ({some([p.rstrip('.') or 'the top level' for p in prefixes])})"
        beside = f" and {some(others)} beside" if others else ""
        raise CheckpointError(
            f"{path} holds {what}{beside}: a whole model, and weights alone do not say how it computes. Give --factory "
            "module:callable that returns the module, and --example with its inputs"
        )
    layer = build_layer(without_prefix(widened.tensors, prefix), options.layout, options.degree, options.clamp)
    return LoadedModel(
        layer.mixer,
        "published PoM layer",
        published_layout=layer.layout,
        layer=layer.mixer,
        warnings=warnings + layer.warnings,
    )


def _build(factory: str | Callable[[], nn.Module]) -> nn.Module:
    model = call_named(factory, "--factory") if isinstance(factory, str) else factory()
    if not isinstance(model, nn.Module):
        raise InputError(f"the factory returned {type(model).__name__}; expected a torch.nn.Module")
    return model.float()
