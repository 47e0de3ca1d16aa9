"""model.pt in and out: what is in a file, decided by its bytes and its tensor names, never by guessing.

our own format      torch.save or safetensors, weights only, with config, real samples, labels and class names
a published layer   bare state dict; the layout is read from the names (pom_edge.published)
any other model     state dict, safetensors or Lightning .ckpt, and a factory that builds the module
.pt2                torch.export archive, taken as it is
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.examples import load_example
from pom_edge.exchange import follow_umask, writing_errors
from pom_edge.filecontent import Stored, pickled_module, read_content
from pom_edge.fileformat import identify
from pom_edge.imports import call_named
from pom_edge.mixer import SETTINGS_KEY, CumulativePoM, PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.program import load_program
from pom_edge.published import LAYOUTS, build_layer, find_layers
from pom_edge.recognise import is_published, to_pom
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

    def check(self) -> None:
        """Refuse values that no file could make right.

        Raises:
            InputError: an unknown layout, a degree below 1, a clamp that is not a positive number.
        """
        if self.layout is not None and self.layout not in LAYOUTS:
            raise InputError(f"--layout is {self.layout!r}; expected one of {', '.join(LAYOUTS)}")
        if self.degree is not None and self.degree < 1:
            raise InputError(f"--degree is {self.degree}; expected at least 1")
        if self.clamp is not None and not 0 < self.clamp < float("inf"):
            raise InputError(f"--clamp is {self.clamp:g}; expected a positive number: 6 as published, 1 for layers of SD3.5")

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
    options.check()
    path = Path(path)
    if identify(path) == "pt2":
        options.refuse((*LAYER_OPTIONS, "factory"), "a .pt2 is a complete program")
        program = load_program(path, unsafe_pickle)
        check_finite(program.state_dict, path.name)
        return LoadedModel(None, "torch.export archive", exported_program=program)
    stored = read_content(path, unsafe_pickle)
    loaded = _interpret(stored, options, path)
    loaded.warnings[:0] = stored.warnings
    return loaded


def _interpret(stored: Stored, options: _Options, path: Path) -> LoadedModel:
    """What the content of a torch or safetensors file is: a module, our format, or a state dict."""
    content = stored.content
    module = pickled_module(content)
    if module is not None:
        return _from_pickle(module, options, path)
    if stored.metadata.get("format") == FORMAT:
        content = _unpack(content, stored.metadata, path)
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
        CheckpointError: the weights are not finite, or the model is not the one that ``config`` describes.
        InputError: the place cannot be written, or samples, labels and class names do not belong together.
    """
    path = Path(path)
    _check_extras(samples or {}, labels, class_names, path.name)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    check_finite(state, path.name)
    with torch.random.fork_rng(devices=[]):  # saving in the middle of a training run must not change its random numbers
        expected = {name: tensor.shape for name, tensor in build_model(config).state_dict().items()}
    if {name: tensor.shape for name, tensor in state.items()} != expected:
        raise CheckpointError(
            f"the weights of this {type(model).__name__} are not those that its config builds, so {path.name} could not be "
            "loaded; pass the config that build_model was called with"
        )
    samples = {name: tensor.detach().cpu().contiguous() for name, tensor in (samples or {}).items()}
    names = list(class_names) if class_names is not None else None
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing_errors(path):
            temporary.touch()  # a place that cannot be written shows here, as the system's own error
            if path.suffix == ".safetensors":
                # Tied weights share memory, which safetensors refuses: clone.
                tensors = {f"model.{name}": tensor.clone() for name, tensor in state.items()}
                tensors |= {f"sample.{name}": tensor for name, tensor in samples.items()}
                tensors |= {} if labels is None else {"labels": labels.cpu().contiguous()}
                metadata = {"format": FORMAT, "version": str(VERSION), "config": json.dumps(config.to_dict())}
                save_file(tensors, temporary, {**metadata, "class_names": json.dumps(names)})
                follow_umask(temporary)  # safetensors makes it private
            else:
                content = {"format": FORMAT, "version": VERSION, "config": config.to_dict(), "state_dict": state}
                with temporary.open("wb") as file:
                    torch.save({**content, "samples": samples, "labels": labels, "class_names": names}, file)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _check_extras(samples: Any, labels: Any, class_names: Any, source: str) -> None:
    """Samples are finite tensors of one batch, labels are as many; class names are texts."""
    if not isinstance(samples, Mapping) or not all(isinstance(value, Tensor) and value.ndim for value in samples.values()):
        raise InputError(f"{source}: expected samples to be a mapping of input name to tensor with a batch axis")
    if not isinstance(labels, Tensor | None):
        raise InputError(f"{source}: the labels are a {type(labels).__name__}; expected a tensor with one row for each sample")
    batches = {value.shape[0] for value in (*samples.values(), labels) if isinstance(value, Tensor)}
    if len(batches) > 1:
        raise InputError(f"{source}: samples and labels have {sorted(batches)} rows; expected the same number in each")
    if class_names is not None and (isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names)):
        raise InputError(f"{source}: expected class_names to be a list of texts, one for each class")
    check_finite({f"sample {name}": value for name, value in samples.items()}, source)


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
    samples, labels, class_names = content.get("samples") or {}, content.get("labels"), content.get("class_names")
    try:
        settings = ModelConfig.from_dict(config)
        _check_extras(samples, labels, class_names, path.name)
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error
    widened = to_float32(find_state(state, path.name).tensors)
    with torch.random.fork_rng(devices=[]):
        model = build_model(settings)
    warnings = widened.warnings + load_into(model, widened.tensors, path.name)
    return LoadedModel(
        model.eval(),
        "pom-edge checkpoint",
        config=settings,
        samples=dict(samples),
        labels=labels,
        class_names=None if class_names is None else list(class_names),
        warnings=warnings,
    )


def _from_pickle(model: nn.Module, options: _Options, path: Path) -> LoadedModel:
    options.refuse((*LAYER_OPTIONS, "factory"), "the file holds a complete pickled module")
    check_finite(dict(model.state_dict()), path.name)
    if is_published(model):
        layer = to_pom(model.float())
        return LoadedModel(layer.eval(), "pickled PoM layer", layer=layer)
    return LoadedModel(model.float().eval(), "pickled module")


def _from_state(content: Any, options: _Options, path: Path) -> LoadedModel:
    """A state dict: weights for the factory's module, or one published layer."""
    state = find_state(content, path.name)
    widened = to_float32(state.tensors)
    warnings = state.warnings + widened.warnings
    if options.factory is not None:
        options.refuse(LAYER_OPTIONS, "the factory's model says itself how its layers are built")
        model = _build(options.factory)
        try:
            warnings += load_into(model, widened.tensors, path.name)
        except CheckpointError as error:
            if find_layers(widened.tensors) != [""]:
                raise
            raise CheckpointError(f"{error}. The file holds one PoM layer: it is exported without --factory") from error
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
    try:
        layer = build_layer(without_prefix(widened.tensors, prefix), options.layout, options.degree, options.clamp)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    ours = prefix + SETTINGS_KEY in widened.tensors
    return LoadedModel(
        layer.mixer,
        "PoM layer with its settings" if ours else "published PoM layer",
        published_layout=None if ours else layer.layout,
        layer=layer.mixer,
        warnings=warnings + layer.warnings,
    )


def _build(factory: str | Callable[[], nn.Module]) -> nn.Module:
    model = call_named(factory, "--factory") if isinstance(factory, str) else factory()
    if not isinstance(model, nn.Module):
        raise InputError(f"the factory returned {type(model).__name__}; expected a torch.nn.Module")
    return model.float()
