"""Half-precision artifacts from FP32 ones: what their values can be, which type each node gets, and what that costs.

The mixers that miss their gate in half precision are kept in FP32, and the graph is typed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pom_edge.errors import GateError
from pom_edge.export.cost import elements_at, graph_nodes, has_shape
from pom_edge.export.golden import Case
from pom_edge.export.inputs import BATCH
from pom_edge.export.made import Made, Passes
from pom_edge.export.observed import Seen, Watcher
from pom_edge.export.onnx_graph import Graph
from pom_edge.export.precision import HALF_TYPES, to_half
from pom_edge.export.ranges import MAX_TOKENS, Range, find_ranges, is_float

INPUT_MARGIN = 8.0  # inputs may be so many times as large as those of the samples
WATCHED_BYTES = 1 << 30  # of values looked at in one run

__all__ = ["Facts", "look", "typed"]


@dataclass
class Facts:
    """What is known of the values of every graph of a form.

    Attributes:
        assumed: limits of the model's inputs, for which the bounds hold.
        ranges, seen: by value name, one dict for each graph.
    """

    assumed: dict[str, float]
    ranges: list[dict[str, Range]]
    seen: list[dict[str, Seen]]


def look(made: Made, cases: list[Case], tokens: int | None) -> Facts:
    """Run the FP32 graphs on the samples and bound their values.

    Args:
        made: in FP32.
        cases: recorded inputs.
        tokens: the longest sequence, where it is bounded.
    """
    watchers = [Watcher(graph.model) for graph in made.graphs]
    drive = made.drive([watcher.run for watcher in watchers])
    for case in _affordable(made, cases):
        made.plan.through(drive, case.inputs, case.chunks)
    largest: dict[str, float] = {}
    for case in cases:
        for name, array in case.inputs.items():
            if array.dtype.kind == "f" and array.size and "mask" not in name:
                largest[name] = max(largest.get(name, 0.0), float(np.abs(array).max()))
    assumed = {name: INPUT_MARGIN * value for name, value in largest.items()}
    known = {name: Range.of(-limit, limit) for name, limit in assumed.items()} | {
        name: Range.of(0.0, 1.0) for name in ("mask", "valid")
    }
    ranges = []
    for index, graph in enumerate(made.graphs):
        found = find_ranges(graph.model, known, tokens or MAX_TOKENS)
        ranges.append(found)
        if isinstance(made, Passes):
            known |= _carried(made, index, graph, found)
    return Facts(assumed, ranges, [watcher.seen for watcher in watchers])


def _carried(made: Passes, index: int, graph: Graph, found: Mapping[str, Range]) -> dict[str, Range]:
    """What a later pass knows of the outputs of this one: a mean over tokens has the bounds of what was averaged."""
    means = {each.name for each in made.split.passes[index].sums if each.mean}
    carried = {}
    for value in graph.model.graph.outputs:
        name, producer = str(value.name), value.producer()
        source = producer.inputs[0] if name in means and producer is not None else value
        carried[name] = found[str(source.name)].flat() if source is not None and str(source.name) in found else Range.of(0, 0)
    return carried


def _affordable(made: Made, cases: list[Case]) -> list[Case]:
    """The cases that can be run with every value of the graph kept, the smallest always."""
    ordered = sorted(cases, key=lambda case: case.nbytes)
    kept = ordered[:1]
    for case in ordered[1:]:
        longest = max((max(array.shape[1:2], default=1) for array in case.inputs.values() if array.ndim > 1), default=1)
        rows = max((array.shape[0] for array in case.inputs.values() if array.ndim), default=1)
        sizes = {
            str(d): longest for g in made.graphs for v in g.model.graph.inputs for d in v.shape or () if not isinstance(d, int)
        }
        sizes[BATCH] = rows
        values = [v for g in made.graphs for n in graph_nodes(g.model) for v in n.outputs if is_float(v) and has_shape(v)]
        if 4 * sum(elements_at(value, sizes) for value in values) <= WATCHED_BYTES:
            kept.append(case)
    return kept


def typed(made: Made, precision: str, facts: Facts, keep: Collection[str] = ()) -> tuple[Made, dict[str, Any]]:
    """A form in half precision.

    Args:
        made: in FP32; unchanged.
        precision: ``"fp16"`` or ``"bf16"``.
        facts: from :func:`look`.
        keep: module paths that stay in FP32.

    Returns:
        The typed form, and the range table for the manifest.

    Raises:
        GateError: nothing of it is left in half precision.
    """
    graphs, rows, half, nodes = [], [], 0, 0
    for graph, ranges, seen in zip(made.graphs, facts.ranges, facts.seen, strict=True):
        changed = graph.clone()
        typing = to_half(changed.model, precision, ranges, seen, made.mixers, keep)
        graphs.append(changed)
        rows += typing.rows
        half, nodes = half + typing.half_nodes, nodes + typing.nodes
    result = made.typed(graphs, precision) if made.precision == "fp32" else made.typed(graphs, made.precision, precision)
    if not result.common_fields()["census"].get(str(HALF_TYPES[precision].name).lower()):
        raise GateError(
            f"{precision} was asked for, and no weight of the model can be in it: {_reasons(rows)}. Export it in fp32"
        )
    return result, {
        "assumed_inputs": facts.assumed,
        "half_nodes": half,
        "nodes": nodes,
        "kept_fp32": sorted(keep),
        "modules": rows,
    }


def _reasons(rows: list[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(reason for row in rows for reason in row["fp32"].values())) or "it has none"
