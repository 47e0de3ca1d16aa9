"""The streamed form: a full-context encoder as a row of passes over its tokens, exact, in memory that does not grow with them.

Between two sums over tokens everything acts on one token at a time. So the traced graph is cut where a sum over tokens is
needed before anything else can go on:

    level of a value = how many sums over tokens lie before it
    pass p computes the values of level p from what pass p-1 stored for each token, and adds up the sums that level p+1 needs

Tokens of another length, a context, have passes of their own: a level has one for each length that something is to be done for.

What a pass stores for each token is the narrowest set of values from which the next one can go on (a minimum cut; of equal
ones the latest, so that least is computed twice). The sums are finished outside of the graph, in float64.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pom_edge.errors import InputError
from pom_edge.export.inputs import TOKENS, Axes
from pom_edge.export.quiet import quiet

aten = torch.ops.aten
OFFSET, VALID = "offset", "valid"
SUMS: dict[Any, bool] = {
    aten.mean.dim: True,
    aten.sum.dim_IntList: False,
}  # reductions that can be added up chunk by chunk: is it a mean?
# What may be told a length: these make or reshape tensors. Anywhere else the number of all tokens would be meant.
_SHAPED = {
    aten.view.default, aten.reshape.default, aten.expand.default, aten._unsafe_view.default, aten.unflatten.int,
    aten.new_zeros.default, aten.new_ones.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.slice.Tensor,
}  # fmt: skip
_ALONG = {  # operators that mix what lies along a dimension, and the position of that dimension among their arguments
    aten.softmax.int: 1, aten._softmax.default: 1, aten.log_softmax.int: 1, aten.cumsum.default: 1, aten.flip.default: 1,
    aten.roll.default: 2, aten.sort.default: 1, aten.cat.default: 1, aten.cumprod.default: 1, aten.glu.default: 1,
}  # fmt: skip
# Views and casts, cheap enough to be made again from a model input in any pass.
_VIEWS = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default,
    aten._to_copy.default, aten.to.dtype, aten.expand.default, aten.alias.default, aten.gt.Scalar, aten.ne.Scalar,
    aten.logical_not.default,
}  # fmt: skip
_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_CHECKS = (aten._assert_scalar.default, aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default)

__all__ = ["OFFSET", "VALID", "Pass", "Reduction", "Split", "Splitter", "StepCheck"]


@dataclass(frozen=True)
class Reduction:
    """A sum over tokens that passes add up: ``mean`` says that it is divided by ``rows`` values for each token in the end."""

    name: str
    mean: bool
    rows: int


@dataclass
class Pass:
    """One graph, run for every chunk of C tokens.

    Attributes:
        module: takes its inputs by name (see ``inputs``), returns the values of ``outputs`` in that order.
        inputs: names: model inputs, stored values, finished sums, and ``offset`` and ``valid`` where they are needed.
        stores: values kept for each token.
        sums: what is added up.
        results: the model's outputs that this pass finishes.
        taps: module paths of mixers whose outputs are further outputs.
        looped: False where no input has a token axis (a head after pooling): it runs once.
        axis: the name of the token axis that it goes along.
    """

    module: fx.GraphModule
    inputs: list[str]
    stores: list[str]
    sums: list[Reduction]
    results: list[str]
    taps: list[str]
    looped: bool = True
    axis: str = TOKENS

    @property
    def outputs(self) -> list[str]:
        """Names of what the module returns."""
        return [*self.stores, *(reduction.name for reduction in self.sums), *self.results, *self.taps]


@dataclass
class Split:
    """All passes of a model.

    Attributes:
        passes: in order.
        shapes: of inputs, stored values, sums, results and taps for a chunk of C tokens.
        token_axes: token axis of each of these that has one.
        dtypes: of these.
        results: the model's outputs, in its own order.
        axes: name of the token axis of each of these that has one.
    """

    passes: list[Pass]
    shapes: dict[str, tuple[int, ...]]
    token_axes: dict[str, int]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)


def _trace(boundary: nn.Module, inputs: dict[str, Tensor], axes: Axes) -> tuple[fx.GraphModule, dict[fx.Node, str]]:
    dims = {dim: torch.export.Dim(dim) for shape in axes.values() for dim in shape if isinstance(dim, str)}
    dynamic = {name: {i: dims[dim] for i, dim in enumerate(s) if isinstance(dim, str)} for name, s in axes.items()}
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(
                boundary,
                (inputs,),
                dynamic_shapes={"inputs": dynamic},
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            module = program.run_decompositions({}).module()
    except InputError:
        raise
    except Exception as error:  # whatever a user's model can raise while traced
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise InputError(
            f"the model does not leave {', '.join(dims)} free, so it cannot be cut into chunks; --form parallel exports it as "
            f"it is. torch says: {type(error).__name__}: {reason}"
        ) from error
    assert isinstance(module, fx.GraphModule)
    found = [node for node in module.graph.nodes if node.op == "placeholder"]
    return module, dict(zip(found, inputs, strict=True))


class Splitter:
    """Cuts a lowered model into passes.

    Args:
        boundary: takes ``inputs`` as one dict, returns outputs and taps as one flat tuple.
        inputs: example inputs.
        axes: of them; only token axes are free.
        outputs, taps: their names, in order.

    Raises:
        InputError: the model's tokens interact in another way than through sums; names the module and the operator.
    """

    def __init__(self, boundary: nn.Module, inputs: dict[str, Tensor], axes: Axes, outputs: list[str], taps: list[str]) -> None:
        self.module, self.placeholders = _trace(boundary, inputs, axes)
        module, placeholders, outputs = self.module, self.placeholders, [*outputs, *taps]
        self.taps, self.chunk = set(taps), 0
        self.nodes = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr") or _computes(node)]
        self.symbols = self._symbols(axes)
        (end,) = (node for node in module.graph.nodes if node.op == "output")
        returned = end.args[0]
        assert isinstance(returned, (tuple, list))
        self.results: list[tuple[str, fx.Node]] = [
            (name, node) for name, node in zip(outputs, returned, strict=True) if isinstance(node, fx.Node)
        ]
        self.levels: dict[fx.Node, int] = {}
        self.sums: dict[fx.Node, Reduction] = {}
        self.names: dict[fx.Node, str] = dict(placeholders)
        for node in self.nodes:
            self._label(node)

    # -- what a node is -----------------------------------------------------------------------------------------------

    def _symbols(self, axes: Axes) -> dict[Any, str]:
        """The free axes by torch's symbols, that of the first input first."""
        found: dict[Any, str] = {}
        for node, name in self.placeholders.items():
            for dim, axis in zip(node.meta["val"].shape, axes[name], strict=True):
                if isinstance(dim, torch.SymInt):
                    found[dim.node.expr] = str(axis)
        if not found:
            raise InputError(
                "no input has a free token axis (batch, tokens, ..); the streamed form goes over tokens. Of models that take "
                "images the reference models (classifier, dense) have one, whose patches are the tokens; cut the image into "
                "patches outside of yours"
            )
        return found

    def axis(self, node: fx.Node) -> int | None:
        """The token axis of a value, or None.

        Raises:
            InputError: two token axes, or one whose length is not that of the tokens.
        """
        value = _first(node)
        if value is None:
            return None
        found: list[int] = []
        for i, dim in enumerate(value.shape):
            if isinstance(dim, torch.SymInt) and dim.node.expr.free_symbols:
                if dim.node.expr not in self.symbols:
                    raise self._refusal(node, f"makes an axis of {self._in_words(dim)} tokens")
                found.append(i)
        if len(found) > 1:
            raise self._refusal(node, "pairs every token with every other one")
        return found[0] if found else None

    def axis_name(self, node: fx.Node) -> str | None:
        """Which tokens a value has a row for."""
        axis, value = self.axis(node), _first(node)
        return None if axis is None or value is None else self.symbols[value.shape[axis].node.expr]  # type: ignore[attr-defined]

    def _in_words(self, dim: torch.SymInt) -> str:
        text = str(dim.node.expr)
        for symbol, name in self.symbols.items():
            text = text.replace(str(symbol), name)
        return text

    def is_size(self, node: fx.Node) -> bool:
        """Whether a node is a length, not a tensor."""
        return isinstance(node.meta.get("val"), (int, torch.SymInt, bool, torch.SymBool))

    def _label(self, node: fx.Node) -> None:
        parents = [parent for parent in node.all_input_nodes if not self.is_size(parent)]
        level = max((self.levels[parent] for parent in parents), default=0)
        if self.is_size(node) or node.op in ("placeholder", "get_attr"):
            self.levels[node] = 0
            return
        axis = self.axis(node)
        reading = [parent for parent in parents if self.axis(parent) is not None]
        if reading and axis is None and _first(node) is not None:
            if node.target not in SUMS:
                raise self._refusal(node, "does away with the token axis in another way than a sum or a mean")
            self.sums[node] = self._reduction(node, reading[0])
            self.names[node] = self.sums[node].name
            level += 1
        elif axis is not None:
            self._check_token_wise(node, axis, reading)
        self.levels[node] = level

    def _reduction(self, node: fx.Node, source: fx.Node) -> Reduction:
        value, reduced = source.meta["val"], node.args[1]
        dims = [dim % value.ndim for dim in (reduced if isinstance(reduced, (list, tuple)) else [reduced])]
        rows = 1
        for dim in dims:
            rows *= 1 if isinstance(value.shape[dim], torch.SymInt) else int(value.shape[dim])
        return Reduction(f"sum.{len(self.sums)}", SUMS[node.target], rows)

    def _check_token_wise(self, node: fx.Node, axis: int, reading: list[fx.Node]) -> None:
        if any(self.axis_name(parent) != self.axis_name(node) for parent in reading):
            raise self._refusal(node, "picks tokens of one input for those of another")
        if node.target in _ALONG and len(node.args) > _ALONG[node.target]:
            dims = node.args[_ALONG[node.target]]
            rank = max(parent.meta["val"].ndim for parent in reading)
            if axis in [dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims]) if isinstance(dim, int)]:
                raise self._refusal(node, "goes along the token axis")
        sizes = [size for size in node.all_input_nodes if self.is_size(size) and _symbolic(size)]
        arange = node.target in _COUNTING
        if arange and (node.target is not aten.arange.default) and (node.args[0] != 0 or len(node.args) > 2):
            raise self._refusal(node, "counts the tokens from another number than 0")
        if sizes and not arange and node.target not in _SHAPED:
            raise self._refusal(node, "computes with the number of tokens")
        if not reading and not arange and axis is not None and not sizes and not self._counts(node):
            raise self._refusal(node, "has a token axis of unknown origin")

    def _counts(self, node: fx.Node) -> bool:
        """Whether a value is computed from positions."""
        return any(self.axis(parent) is not None for parent in node.all_input_nodes if not self.is_size(parent))

    def _refusal(self, node: fx.Node, what: str) -> InputError:
        path = _module_path(node)
        return InputError(
            f"{path + ': ' if path else ''}{node.name} {what}, so the model has no streamed form: its tokens may interact "
            "through "
            "sums and means over all of them alone, as in PoM without a causal mask (attention, prefix tokens and convolutions "
            "over tokens do otherwise; causal models have the recurrent form)"
        )

    # -- what is stored -----------------------------------------------------------------------------------------------

    def split(self, chunk: int) -> Split:
        """The passes for chunks of so many tokens.

        Raises:
            InputError: an input bears the name of one that the passes have besides.
        """
        taken = sorted({OFFSET, VALID} & {*self.placeholders.values(), *(name for name, _ in self.results)})
        if taken:
            raise InputError(
                f"the model has an input or output {taken[0]!r}, and each pass of the streamed form has an input of that name "
                "besides; rename it in the model's forward"
            )
        self.chunk = chunk
        last = max(self.levels[node] for _, node in self.results)
        stored: list[fx.Node] = []
        stores: list[list[fx.Node]] = []
        for level in range(last):
            stored = self._cut(level)
            for node in stored:
                self.names.setdefault(node, f"value.{len(self.names)}")
            stores.append(stored)
        passes = []
        for level in range(last + 1):
            before = stores[level - 1] if level else []
            after = [node for node in stores[level] if node not in before] if level < last else []
            for axis in self.symbols.values():
                kept = [node for node in after if node not in self.placeholders and self.axis_name(node) == axis]
                made = self._pass(level, axis, before, kept)
                if made.outputs:
                    passes.append(made)
        return self._described(passes)

    def _described(self, passes: list[Pass]) -> Split:
        split = Split(passes, {}, {}, results=[name for name, _ in self.results if name not in self.taps])
        for name, node in [*((name, node) for node, name in self.names.items()), *self.results]:
            value, axis, along = node.meta["val"], self.axis(node), self.axis_name(node)
            split.shapes[name] = tuple(self.chunk if i == axis else int(dim) for i, dim in enumerate(value.shape))
            split.dtypes[name] = value.dtype
            if axis is not None and along is not None:
                split.token_axes[name], split.axes[name] = axis, along
        return split

    def _cut(self, level: int) -> list[fx.Node]:
        """The narrowest set of token-wise values from which the passes after ``level`` can go on."""
        wanted = [
            node
            for node in self.nodes
            if self.axis(node) is not None
            and self.levels[node] <= level
            and (any(self._later(user, level) for user in node.users))
        ]
        wanted = [node for node in wanted if not self._again(node)]
        keep = [node for node in wanted if self.levels[node] < level]
        sinks = [node for node in wanted if self.levels[node] == level]
        network = _Network()
        for node in self._ancestors(sinks, level):
            inside, outside = (node, "in"), (node, "out")
            source = (node in self.placeholders) if level == 0 else (self.levels[node] < level)
            if source:
                network.add("source", inside, None)
            network.add(inside, outside, self._width(node) if level == 0 or not source else None)
            for parent in node.all_input_nodes:
                if self.axis(parent) is not None and not self._free(parent):
                    network.add((parent, "out"), inside, None)
        for node in sinks:
            network.add((node, "out"), "sink", None)
        cut = [node for node in self.nodes if network.crosses((node, "in"), (node, "out"))] if sinks else []
        return [node for node in self.nodes if node in keep or node in cut]

    def _later(self, user: fx.Node, level: int) -> bool:
        if user in self.sums:
            return self.levels[user] > level + 1  # a sum of level + 1 is added up in this very pass
        return self.levels.get(user, -1) > level

    def _free(self, node: fx.Node) -> bool:
        """Whether a token-wise value comes from positions alone: made anew in any pass."""
        if node in self.placeholders:
            return False
        return all(self._free(p) for p in node.all_input_nodes if self.axis(p) is not None)

    def _again(self, node: fx.Node) -> bool:
        """Whether a token-wise value can be made again in any pass: from positions, or from a model input by views alone."""
        if node in self.placeholders or self._free(node):
            return True
        parents = [p for p in node.all_input_nodes if self.axis(p) is not None]
        return node.target in _VIEWS and all(self._again(p) for p in parents)

    def _ancestors(self, sinks: list[fx.Node], level: int) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        queue = deque(sinks)
        while queue:
            node = queue.popleft()
            if node in found:
                continue
            found[node] = None
            if level and self.levels[node] < level:
                continue  # a value of an earlier level is there or it is not: it is not computed again
            queue.extend(p for p in node.all_input_nodes if self.axis(p) is not None and not self._free(p))
        return list(found)

    def _width(self, node: fx.Node) -> int | None:
        """Bytes for each token; None for several tensors in one, which are not stored as such."""
        if not isinstance(node.meta["val"], Tensor):
            return None
        value, axis = node.meta["val"], self.axis(node)
        width = value.dtype.itemsize
        for i, dim in enumerate(value.shape):
            width *= 1 if i == axis else int(dim)
        return int(width)

    # -- the graph of a pass ------------------------------------------------------------------------------------------

    def _pass(self, level: int, axis: str, before: list[fx.Node], stores: list[fx.Node]) -> Pass:
        sums = [node for node in self.sums if self.levels[node] == level + 1 and self.axis_name(self._summed(node)) == axis]
        first = next(iter(self.symbols.values()))  # its pass also finishes what has a row for no token
        results = [(name, node) for name, node in self.results if self.levels[node] == level]
        results = [(name, node) for name, node in results if (self.axis_name(node) or first) == axis]
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        inputs: dict[str, fx.Node] = {}

        def given(name: str, like: fx.Node | None = None) -> fx.Node:
            if name not in inputs:
                inputs[name] = graph.placeholder(name.replace(".", "_"))
                if like is not None:
                    inputs[name].meta = dict(like.meta)
            return inputs[name]

        def copy(node: fx.Node) -> Any:
            if node in copies:
                return copies[node]
            if self.is_size(node):
                return self._length(node)
            if node in before or node in self.placeholders or (node in self.sums and self.levels[node] <= level):
                made = given(self.names[node], node)
            elif (
                node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step) and self.axis(node) is not None
            ):
                counted = graph.call_function(aten.arange.default, (self.chunk,))
                # Padded tokens count from 0 again: what they would look up may lie beyond the end of a table.
                real = graph.call_function(aten._to_copy.default, (given(VALID),), {"dtype": torch.int64})
                counted = graph.call_function(aten.mul.Tensor, (counted, real))
                made = graph.call_function(aten.add.Tensor, (counted, given(OFFSET)))
            else:
                made = graph.node_copy(node, copy)
            copies[node] = made
            return made

        parts = [copy(node) for node in stores]
        parts += [self._partial_sum(graph, node, copy, given) for node in sums]
        parts += [copy(node) for _, node in results]
        graph.output(tuple(parts))
        module = fx.GraphModule(self.module, graph)
        looped = any(self.axis(node) is not None for node, name in self.names.items() if name in inputs) or OFFSET in inputs
        return Pass(
            module,
            list(inputs),
            [self.names[node] for node in stores],
            [self.sums[node] for node in sums],
            [name for name, _ in results if name not in self.taps],
            [name for name, _ in results if name in self.taps],
            looped,
            axis,
        )

    def _partial_sum(self, graph: fx.Graph, node: fx.Node, copy: Any, given: Any) -> fx.Node:
        """sum over the chunk of value * valid: padded tokens of the last chunk count nothing."""
        source = self._summed(node)
        axis, rank = self.axis(source), source.meta["val"].ndim
        assert axis is not None
        shape = [self.chunk if i == axis else 1 for i in range(rank)]
        valid = graph.call_function(aten.view.default, (given(VALID), shape))
        value = graph.call_function(aten.mul.Tensor, (copy(source), valid))
        arguments = tuple(node.args[1:3])
        return graph.call_function(aten.sum.dim_IntList, (value, *arguments))

    def _summed(self, node: fx.Node) -> fx.Node:
        """What a sum over tokens adds up."""
        (source,) = (parent for parent in node.all_input_nodes if not self.is_size(parent))
        return source

    def _length(self, node: fx.Node) -> int:
        value = node.meta["val"]
        sizes = dict.fromkeys(self.symbols, self.chunk)
        return int(value.node.expr.subs(sizes)) if isinstance(value, torch.SymInt) else int(value)


class StepCheck(Splitter):
    """Whether a model in the recurrent form acts on one token at a time wherever its stepped layers do not.

    Args:
        boundary, inputs, axes, outputs: as of :class:`Splitter`; inputs with the state.
        stepped: names of the classes that carry state.

    Raises:
        InputError: it does not; names the module and the operator.
    """

    def __init__(
        self, boundary: nn.Module, inputs: dict[str, Tensor], axes: Axes, outputs: list[str], stepped: tuple[str, ...]
    ) -> None:
        self._stepped = stepped
        super().__init__(boundary, inputs, axes, outputs, [])

    def _label(self, node: fx.Node) -> None:
        self.levels[node] = 0
        stack = (node.meta.get("nn_module_stack") or {}).values()
        if self.is_size(node) or node.op in ("placeholder", "get_attr"):
            return
        if any(str(kind).rpartition(".")[2].strip("'>") in self._stepped for _, kind in stack):
            return
        reading = [p for p in node.all_input_nodes if not self.is_size(p) and self.axis(p) is not None]
        axis = self.axis(node)
        if node.target in _COUNTING and axis is not None:
            raise self._refusal(node, "counts the tokens of a chunk from 0")
        last = node.target is aten.select.int and node.args[2] == -1
        if reading and axis is None and _first(node) is not None and not last:
            raise self._refusal(node, "does away with the token axis")
        if axis is not None:
            self._check_token_wise(node, axis, reading)

    def _refusal(self, node: fx.Node, what: str) -> InputError:
        path = _module_path(node)
        return InputError(
            f"{path + ': ' if path else ''}{node.name} {what}, so the model has no recurrent form: what it computes for a "
            "token may "
            "depend on that token alone, and on earlier ones through causal PoM or attention with a window (a mean, a "
            "convolution "
            "or a count over tokens does otherwise; --form parallel exports the model as it is)"
        )


class _Network:
    """A flow network with capacities on edges; None is unlimited. Answers which edges the latest minimum cut crosses."""

    def __init__(self) -> None:
        self.capacity: dict[Any, dict[Any, float]] = {}
        self._behind: set[Any] | None = None

    def add(self, tail: Any, head: Any, capacity: int | None) -> None:
        """An edge; several between the same two nodes add up."""
        self.capacity.setdefault(tail, {})
        self.capacity.setdefault(head, {}).setdefault(tail, 0)
        self.capacity[tail][head] = self.capacity[tail].get(head, 0) + (float("inf") if capacity is None else capacity)

    def crosses(self, tail: Any, head: Any) -> bool:
        """Whether the minimum cut nearest to the sink separates two nodes that an edge joins."""
        if self._behind is None:
            self._behind = self._sink_side()
        return tail in self.capacity and head in self.capacity and tail not in self._behind and head in self._behind

    def _sink_side(self) -> set[Any]:
        while path := self._path():
            flow = min(self.capacity[a][b] for a, b in path)
            for a, b in path:
                self.capacity[a][b] -= flow
                self.capacity[b][a] += flow
        behind, queue = {"sink"}, deque(["sink"])
        while queue:
            head = queue.popleft()
            for tail in self.capacity.get(head, ()):
                if tail not in behind and self.capacity[tail][head] > 0:
                    behind.add(tail)
                    queue.append(tail)
        return behind

    def _path(self) -> list[tuple[Any, Any]]:
        """A shortest path with room from source to sink."""
        came: dict[Any, Any] = {"source": None}
        queue = deque(["source"])
        while queue:
            tail = queue.popleft()
            for head, room in self.capacity.get(tail, {}).items():
                if room > 0 and head not in came:
                    came[head] = tail
                    queue.append(head)
        if "sink" not in came:
            return []
        path, head = [], "sink"
        while came[head] is not None:
            path.append((came[head], head))
            head = came[head]
        return path


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in _CHECKS and node.meta.get("val") is not None


def _first(node: fx.Node) -> Tensor | None:
    """The tensor of a node, or the first where it gives several of a kind (unbind, chunk)."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value if isinstance(value, Tensor) else None


def _symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and bool(value.node.expr.free_symbols)


def _module_path(node: fx.Node) -> str:
    """The innermost module that the tracer recorded, without our own wrappers' names."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    path = str(paths[-1]) if paths else ""
    for prefix in ("L['self'].", "self."):
        path = path.removeprefix(prefix)
    return path.removeprefix("model.") if path != "model" else ""
