"""What was made of a model, before and after it is written: one graph, or the passes of the streamed form.

Both answer the same questions: do the rules hold, what files are these, what does the traced PyTorch say, what does the written
ONNX say.
"""

from __future__ import annotations

import copy
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from pom_edge.bundle import PassSpec, StreamSpec, SumSpec, TensorSpec
from pom_edge.export.cost import gemm_flops
from pom_edge.export.forms import Plan
from pom_edge.export.inputs import BATCH, TOKENS, Extent
from pom_edge.export.lint import GraphContext, lint
from pom_edge.export.onnx_graph import OPSET, Graph, Traced, check_file, save_graph, table_rows, trace_pass, translate
from pom_edge.export.reference import Arrays, TorchSession
from pom_edge.export.streamed import OFFSET, VALID, Pass, Split, Splitter
from pom_edge.runtimes.layers import open_tapped
from pom_edge.runtimes.onnxruntime_session import native_session
from pom_edge.runtimes.rounding import open_rounded
from pom_edge.runtimes.stepping import Execute
from pom_edge.runtimes.streamed import run_stream
from pom_edge.runtimes.tokens import Buffer

CHUNKS = (256, 512, 1024, 2048, 4096)  # tried on this machine
SLOWER = 1.05  # a smaller chunk is taken if it is at most so much slower than the fastest
REPEATS = 7

__all__ = ["Made", "Passes", "Single", "choose_chunk"]


class Made(ABC):
    """Graphs of one form.

    Attributes:
        plan: what they were made from.
        graphs: in the order in which they run.
        chunk: streamed form: tokens of a chunk.
    """

    target = "onnx"
    chunk: int = 0
    precision: str = "fp32"
    remainder: str = "fp32"  # of INT8: what the rest computes in
    traced_graphs: list[Traced]  # what the graphs were translated from

    def __init__(self, plan: Plan, traced: list[Traced]) -> None:
        self.plan, self.traced_graphs = plan, traced
        self.graphs = [translate(each) for each in traced]

    def typed(self, graphs: list[Graph], precision: str, remainder: str = "fp32") -> Made:
        """The same form with other graphs."""
        made = copy.copy(self)
        made.graphs, made.precision, made.remainder = graphs, precision, remainder
        return made

    @property
    def kind(self) -> str:
        """Precision and remainder, as in file names."""
        return self.precision if self.remainder == "fp32" else f"{self.precision}.{self.remainder}"

    def _lint(self, graph: Graph) -> list[str]:
        newer = self.precision == "w4" or self.remainder != "fp32"  # 4-bit blocks need 21, FP16 scales 19
        return lint(GraphContext(graph, graph.model.opset_imports[""] if newer else OPSET))

    @property
    @abstractmethod
    def file(self) -> str:
        """The artifact's file: the graph, or the first of its passes."""

    @abstractmethod
    def lint(self) -> list[str]:
        """See :func:`pom_edge.export.lint.lint`."""

    @abstractmethod
    def save(self, folder: Path, metadata: dict[str, str]) -> list[str]:
        """Write the files; returns their names inside the folder."""

    @abstractmethod
    def traced(self) -> Execute | None:
        """Outputs and mixers by name from the traced PyTorch model; None where there is none."""

    @abstractmethod
    def files(self) -> list[str]:
        """Where each graph lies inside the folder."""

    @abstractmethod
    def drive(self, executes: list[Execute]) -> Execute:
        """All graphs together, from something that executes each."""

    def written(self, folder: Path, tapped: bool = True, optimize: bool = True, rounded: bool = False) -> Execute:
        """Outputs and (``tapped``) mixers by name from the written ONNX files.

        ``optimize``: as the runtime rewrites them; ``rounded``: evaluated with every half-precision operator rounded.
        """
        executes: list[Execute] = []
        for file, graph in zip(self.files(), self.graphs, strict=True):
            taps = {path: str(value.name) for path, value in graph.taps.items()} if tapped else {}
            names = {name: name for name in graph.outputs} | taps
            evaluated = rounded or self.precision == "bf16"
            executes.append(open_rounded(folder / file, names) if evaluated else open_tapped(folder / file, names, optimize))
        return self.drive(executes)

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What the manifest's artifact says about these graphs."""

    @property
    def nodes(self) -> int:
        """In all graphs."""
        return sum(len(graph.model.graph) for graph in self.graphs)

    def extent(self, axis: str) -> Extent:  # noqa: ARG002  # the passes of the streamed form have fixed shapes
        """How long a free axis may be."""
        return Extent()

    @property
    def mixers(self) -> list[str]:
        """Module paths of the mixers."""
        return self.plan.mixers

    def common_fields(self) -> dict[str, Any]:
        """Versions, and the share of the weights' elements by type, read back from the graphs."""
        counts: dict[str, int] = {}
        for graph in self.graphs:
            for value in graph.model.graph.initializers.values():
                if value.const_value is not None:
                    name = str(value.const_value.dtype.name).lower()
                    counts[name] = counts.get(name, 0) + value.const_value.size
        total = sum(counts.values()) or 1
        model = self.graphs[0].model
        return {
            "opset": model.opset_imports[""],
            "ir_version": model.ir_version,
            "gemm_flops": [gemm_flops(graph.model) for graph in self.graphs],
            "census": {name: round(count / total, 4) for name, count in sorted(counts.items())},
        }


class Single(Made):
    """The parallel and the recurrent form: one graph."""

    def __init__(self, plan: Plan, traced: Traced, batch: Extent, tokens: Extent) -> None:
        super().__init__(plan, [traced])
        self._bounds = {BATCH: batch, TOKENS: tokens}

    def extent(self, axis: str) -> Extent:
        return self._bounds.get(axis, Extent())

    @property
    def graph(self) -> Graph:
        """The one there is."""
        return self.graphs[0]

    def files(self) -> list[str]:
        return [self.file]

    def drive(self, executes: list[Execute]) -> Execute:
        return executes[0]

    @property
    def file(self) -> str:
        return f"{self.plan.form}.{self.kind}{'.ragged' if self.plan.ragged else ''}.onnx"

    def lint(self) -> list[str]:
        return self._lint(self.graph)

    def save(self, folder: Path, metadata: dict[str, str]) -> list[str]:
        files = save_graph(self.graph.model, folder / self.file, metadata)
        check_file(folder / self.file)
        return files

    def traced(self) -> Execute | None:
        if not self.mixers:
            return None
        session = TorchSession(self.plan.model, [self.plan.inside + name for name in self.mixers if name])
        return lambda inputs: self.plan.named(_merged(session.run(inputs)))

    def fields(self) -> dict[str, Any]:
        return {
            **self.common_fields(),
            "inputs": [tensor_spec(value, self._bounds) for value in self.graph.model.graph.inputs],
            "outputs": [tensor_spec(value, self._bounds) for value in self.graph.model.graph.outputs],
            "mixers": {path: str(value.name) for path, value in self.graph.taps.items()},
            "token_axes": self.plan.token_axes,
            "tokens": self.plan.tokens,
            "frames": bool(self.plan.frame),
            "ragged": self.plan.ragged,
        }


class Passes(Made):
    """The streamed form: a graph for each pass, and how they fit together."""

    def __init__(self, plan: Plan, split: Split, traced: list[Traced], chunk: int, tokens: Extent) -> None:
        super().__init__(plan, traced)
        self.split, self.chunk, self._tokens = split, chunk, tokens

    @property
    def file(self) -> str:
        return self.files()[0]

    def files(self) -> list[str]:
        return [f"streamed.{self.kind}/pass-{index}.onnx" for index in range(len(self.graphs))]

    def lint(self) -> list[str]:
        notes = [note for graph in self.graphs for note in self._lint(graph)]
        return [note for note in dict.fromkeys(notes) if not note.startswith("linear-cost")]  # a chunk is of fixed size

    def save(self, folder: Path, metadata: dict[str, str]) -> list[str]:
        files = []
        for file, graph in zip(self.files(), self.graphs, strict=True):
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            files += [f"{path.parent.name}/{name}" for name in save_graph(graph.model, path, metadata)]
            check_file(path)
        return files

    @property
    def spec(self) -> StreamSpec:
        """For the manifest and the runner."""
        return StreamSpec(
            chunk=self.chunk,
            shapes={name: list(shape) for name, shape in self.split.shapes.items()},
            dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in self.split.dtypes.items()},
            token_axes=self.split.token_axes,
            axes={name: axis for name, axis in self.split.axes.items() if axis != TOKENS},
            image=self.plan.image,
            passes=[
                PassSpec(
                    file=file,
                    inputs=step.inputs,
                    stores=step.stores,
                    sums=[SumSpec(name=each.name, mean=each.mean, rows=each.rows) for each in step.sums],
                    results=step.results,
                    looped=step.looped,
                    axis=step.axis,
                    mixers={path: str(value.name) for path, value in graph.taps.items()},
                )
                for file, step, graph in zip(self.files(), self.split.passes, self.graphs, strict=True)
            ],
        )

    def drive(self, executes: list[Execute]) -> Execute:
        spec = self.spec

        def run(inputs: Arrays) -> Mapping[str, np.ndarray]:
            with Buffer() as buffer:
                return run_stream(spec, executes, inputs, buffer)

        return run

    def traced(self) -> Execute | None:
        return self.drive([_torch_pass(step) for step in self.split.passes])

    def fields(self) -> dict[str, Any]:
        limits: dict[str, tuple[int, int | None]] = {}
        if self._tokens.maximum:
            limits[TOKENS] = (self._tokens.minimum, self._tokens.maximum)

        def spec(name: str) -> TensorSpec:
            shape: list[int | str] = list(self.split.shapes[name])
            bounds, dtype = {}, str(self.split.dtypes[name]).removeprefix("torch.")
            if name in self.split.token_axes:
                axis = self.split.axes[name]
                shape[self.split.token_axes[name]], bounds = axis, limits if axis == TOKENS else {}
            return TensorSpec(name=name, dtype=dtype, shape=shape, bounds=bounds, values=rows.get(name))

        rows = {str(v.name): found for graph in self.graphs for v in graph.model.graph.inputs if (found := table_rows(v))}
        inputs, outputs = [spec(name) for name in self.plan.axes], [spec(name) for name in self.split.results]
        image = self.plan.image
        if image is not None:
            (shape,) = self.plan.image_axes.values()
            inputs = [TensorSpec(name=image.input, dtype="float32", shape=shape)]
            for name, made in image.pixels.items():
                channels = self.split.shapes[name][-1] // image.patch**2
                outputs = [TensorSpec(name=made, dtype="float32", shape=[shape[0], channels, *shape[2:]])]
        return {
            **self.common_fields(),
            "inputs": inputs,
            "outputs": outputs,
            "mixers": {},
            "tokens": self.plan.tokens,
            "stream": self.spec,
        }


def choose_chunk(splitter: Splitter, longest: int | None = None) -> tuple[int, list[str]]:
    """The chunk size that goes fastest here, the smaller of two that differ little: measured with ONNX Runtime on one pass.

    Args:
        splitter: of the model.
        longest: tokens that there are at most; no chunk is larger.

    Returns:
        The size, and a note that says what was measured, if there was a choice.
    """
    rates: dict[int, float] = {}
    candidates = sorted({min(chunk, longest or chunk) for chunk in CHUNKS})
    if len(candidates) == 1:
        return candidates[0], []
    for chunk in candidates:
        split = splitter.split(chunk)
        looped = [step for step in split.passes if step.looped]
        step = looped[len(looped) // 2]
        graph = translate(trace_pass(step, split, []))
        native = native_session(ir.to_proto(graph.model).SerializeToString())
        feeds = example_feeds(step, split)
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            native.run(None, feeds)
            seconds.append(time.perf_counter() - start)
        rates[chunk] = chunk / statistics.median(seconds)
    best = max(rates.values())
    chosen = min(chunk for chunk, rate in rates.items() if rate * SLOWER >= best)
    listed = ", ".join(f"{chunk}: {rate / 1e3:,.0f}" for chunk, rate in rates.items())
    return chosen, [f"chunk {chosen}, measured on one pass here (thousand tokens a second by chunk): {listed}"]


def example_feeds(step: Pass, split: Split) -> Arrays:
    """Inputs of a pass to trace or to time it with."""
    generator = np.random.default_rng(0)
    chunk = next(split.shapes[name][axis] for name, axis in split.token_axes.items())
    feeds: Arrays = {}
    for name in step.inputs:
        if name == OFFSET:
            feeds[name] = np.array(0, np.int64)
        elif name == VALID:
            feeds[name] = (np.arange(chunk) == 0).astype(np.float32)  # one real token: no position beyond a table
        elif split.dtypes[name].is_floating_point:
            feeds[name] = generator.standard_normal(split.shapes[name]).astype(np.float32)
        else:
            feeds[name] = torch.zeros(split.shapes[name], dtype=split.dtypes[name]).numpy()
    return feeds


def tensor_spec(value: Any, bounds: Mapping[str, Extent]) -> TensorSpec:
    """A graph input or output as the manifest describes it."""
    shape = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
    named = {axis: extent for axis, extent in bounds.items() if axis in shape and extent.maximum}
    limits = {axis: (extent.minimum, extent.maximum) for axis, extent in named.items()}
    usual = {axis: extent.optimum for axis, extent in named.items() if extent.optimum}
    listed = {axis: list(extent.lengths) for axis, extent in named.items() if extent.lengths}
    dtype, rows = str(value.dtype.numpy()), table_rows(value)
    return TensorSpec(name=value.name, dtype=dtype, shape=shape, bounds=limits, usual=usual, lengths=listed, values=rows)


def _torch_pass(step: Pass) -> Execute:
    module: nn.Module = step.module

    def run(inputs: Arrays) -> Mapping[str, np.ndarray]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(np.asarray(inputs[name])) for name in step.inputs))
        return {name: value.numpy() for name, value in zip(step.outputs, outputs, strict=True)}

    return run


def _merged(pair: tuple[Arrays, Arrays]) -> Arrays:
    return {**pair[0], **pair[1]}
