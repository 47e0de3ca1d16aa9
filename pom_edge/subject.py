"""What is exported: a module or a program, with example inputs and everything the checkpoint says about it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pom_edge.checkpoint import LoadedModel, load_checkpoint
from pom_edge.errors import InputError
from pom_edge.examples import load_example, named_inputs
from pom_edge.export.forms import LayerModel, layer_example, layer_mask
from pom_edge.mixer import CumulativePoM, PoM
from pom_edge.models import ModelConfig, example_inputs
from pom_edge.recognise import unrecognised

if TYPE_CHECKING:
    from pom_edge.options import ExportOptions

__all__ = ["Subject", "subject_from_file", "subject_from_model"]


@dataclass
class Subject:
    """A model ready to be exported.

    Attributes:
        module: the module (for a ``.pt2`` the program's module).
        program: the ExportedProgram of a ``.pt2``.
        example: one tensor for each input, by tensor name.
        info: what the manifest says about the model.
        samples: real inputs that the checkpoint carried.
    """

    module: nn.Module
    example: dict[str, Tensor]
    info: dict[str, Any]
    program: torch.export.ExportedProgram | None = None
    samples: dict[str, Tensor] | None = None
    published_layout: str | None = None
    class_names: list[str] | None = None
    warnings: list[str] = field(default_factory=list)


def subject_from_file(path: Path, options: ExportOptions) -> Subject:
    """Read a model file as the options say.

    Raises:
        CheckpointError: the file is not what it claims to be.
        InputError: a factory's model without example inputs, or options that do not apply to this kind of file.
    """
    loaded = load_checkpoint(
        path,
        factory=options.factory,
        layout=options.layout,
        degree=options.degree,
        clamp=options.clamp,
        unsafe_pickle=options.unsafe_pickle,
    )
    if loaded.exported_program is not None:
        return _from_program(loaded, options)
    if loaded.model is None:
        raise InputError(f"{path.name} holds no model")
    if loaded.layer is not None:
        subject = _from_layer(loaded.layer, options)
    else:
        subject = _from_module(loaded.model, loaded.config, options, loaded.samples)
    subject.samples = loaded.samples or None
    subject.published_layout = loaded.published_layout
    subject.class_names = loaded.class_names
    subject.warnings = [*loaded.warnings, *subject.warnings]
    return subject


def subject_from_model(model: nn.Module, options: ExportOptions) -> Subject:
    """A model that is in memory already.

    Raises:
        InputError: its weights are not FP32, or as :func:`subject_from_file`.
    """
    other = {str(t.dtype) for t in model.state_dict().values() if t.is_floating_point() and t.dtype != torch.float32}
    if other:
        raise InputError(f"the model's weights are {', '.join(sorted(other))}; an export starts from FP32: call model.float()")
    if isinstance(model, (PoM, CumulativePoM)):
        return _from_layer(model, options)
    config = getattr(model, "config", None)
    return _from_module(model, config if isinstance(config, ModelConfig) else None, options, {})


def _from_layer(layer: PoM | CumulativePoM, options: ExportOptions) -> Subject:
    mask = layer_mask(options.mask)
    if options.form == "recurrent" and mask == "padding":  # a ragged stream is causal, and the form brings its mask
        module, padded = LayerModel(layer, "causal").eval(), False
    else:
        module, padded = LayerModel(layer, mask).eval(), mask == "padding"
    example = _example(options, module) or layer_example(layer, padded)
    if "mask" in example:
        example["mask"] = example["mask"].float()  # weights, as every session hands them over
    settings = {"dim": layer.dim, "degree": layer.degree, "expand": layer.expand, "bias": layer.bias}
    if isinstance(layer, PoM):
        names = ("n_groups", "n_sel_heads", "rotary", "rotary_base", "clamp_max", "gate", "first_power")
        settings |= {name: getattr(layer, name) for name in names}
    info = {"kind": "layer", "class": type(layer).__name__, "mask": mask, **settings}
    return Subject(module, example, info)


def _from_module(
    model: nn.Module, config: ModelConfig | None, options: ExportOptions, samples: Mapping[str, Tensor]
) -> Subject:
    example = _example(options, model)
    optional = config is not None and config.kind == "encoder" and not example  # the mask: there unless files are streamed
    recurrent = options.form == "recurrent" and options.mask in ("padding", "frames")
    if options.mask != "none" and not recurrent and not (optional and options.mask == "padding"):
        raise InputError(
            "--mask is for bare published layers, and padding for reference encoders too (or an --example with a mask); other "
            "models say themselves how their mixers are masked"
        )
    if not example and config is not None:
        asked = options.mask == "padding" or "mask" in samples
        masked = asked or (options.form != "streamed" and options.memory_budget is None)
        example = example_inputs(config, mask=masked)
    if not example and samples:
        example = {name: tensor[:2] for name, tensor in samples.items()}
    if not example:
        raise InputError(
            f"{type(model).__name__} needs example inputs to be traced; give --example FILE (.npz, .safetensors) or "
            "--example module:callable (from Python: example_inputs={...}), named as the arguments of forward"
        )
    info: dict[str, Any] = {"kind": "module", "class": type(model).__name__}
    if config is not None:
        info = {"kind": config.kind, "class": type(model).__name__, "config": config.to_dict()}
    left = [f"{path} stays as it is, neither lowered nor compared: {why}" for path, why in unrecognised(model).items()]
    return Subject(model.eval(), example, info, warnings=left)


def _from_program(loaded: LoadedModel, options: ExportOptions) -> Subject:
    program = loaded.exported_program
    assert isinstance(program, torch.export.ExportedProgram)
    if options.tokens is not None or options.batch is not None or options.mask != "none":
        raise InputError("--tokens, --batch and --mask do not apply to a .pt2: its shapes were fixed when it was exported")
    args, kwargs = program.example_inputs or ((), {})
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    example = _example(options, None) or dict(zip(names, tensors, strict=False))
    info = {"kind": "program", "class": "ExportedProgram"}
    return Subject(_ByPosition(program.module(), names), example, info, program, warnings=loaded.warnings)


class _ByPosition(nn.Module):
    """A program takes its inputs by position; sessions name them."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, **inputs: Tensor) -> Any:
        """Call by the order of the program's inputs."""
        return self.module(*(inputs[name] for name in self.names))


def _example(options: ExportOptions, module: nn.Module | None) -> dict[str, Tensor]:
    """Example inputs from ``--example`` or from Python, in the order of forward's arguments; empty where none were given."""
    given = options.example
    if given is None:
        return {}
    inputs = load_example(given) if isinstance(given, str) else named_inputs(given, "example_inputs")
    return inputs if module is None else _by_signature(inputs, module)


def _by_signature(inputs: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Order inputs as forward takes them; a lone ``x`` (a .npy file has no names) stands for the first argument.

    Raises:
        InputError: forward has no argument of that name, or needs one that is not given.
    """
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return inputs
    if list(inputs) == ["x"] and "x" not in parameters and parameters:
        inputs = {next(iter(parameters)): inputs["x"]}
    unknown = [name for name in inputs if name not in parameters]
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    missing = [name for name in needed if name not in inputs]
    if unknown or missing:
        wrong = f"has no argument {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)} too"
        raise InputError(
            f"the example gives {', '.join(inputs)}, but {type(module).__name__}.forward {wrong}; it takes "
            f"{', '.join(parameters)}"
        )
    return {name: inputs[name] for name in parameters if name in inputs}
