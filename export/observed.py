"""What values a graph holds on samples: magnitudes, and what rounding to half precision would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from pom_edge.export.cost import graph_nodes
from pom_edge.export.ranges import is_float
from pom_edge.runtimes.onnxruntime_session import native_session

HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
EXACT_DB = 300.0

__all__ = ["Seen", "Watcher"]


@dataclass
class Seen:
    """One value over all samples.

    Attributes:
        largest: magnitude.
        signal, errors: sums of squares, of the value and of its rounding errors by precision.
    """

    largest: float = 0.0
    signal: float = 0.0
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HALVES, 0.0))

    @property
    def rounding_db(self) -> dict[str, float]:
        """Signal over rounding error by precision."""
        ratios = {name: self.signal / error if error else math.inf for name, error in self.errors.items()}
        return {name: EXACT_DB if math.isinf(r) else 10 * math.log10(max(r, 1e-30)) for name, r in ratios.items()}

    def add(self, array: np.ndarray) -> None:
        """Another sample."""
        wide = array.astype(np.float64)
        self.largest = max(self.largest, float(np.abs(wide).max(initial=0.0)))
        self.signal += float(np.square(wide).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            for name, dtype in HALVES.items():
                self.errors[name] += float(np.square(array.astype(dtype).astype(np.float64) - wide).sum())


class Watcher:
    """Runs a graph and looks at every floating-point value in it.

    Args:
        model: in FP32; unchanged.

    Attributes:
        seen: by value name.
    """

    def __init__(self, model: ir.Model) -> None:
        watched = model.clone()
        self._names = [str(value.name) for value in watched.graph.outputs]
        known = set(self._names)
        values = [v for node in graph_nodes(watched) for v in node.outputs if is_float(v) and str(v.name) not in known]
        watched.graph.outputs.extend(values)
        self._values = [str(value.name) for value in watched.graph.outputs if is_float(value)]
        self._all = [str(value.name) for value in watched.graph.outputs]
        self._native = native_session(ir.to_proto(watched).SerializeToString())
        self._inputs = [each.name for each in self._native.get_inputs()]
        self.seen: dict[str, Seen] = {name: Seen() for name in self._values}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The graph's outputs for one set of inputs."""
        found = dict(zip(self._all, self._native.run(self._all, {n: inputs[n] for n in self._inputs}), strict=True))
        for name in self._values:
            self.seen[name].add(found[name])
        for name, array in inputs.items():
            if array.dtype.kind == "f":
                self.seen.setdefault(name, Seen()).add(array)
        return {name: found[name] for name in self._names}
