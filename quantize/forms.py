"""INT8 artifacts from FP32 ones: every graph of a form calibrated together, the most sensitive layers kept in float until the
gates hold.

    prepare every graph -> run the calibration data through the whole form -> each layer quantized alone: its SNR
    -> all quantized; while a gate is missed, the worst layer that is left goes back to float -> convert

The trials run in PyTorch with INT8's rounding; the graphs are made once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from pom_edge.errors import InputError
from pom_edge.export.golden import Case
from pom_edge.export.inputs import BATCH, Axes, Extent
from pom_edge.export.made import Made
from pom_edge.export.moments import with_moments
from pom_edge.export.onnx_graph import Traced, translate
from pom_edge.export.reference import Arrays
from pom_edge.progress import Step, numbered
from pom_edge.quantize.calibration import Calibration
from pom_edge.quantize.quantize import LayerFacts, Options, Prepared, Quantized
from pom_edge.quantize.weights import StoredWeight, weight_only
from pom_edge.runtimes.parity import measure, worst
from pom_edge.runtimes.stepping import Execute

SAMPLES_AT_ONCE = 16

__all__ = ["FormQuantizer", "QuantizedForm", "WeightStore"]


@dataclass
class QuantizedForm:
    """What came out.

    Attributes:
        made: the form with Q/DQ graphs.
        eager: the quantized form in PyTorch, from inputs by name to outputs and mixers by name.
        layers: with what became of each.
        warnings: one sentence each.
    """

    made: Made
    eager: Execute
    layers: list[LayerFacts]
    warnings: list[str] = field(default_factory=list)


class FormQuantizer:
    """A form with observers in all its graphs, calibrated.

    Args:
        made: in FP32.
        data: calibration batches.
        axes: of its inputs, with a free batch.
        options: see :class:`Options`.
        tokens: what the form's token axis takes.

    Raises:
        InputError: no graph has a layer to quantize, or the data does not run through the model.
    """

    def __init__(self, made: Made, data: Calibration, axes: Axes, options: Options, tokens: Extent) -> None:
        self._made, self._tokens = made, tokens
        self._prepared = [_prepared(traced, options) for traced in made.traced_graphs]
        if not any(self._prepared):
            Prepared(made.traced_graphs[0], options)  # says what is missing
        self._drive = made.drive([self._execute(index) for index in range(len(self._prepared))])
        try:
            for inputs in _batches(data, axes, made):
                found = made.plan.through(self._drive, inputs, _chunks(inputs, made, tokens))
                _check_finite(inputs, found)
        except (IndexError, RuntimeError) as error:  # token ids beyond the table, lengths beyond the model's
            raise InputError(f"the calibration data does not run through the model: {error}") from error
        for prepared in self._graphs():
            prepared.stop_watching()

    def _graphs(self) -> list[Prepared]:
        return [prepared for prepared in self._prepared if prepared is not None]

    def _execute(self, index: int) -> Execute:
        prepared, traced = self._prepared[index], self._made.traced_graphs[index]
        module = traced.program.module(check_guards=False) if prepared is None else prepared.module
        return torch_execute(module, traced)

    @property
    def layers(self) -> list[str]:
        """Module paths that can be INT8, in the order in which they run; one that several passes compute is there once."""
        return list(dict.fromkeys(layer.path for prepared in self._graphs() for layer in prepared.layers))

    def run(self, case: Case, paths: list[str] | None = None) -> Arrays:
        """Outputs and mixers of a case with these layers rounded to INT8 (none: []; all: None)."""
        with self.quantizing(paths):
            return self._made.plan.through(self._drive, case.inputs, case.chunks)

    @contextlib.contextmanager
    def quantizing(self, paths: list[str] | None) -> Iterator[Execute]:
        """The form in PyTorch with these layers rounded to INT8, for as long as the context lasts."""
        with contextlib.ExitStack() as stack:
            for prepared in self._graphs():
                stack.enter_context(prepared.quantizing(paths))
            yield self._drive

    def sensitivity(self, case: Case, step: Step) -> dict[str, float]:
        """The SNR (dB) of the form's outputs when one layer alone is INT8, for each layer; ``step`` is told how far it is."""
        truth = self.run(case, [])
        names = list(case.outputs)
        return {
            path: round(worst([measure(truth[n], found[n]) for n in names]).snr_db, 2)
            for path in numbered(self.layers, step, "quantize each layer alone: layer")
            for found in [self.run(case, [path])]
        }

    def convert(self, keep_float: list[str]) -> QuantizedForm:
        """The INT8 form, with these layers in float.

        Raises:
            InputError: no layer is left.
        """
        quantized: list[Quantized | None] = []
        for prepared in self._prepared:
            if prepared is None:
                quantized.append(None)
                continue
            own = {layer.path for layer in prepared.layers}
            kept = [path for path in keep_float if path in own]
            quantized.append(None if own <= set(kept) else prepared.convert(kept))
        if not any(quantized):
            raise InputError("no layer is left for INT8: every one of them misses the gate; use --precision fp16")
        traced = [t if q is None else q.traced for t, q in zip(self._made.traced_graphs, quantized, strict=True)]
        graphs = [translate(each) for each in traced]
        made = self._made.typed(graphs, "int8")
        made.traced_graphs = traced
        eager = made.drive(
            [
                torch_execute(t.program.module(check_guards=False) if q is None else q.module, t)
                for t, q in zip(traced, quantized, strict=True)
            ]
        )
        facts: dict[str, LayerFacts] = {}
        for prepared, done in zip(self._prepared, quantized, strict=True):
            for each in done.layers if done is not None else prepared.kept_facts() if prepared is not None else []:
                facts.setdefault(each.path, each)
        warnings = [warning for done in quantized if done is not None for warning in done.warnings]
        return QuantizedForm(made, eager, list(facts.values()), list(dict.fromkeys(warnings)))


class WeightStore:
    """A form whose weights alone are integers; those that cost most get more bits until the gates hold.

    Args:
        base: in FP32, or typed.
        precision: ``"w8"`` or ``"w4"``.

    Raises:
        InputError: it has no weight to store.
    """

    def __init__(self, base: Made, precision: str) -> None:
        self._base, self._precision = base, precision
        self._bits: Literal[4, 8] = 8 if precision == "w8" else 4
        self.entries = self.store({})[1]

    def store(self, other: dict[str, int]) -> tuple[Made, list[StoredWeight]]:
        """The form with these weights in other numbers of bits, and what became of each weight."""
        graphs, entries, failure = [], dict[str, StoredWeight](), None
        for graph in self._base.graphs:
            changed = graph.clone()
            try:
                for entry in weight_only(changed.model, self._bits, other=other):
                    entries.setdefault(entry.name, entry)
            except InputError as error:  # a pass without a weight
                failure = error
            graphs.append(with_moments(changed) if self._base.precision == "fp32" else changed)
        if not entries and failure is not None:
            raise failure
        return self._base.typed(graphs, self._precision, self._base.precision), list(entries.values())

    def sensitivity(self, folder: Path, case: Case, step: Step) -> dict[str, float]:
        """The SNR (dB) of the form's outputs and mixers, the worst, when one weight alone is stored as integers."""
        names = [entry.name for entry in self.entries]
        truth = self._run(self._base, folder, case)
        found = {}
        for name in numbered(names, step, "store each weight alone: weight"):
            made, _ = self.store({other: 32 for other in names if other != name})
            values = self._run(made, folder, case)
            found[name] = round(min(measure(truth[key], values[key]).snr_db for key in truth), 2)
        return found

    def _run(self, made: Made, folder: Path, case: Case) -> Arrays:
        made.save(folder, {})
        return self._base.plan.through(made.written(folder), case.inputs, case.chunks)

    def more_bits(self, other: dict[str, int], alone: dict[str, float]) -> dict[str, int] | None:
        """The same with the most costly integer weight in the next wider type; None: it would be the last."""
        bits = {entry.name: other.get(entry.name, entry.bits) for entry in self.entries}
        left = [name for name in sorted(alone, key=lambda each: alone[each]) if bits[name] < 32]
        if len(left) < 2:
            return None
        # an 8-bit weight costs a sixteenth of the error of a 4-bit one, 24 dB: those come later
        worst_one = min(left, key=lambda name: alone[name] + (24 if bits[name] == 8 and self._bits == 4 else 0))
        return {**other, worst_one: 8 if bits[worst_one] == 4 else 32}


def _prepared(traced: Traced, options: Options) -> Prepared | None:
    """None for a pass without a layer to quantize."""
    try:
        return Prepared(traced, options)
    except InputError:
        return None


def torch_execute(module: nn.Module, traced: Traced) -> Execute:
    """A traced program's module, from arrays by name to arrays by name."""
    names = [*traced.outputs, *traced.taps]
    named = bool(traced.arguments) and isinstance(traced.arguments[0], dict)

    def run(inputs: Arrays) -> Arrays:
        tensors = {name: torch.from_numpy(np.array(inputs[name], order="C")) for name in traced.inputs}
        with torch.no_grad():
            outputs = module(tensors) if named else module(*tensors.values())
        return {name: value.numpy() for name, value in zip(names, outputs, strict=True)}

    return run


def _check_finite(inputs: Arrays, found: Arrays) -> None:
    bad = [name for name, array in found.items() if not np.isfinite(array).all()]
    if bad:
        largest = ", ".join(f"{n} up to {np.abs(a).max():.3g}" for n, a in inputs.items() if a.dtype.kind == "f" and a.size)
        raise InputError(
            f"the calibration data drives the model to NaN or infinity ({', '.join(bad[:4])}; inputs: {largest}): is there an "
            "outlier in it?"
        )


def _batches(data: Calibration, axes: Axes, made: Made) -> Iterator[Arrays]:
    """Samples in batches that the form takes: a fixed batch as it is, whole ones only."""
    batched = [name for name, dims in axes.items() if dims and dims[0] == BATCH]
    planned = made.plan.image_axes or made.plan.axes
    fixed = next((dims[0] for name in batched if (dims := planned[name]) and isinstance(dims[0], int)), None)
    size = fixed or SAMPLES_AT_ONCE
    for batch in data.batches:
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}
        rows = max((arrays[name].shape[0] for name in batched), default=1)
        for start in range(0, rows, size):
            part = {name: array[start : start + size] if name in batched else array for name, array in arrays.items()}
            length = min(size, rows - start)
            if fixed and length < fixed:  # repeat the last sample: it counts no more for being seen again
                part = {n: np.concatenate([a, *[a[-1:]] * (fixed - length)]) if n in batched else a for n, a in part.items()}
            yield part


def _chunks(inputs: Arrays, made: Made, tokens: Extent) -> list[int]:
    """How a sequence is cut for a recurrent form: as long as it takes them; what is left over must fit too."""
    if made.plan.form != "recurrent":
        return []
    axes = made.plan.token_axes
    length = next(inputs[name].shape[axis] for name, axis in axes.items() if name in inputs)
    longest = min(tokens.maximum or length, length)
    whole, rest = divmod(length, longest)
    if 0 < rest < tokens.minimum:
        raise InputError(
            f"a calibration sequence of {length} tokens cannot be cut into chunks of {tokens.minimum} to {longest}"
        )
    return [longest] * whole + ([rest] if rest else [])
