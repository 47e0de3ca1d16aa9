"""A lowered model to an ONNX graph: torch.export, torch.onnx, names that a reader recognises, nothing local left in it.

One graph serves both purposes: it is exported with the output of every mixer as an extra output ("tap"), checked so, and
saved without them.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.convenience import create_value_mapping
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from pom_edge.errors import InputError
from pom_edge.export.inputs import BATCH, Axes, Extent
from pom_edge.export.quiet import quiet
from pom_edge.export.reference import Taps, named_outputs
from pom_edge.export.streamed import OFFSET, VALID, Pass, Split

WIDE = 4096  # tokens up to which a narrow range is traced where it must be
OPSET = 18  # complete in ONNX Runtime's CUDA kernels and in JetPack 6's parser; 19 and later leave operators on the CPU
MAX_IR_VERSION = 10  # ONNX Runtime refuses what it does not know (onnxruntime#23602)
EXTERNAL_BYTES = 1 << 30  # protobuf stops at 2 GiB; weights beyond half of that go into a file beside the graph

__all__ = [
    "OPSET",
    "Boundary",
    "Graph",
    "check_file",
    "Traced",
    "export_graph",
    "save_graph",
    "table_rows",
    "trace_graph",
    "trace_pass",
    "traced_program",
    "translate",
]


@dataclass(frozen=True)
class Traced:
    """A traced model on its way to ONNX: quantization replaces the program and keeps the rest.

    Attributes:
        program: what is translated.
        inputs, outputs: names of the graph's inputs and outputs, in order.
        taps: module paths of the mixers whose outputs the program returns after its own.
        axes: free axes by input name; None takes them as the program has them.
        mixers, layer_norms: see :class:`Graph`.
        prefix: module path of the model within what was traced.
        arguments, dynamic_shapes: what was given to ``torch.export.export``, to trace a changed module again.
    """

    program: torch.export.ExportedProgram
    inputs: list[str]
    outputs: list[str]
    taps: list[str] = field(default_factory=list)
    axes: Axes | None = field(default_factory=dict)
    mixers: list[str] = field(default_factory=list)
    layer_norms: list[str] = field(default_factory=list)
    prefix: str = ""
    arguments: tuple[Any, ...] = ()
    dynamic_shapes: Any = None


@dataclass
class Graph:
    """An exported graph and where its parts come from.

    Attributes:
        model: the graph, without taps.
        outputs: names of the graph's outputs.
        taps: module path of each mixer -> the value that holds its output.
        layer_norms: module paths of the model's LayerNorms.
        mixers: module paths of the mixers.
    """

    model: ir.Model
    outputs: list[str]
    taps: dict[str, ir.Value] = field(default_factory=dict)
    layer_norms: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)

    def clone(self) -> Graph:
        """A copy whose model can be changed."""
        model = self.model.clone()
        values = create_value_mapping(model.graph)
        taps = {path: values[str(value.name)] for path, value in self.taps.items()}
        return Graph(model, self.outputs, taps, self.layer_norms, self.mixers)

    @contextlib.contextmanager
    def tapped(self) -> Iterator[ir.Model]:
        """The model with every mixer's output as a further graph output, for as long as the context lasts."""
        kept = len(self.model.graph.outputs)
        self.model.graph.outputs.extend(self.taps.values())
        try:
            yield self.model
        finally:
            _drop_outputs(self.model, kept)


def _drop_outputs(model: ir.Model, kept: int) -> None:
    """Keep the first outputs only. One by one: a deleted slice stays marked as output, and loses its shape when saved."""
    while len(model.graph.outputs) > kept:
        model.graph.outputs.pop()


@contextlib.contextmanager
def accepting(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a model on its example inputs, without gradients.

    Raises:
        InputError: it does not accept them.
    """
    try:
        with torch.no_grad():
            yield
    except InputError:
        raise
    except Exception as error:  # whatever a user's model can raise
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        raise InputError(f"the model does not accept its example inputs, {shapes}: {_first_lines(error, 2)}") from error


class Boundary(nn.Module):
    """The traced module: inputs by name in, outputs and taps as one flat tuple out."""

    def __init__(self, model: nn.Module, mixers: list[str]) -> None:
        super().__init__()
        self.model = model
        self.mixers = mixers

    def run(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Outputs and taps by name."""
        with Taps(self.model, self.mixers) as taps:
            outputs = named_outputs(self.model(**inputs))
        return outputs, taps.values

    def names(self, inputs: dict[str, Tensor]) -> tuple[list[str], list[str]]:
        """Names of outputs and taps, by one run of the model.

        Raises:
            InputError: it does not accept the inputs.
        """
        with accepting(inputs):
            names, taps = (list(tensors) for tensors in self.run(inputs))
        taken = sorted(set(names) & set(inputs))
        if taken:
            raise InputError(f"output {', '.join(taken)} of the model has the name of an input; a graph needs other names")
        return names, taps

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs, taps = self.run(inputs)
        return (*outputs.values(), *taps.values())


def trace_graph(
    model: nn.Module,
    mixers: list[str],
    inputs: dict[str, Tensor],
    axes: Axes,
    extents: Mapping[str, Extent] | None = None,
    inside: str = "",
) -> Traced:
    """Trace a lowered model.

    Args:
        model: as returned by :func:`pom_edge.export.lowering.lower`.
        mixers: module paths to tap.
        inputs: example inputs; free axes at least 2 long (torch.export bakes in 0 and 1).
        axes: free axes by name.
        inside: where in ``model`` the original is ("model."): its paths name mixers and nodes.
        extents: upper bounds of free axes, for models that limit their length (a table of positions).

    Raises:
        InputError: the model cannot be traced, with torch's reason and what can be done.
    """
    boundary = Boundary(model, [inside + name for name in mixers if name])
    names_of_axes = {dim for shape in axes.values() for dim in shape if isinstance(dim, str)}
    asked = {axis: (extents or {}).get(axis, Extent()) for axis in sorted(names_of_axes)}
    names, tap_names = boundary.names(inputs)
    arguments: tuple[Any, ...] = (inputs,)
    free: Any = _free(axes, asked)
    try:
        try:
            program = trace(boundary, arguments, free)
        except AssertionError as error:
            if "inconsistent min" not in str(error):
                raise
            # tokens // 32 has one value in a narrow range, which torch.export (2.13) takes for a contradiction
            free = _free(axes, {axis: _widened(extent) for axis, extent in asked.items()})
            program = trace(boundary, arguments, free)
    except InputError:
        raise
    except Exception as error:  # whatever a user's model can raise while traced
        raise InputError(_untraceable(error, axes)) from error
    return Traced(
        program,
        list(inputs),
        names,
        [name.removeprefix(inside) for name in tap_names],
        axes,
        mixers,
        [name.removeprefix(inside) for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)],
        f"model.{inside}".rstrip("."),
        arguments,
        free,
    )


def _free(axes: Axes, extents: Mapping[str, Extent]) -> dict[str, Any]:
    """``dynamic_shapes`` of the inputs."""
    dims = {
        axis: torch.export.Dim(axis, min=extent.minimum if extent.minimum > 1 else None, max=extent.maximum)
        for axis, extent in extents.items()
    }
    return {"inputs": {name: {i: dims[d] for i, d in enumerate(shape) if isinstance(d, str)} for name, shape in axes.items()}}


def _widened(extent: Extent) -> Extent:
    return Extent() if extent.maximum is None else Extent(2, extent.optimum, max(extent.maximum, WIDE))


def trace(module: nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    """``torch.export.export`` with our settings."""
    with quiet(), torch.no_grad():
        return torch.export.export(
            module,
            arguments,
            dynamic_shapes=dynamic_shapes,
            strict=False,
            # Guards about the padding of the running sum hold by construction; as guards they would pin the token
            # count, as assertions they are dropped. A model that does pin it fails the run at several sizes.
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def traced_program(program: torch.export.ExportedProgram, input_names: list[str]) -> Traced:
    """An ExportedProgram (``.pt2``) as it is: no lowering, no taps."""
    count = len(program.graph_signature.user_outputs)
    return Traced(program, input_names, ["y", *(f"output_{i}" for i in range(1, count))], axes=None)


def trace_pass(step: Pass, split: Split, mixers: list[str]) -> Traced:
    """One pass of the streamed form: static shapes, inputs and outputs under the names of the split."""
    feeds = tuple(_pass_input(name, split) for name in step.inputs)
    kept = len(step.outputs) - len(step.taps)
    return Traced(
        trace(step.module, feeds, None),
        step.inputs,
        step.outputs[:kept],
        list(step.taps),
        mixers=mixers,
        prefix="model",
        arguments=feeds,
    )


def translate(traced: Traced) -> Graph:
    """A traced model to ONNX: opset 18, standard domain, names that a reader recognises.

    Raises:
        InputError: torch.onnx cannot translate it.
    """
    model = _to_onnx(traced.program, traced.inputs, [*traced.outputs, *traced.taps])
    if traced.axes is None:
        for value in model.graph.inputs:
            if value.shape is not None and any(not isinstance(dim, int) for dim in value.shape):
                _rename_symbols(
                    model, {str(dim): _axis_name(i, value) for i, dim in enumerate(value.shape) if not isinstance(dim, int)}
                )
    else:
        _name_axes(model, traced.axes)
    kept = len(traced.outputs)
    taps = dict(zip(traced.taps, model.graph.outputs[kept:], strict=True))
    _drop_outputs(model, kept)
    return _tidy(Graph(model, traced.outputs, taps, traced.layer_norms, traced.mixers), traced.prefix)


def _pass_input(name: str, split: Split) -> Tensor:
    if name == OFFSET:
        return torch.tensor(0)
    chunk = next(split.shapes[known][axis] for known, axis in split.token_axes.items())
    return torch.ones(chunk) if name == VALID else torch.zeros(split.shapes[name], dtype=split.dtypes[name])


def _axis_name(index: int, value: ir.Value) -> str:
    return ("batch", "tokens")[index] if index < 2 else f"{value.name}_dim{index}"


def _to_onnx(program: torch.export.ExportedProgram, input_names: list[str], output_names: list[str]) -> ir.Model:
    try:
        with quiet():
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                optimize=True,
                input_names=input_names,
                output_names=output_names,
                verbose=False,
            )
    except Exception as error:
        raise InputError(f"torch.onnx cannot translate the model: {_first_lines(error)}") from error
    assert onnx_program is not None  # only None for the legacy exporter that writes to a file
    model = onnx_program.model
    found = model.opset_imports.get("")
    if found != OPSET:  # asked for 17, torch 2.13 logs a traceback and leaves 18: so read it back
        raise InputError(f"torch.onnx made opset {found}, asked for {OPSET}; the tested torch range is in the README")
    return model


def _name_axes(model: ir.Model, axes: Axes) -> None:
    """torch calls free axes s21; give them back their names, in inputs and in every expression made of them."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        if value.shape is None or value.name not in axes:
            continue
        for found, wanted in zip(value.shape, axes[value.name], strict=True):
            if isinstance(wanted, str) and not isinstance(found, int):
                names[str(found)] = wanted
    _rename_symbols(model, names)


def _rename_symbols(model: ir.Model, names: dict[str, str]) -> None:
    def renamed(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dim, int) or dim.value is None:
            return dim
        tree = ast.parse(dim.value, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
        return ir.SymbolicDim(ast.unparse(tree))

    values = list(model.graph.inputs)
    values += [output for node in model.graph for output in node.outputs]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])


def _tidy(graph: Graph, prefix: str) -> Graph:
    """Name nodes by module path, drop what taps left behind, strip everything that speaks of this machine."""
    with graph.tapped() as model:
        RemoveUnusedNodesPass()(model)
    _fuse_gelu(graph.model)
    counts: Counter[str] = Counter()
    for node in graph.model.graph:
        path = _module_path(node, prefix)
        stem = f"{path}/{node.op_type}" if path else node.op_type
        counts[stem] += 1
        node.name = f"{stem}_{counts[stem] - 1}"
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
            output.doc_string = None
    for value in (*graph.model.graph.inputs, *graph.model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    graph.model.metadata_props.clear()
    graph.model.graph.metadata_props.clear()
    graph.model.graph.doc_string = None
    graph.model.graph.name = "pom_edge"
    graph.model.doc_string = None
    return graph


def _fuse_gelu(model: ir.Model) -> None:
    """x (0.5 (1 + erf(x / sqrt 2)))  ->  0.5 (x (1 + erf(x / sqrt 2))), the same bits: a half is exact.

    torch.onnx writes the first at opset 18, ONNX Runtime (1.32) fuses the second alone: a third of the time, no temporaries.
    """
    for outer in list(model.graph):
        for at, inner in enumerate(value.producer() if value is not None else None for value in outer.inputs):
            if outer.op_type != "Mul" or inner is None or inner.op_type != "Mul" or len(inner.outputs[0].uses()) != 1:
                continue
            x = outer.inputs[1 - at]
            halves = [i for i, value in enumerate(inner.inputs) if _is_number(value, 0.5)]
            if x is None or len(halves) != 1 or not _one_plus_erf(inner.inputs[1 - halves[0]], x):
                continue
            half = inner.inputs[halves[0]]
            inner.replace_input_with(halves[0], x)
            outer.replace_input_with(1 - at, half)
            break


def _one_plus_erf(value: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value is 1 + erf(x / c)."""
    add = None if value is None else value.producer()
    if add is None or add.op_type != "Add" or not any(_is_number(v, 1.0) for v in add.inputs):
        return False
    erfs = [v.producer() for v in add.inputs if v is not None and v.producer() is not None]
    erf = erfs[0] if erfs else None
    inside = erf.inputs[0] if erf is not None and erf.op_type == "Erf" else None
    scaled = inside.producer() if inside is not None else None
    return scaled is not None and scaled.op_type in ("Div", "Mul") and scaled.inputs[0] is x


def _is_number(value: ir.Value | None, number: float) -> bool:
    constant = None if value is None else value.const_value
    return constant is not None and constant.size == 1 and float(constant.numpy().reshape(())) == number


def _module_path(node: ir.Node, prefix: str) -> str:
    """The innermost module that torch recorded for a node, without our own wrapper's name."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if not scopes:
        return ""
    names = [name for name in ast.literal_eval(scopes)[:-1] if name and not name.startswith("_empty_nn_module")]
    path = names[-1] if names else ""
    if path == prefix:
        return ""
    return str(path).removeprefix(prefix + ".") if prefix else str(path)


def export_graph(
    model: nn.Module,
    mixers: list[str],
    inputs: dict[str, Tensor],
    axes: Axes,
    extents: Mapping[str, Extent] | None = None,
    inside: str = "",
) -> Graph:
    """:func:`trace_graph` and :func:`translate`."""
    return translate(trace_graph(model, mixers, inputs, axes, extents, inside))


def save_graph(model: ir.Model, path: Path, metadata: dict[str, str]) -> list[str]:
    """Write the graph, weights beyond :data:`EXTERNAL_BYTES` into ``<name>.data`` beside it.

    Args:
        model: what to write.
        path: of the ``.onnx`` file.
        metadata: the model's metadata_props.

    Returns:
        Names of the files written.
    """
    model.producer_name = metadata.get("producer", "pom-edge")
    model.producer_version = metadata.get("version")
    model.metadata_props.update(metadata)
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    external = f"{path.name}.data" if weights > EXTERNAL_BYTES else None
    ir.save(model, path, external_data=external)
    return [path.name] if external is None else [path.name, external]


def check_file(path: Path) -> None:
    """onnx.checker over the saved file, shapes included."""
    onnx.checker.check_model(str(path), full_check=True)


def table_rows(value: ir.Value) -> tuple[int, int] | None:
    """The values that a graph input may have which is looked up in tables, as token ids are; None for any other value."""
    rows = [
        node.inputs[0].const_value.shape.numpy()[node.attributes.get_int("axis", 0)]
        for node, index in value.uses()
        if node.op_type == "Gather" and index == 1 and node.inputs[0] is not None and node.inputs[0].const_value is not None
    ]
    return (0, min(int(row) for row in rows) - 1) if rows else None


def _untraceable(error: Exception, axes: Axes) -> str:
    """torch's reason, or in our words the one that users meet: an axis that the model does not leave free."""
    if "data-dependent" in str(error):
        return (
            "the model decides by the values of its tensors (if, while, .item(), a boolean index), which no static graph can "
            "follow: use torch.where or a fixed choice instead (nn.Transformer layers with a causal mask: pass "
            "is_causal=True). "
            f"torch says: {_first_lines(error, 1)}"
        )
    pinned = re.search(r"Constraints violated \(([\w, ]+)\)", str(error))
    if pinned is None:
        return f"torch.export cannot trace the model: {_first_lines(error)}"
    names = pinned.group(1)
    where = ", ".join(name for name, dims in axes.items() if set(names.split(", ")) & set(dims))
    option = "--batch" if names == BATCH else "--tokens"
    return (
        f"the model does not leave {names} free (inputs {where}): it computes with the example's length, or has a longest one, "
        f"as in a table of positions. Fix the length with {option} N, or bound it with {option} MIN:OPT:MAX. torch says: "
        f"{_first_lines(error, 3)}"
    )


def _first_lines(error: Exception, lines: int = 6) -> str:
    text = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join([f"{type(error).__name__}: {text[0] if text else ''}", *text[1:lines]])
