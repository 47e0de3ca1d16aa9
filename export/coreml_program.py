"""A traced program made ready for coremltools: what it cannot read is taken out, what never changes is computed here.

    alias(x) -> x;   assertions -> nothing;   f(constants) -> a constant

The last one matters most: at a fixed token count the rotary angles are constants, and neither their tables nor the integer
arithmetic that reads them reach the device.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument

from pom_edge.export.onnx_graph import Traced

FOLDED = "folded_"
_FOLDABLE = ("aten", "prims", "_operator")
_WITHOUT_EFFECT = ("_assert", "sym_constrain")

__all__ = ["coreml_name", "merge_results", "prepare"]


def coreml_name(name: str) -> str:
    """A tensor's name as Core ML allows it: letters, digits and underscores (``state.0.mean`` -> ``state_0_mean``)."""
    return re.sub(r"\W", "_", name)


def prepare(traced: Traced) -> torch.export.ExportedProgram:
    """A copy of the program in Core ML's dialect: core operators, inputs by our names, the module path of each node where
    coremltools looks for a stack trace (it becomes the scope of every MIL operation made of the node).

    Args:
        traced: unchanged.
    """
    program: torch.export.ExportedProgram = traced.program.run_decompositions({})
    graph = program.graph
    _drop_effectless(graph)
    _pad_by_values(graph)
    _divide_in_integers(graph)
    _fold(program, traced.prefix)
    _name_inputs(program, traced.inputs)
    for node in graph.nodes:
        node.meta["stack_trace"] = _module_path(node, traced.prefix)
    graph.lint()
    program.graph_module.recompile()
    return program


def merge_results(program: torch.export.ExportedProgram, names: list[str]) -> dict[str, str]:
    """Return a value once that is returned several times (a bare layer's output is its mixer's): Core ML has one name for it.

    Args:
        program: changed in place.
        names: of its results.

    Returns:
        The name under which each result is to be found.
    """
    output = next(node for node in program.graph.nodes if node.op == "output")
    results, specs = list(output.args[0]), program.graph_signature.output_specs
    own = [index for index, spec in enumerate(specs) if spec.kind == OutputKind.USER_OUTPUT]  # the others are states
    first: dict[fx.Node, str] = {}
    found = {name: first.setdefault(results[index], name) for name, index in zip(names, own, strict=True)}
    gone = {index for name, index in zip(names, own, strict=True) if found[name] != name}
    kept = [index for index in range(len(results)) if index not in gone]
    output.args = (tuple(results[index] for index in kept),)
    specs[:] = [specs[index] for index in kept]
    program.graph_module.recompile()
    return found


def _drop_effectless(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        name = str(getattr(node.target, "__name__", node.target))
        if node.op == "call_function" and name.startswith("alias."):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and name.startswith(_WITHOUT_EFFECT) and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _pad_by_values(graph: fx.Graph) -> None:
    """As many zeros behind as an input's length says: coremltools pads by numbers alone (9.0), so they are joined on.

    pad(x, (0, n)) -> cat(x, zeros(.., n))
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.pad.default or len(node.args) != 2 or node.args[1][0] != 0:
            continue  # ours pad behind with zeros; what else there may be, coremltools refuses by name
        (x, (_, count, *others)), value = node.args, node.meta["val"]
        if others or not isinstance(count, fx.Node):
            continue
        given = x.meta["val"].shape
        with graph.inserting_before(node):
            sizes = [
                graph.call_function(aten.sym_size.int, (x, i)) if isinstance(n, torch.SymInt) else n
                for i, n in enumerate(given)
            ]
            zeros = graph.call_function(aten.full.default, ([*sizes[:-1], count], 0.0), {"dtype": value.dtype})
            joined = graph.call_function(aten.cat.default, ([x, zeros], -1))
        zeros.meta = {**node.meta, "val": value[..., given[-1] :]}
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)


def _divide_in_integers(graph: fx.Graph) -> None:
    """a // b -> int(a // b): coremltools makes a float of it (9.0), which is no length of an axis."""
    for node in list(graph.nodes):
        if node.target is operator.floordiv:
            with graph.inserting_after(node):
                whole = graph.call_function(int, (node,))
            whole.meta = dict(node.meta)
            node.replace_all_uses_with(whole, delete_user_cb=lambda user, own=whole: user is not own)


def _fold(program: torch.export.ExportedProgram, prefix: str) -> None:
    """Compute what depends on no input, and lift it into constants of the program, named by the module that asked for it."""
    graph, signature = program.graph, program.graph_signature
    values: dict[fx.Node, Any] = _constants(program)
    lifted = set(values)
    for node in graph.nodes:
        if node.op != "call_function" or node in values or not _foldable(node, values):
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        with torch.no_grad():
            values[node] = node.target(*arguments[0], **arguments[1])
    first = next(iter(graph.nodes))
    specs: list[InputSpec] = []
    for node in [n for n in graph.nodes if n in values and n not in lifted]:
        if not isinstance(values[node], Tensor) or all(user in values for user in node.users):
            continue
        name = f"{FOLDED}{len(specs)}_{coreml_name(_module_path(node, prefix)).strip('_')}_"
        with graph.inserting_before(first):
            constant = graph.placeholder(name)
        constant.meta["val"] = node.meta["val"]
        program.constants[name] = values[node].detach().contiguous().clone()
        specs.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=name), name, persistent=None))
        node.replace_all_uses_with(constant)
    signature.input_specs[:0] = specs
    graph.eliminate_dead_code()


def _constants(program: torch.export.ExportedProgram) -> dict[fx.Node, Any]:
    """Parameters, buffers and lifted constants by their placeholders."""
    signature = program.graph_signature
    known: Mapping[str, Any] = {**program.state_dict, **program.constants}
    changing = set(signature.buffers_to_mutate.values())
    targets = {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target not in changing
    }
    return {
        node: known[targets[node.name]]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in targets and targets[node.name] in known
    }


def _foldable(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    namespace = getattr(node.target, "namespace", getattr(node.target, "__module__", ""))
    value = node.meta.get("val")
    shaped = value if isinstance(value, (tuple, list)) else [value]
    fixed = all(not isinstance(n, torch.SymInt) for each in shaped if isinstance(each, Tensor) for n in each.shape)
    return (
        namespace in _FOLDABLE
        and fixed
        and not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        and all(parent in values for parent in node.all_input_nodes)
        and "rand" not in str(node.target)
    )


def _name_inputs(program: torch.export.ExportedProgram, names: list[str]) -> None:
    """Placeholders of user inputs and outputs under our names, which become those of the package."""
    nodes = {node.name: node for node in program.graph.nodes}
    wanted = iter(names)
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            node = nodes[spec.arg.name]
            node.name = coreml_name(next(wanted))
            node.target = node.name
            spec.arg.name = node.name
    outputs = next(node for node in program.graph.nodes if node.op == "output")
    for spec, node in zip(program.graph_signature.output_specs, outputs.args[0], strict=True):
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(node, fx.Node):
            spec.arg.name = node.name


def _module_path(node: fx.Node, prefix: str) -> str:
    """The innermost module that the tracer recorded, without our own wrapper's name."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    path = paths[-1] if paths else ""
    for start in ("L['self'].", "self."):
        path = path.removeprefix(start)
    if path == prefix or not path:
        return "."
    return path.removeprefix(prefix + ".") if prefix else path
