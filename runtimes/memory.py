"""How much memory a run takes: predicted from the graph, measured in a fresh process, enforced by the system.

Prediction: opening the artifact in a fresh process gives the runtime's base and the weights; what a run needs beyond them is
simulated, tensor by tensor, as ONNX Runtime's arena gives and takes memory (arena.py). Measurement is in
measuring.py, enforcement in limits.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle, Measurement, PassSpec, StreamSpec, TensorSpec
from pom_edge.errors import InputError, require
from pom_edge.formula import evaluate
from pom_edge.runtimes.arena import Arena, Piece
from pom_edge.runtimes.limits import memory_limit
from pom_edge.runtimes.measuring import PeakMemory, measure_opened, measure_peak
from pom_edge.runtimes.session import BATCH, check_spill, chunk_lengths, select_artifact
from pom_edge.runtimes.stepping import is_state
from pom_edge.system import human_bytes, memory_bytes

MAX_SIZE = 2**63 - 1
SIMULATED = 64  # chunks of a recurrent run; later ones take what the second half of these took on average

__all__ = [
    "MemoryReport",
    "PeakMemory",
    "Prediction",
    "SizeError",
    "check_budget",
    "make_arrays",
    "measure_peak",
    "parse_size",
    "predict",
    "stored_bytes",
    "token_count",
]


class SizeError(InputError):
    """An artifact takes no run of this size, or what such a run needs is not known. Another form may be better off."""


def parse_size(text: str, option: str) -> int:
    """Bytes of ``512MiB``, ``1.5 GB`` or ``1000000``: KB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024.

    Raises:
        InputError: not of that form, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = "" if found is None else found[2].upper().removesuffix("B")
    expected = f"{option} is {text!r}; expected a size, for example 512MiB (1024 x 1024), 512MB (1000 x 1000) or 536870912"
    if found is None or (unit and unit[0] == "I") or (unit and not found[2].upper().endswith("B")):
        raise InputError(expected)
    size = int(float(found[1]) * (1024 if unit.endswith("I") else 1000) ** ("KMGT".index(unit[0]) + 1 if unit else 0))
    if size < 1:
        raise InputError(expected)
    return size


@dataclass(frozen=True)
class Prediction:
    """Bytes that a run will take; ``runtime + weights + io + activations == total``."""

    runtime: int
    weights: int
    io: int
    activations: int

    @property
    def total(self) -> int:
        """Of the process."""
        return self.runtime + self.weights + self.io + self.activations

    def to_dict(self) -> dict[str, int]:
        """As JSON values (docs/cli.md)."""
        return {**asdict(self), "total": self.total}

    def check_possible(self, budget: int) -> None:
        """Refuse a budget that is used up before a run begins.

        Raises:
            InputError: runtime and weights take more.
        """
        for least, what in (
            (self.runtime, "the runtime alone takes"),
            (self.runtime + self.weights, "runtime and weights take"),
        ):
            if budget < least:
                sizes = [human_bytes(budget), human_bytes(least)]
                if sizes[0] == sizes[1]:
                    sizes = [f"{budget:,} B", f"{least:,} B"]
                raise InputError(f"the budget of {sizes[0]} is below what {what}, {sizes[1]}; no form and no chunk can keep it")


def _graph_of(path: Path, name: str | None) -> Artifact:
    bundle = Bundle.open(path)
    if not any(each.file.endswith(".onnx") for each in bundle.manifest.artifacts):
        raise InputError(f"{path.name} holds no ONNX graph, and memory is known for these: export with --target onnx as well")
    return select_artifact(bundle, ".onnx", name)


def predict(
    path: str | os.PathLike[str],
    tokens: int | None,
    batch: int = 1,
    artifact: str | None = None,
    runtime: str = "ort",
    spill: bool = False,
    threads: int | None = None,
) -> Prediction:
    """Predict the memory of one run.

    Args:
        path: the bundle.
        tokens: N; of images, how many patches. Other free axes are taken to be as long. None: the artifact's own number.
        batch: B.
        artifact, runtime, threads: as in :func:`pom_edge.runtimes.open_session`.
        spill: streamed form: the tokens between passes, inputs and outputs are in files.

    Raises:
        SizeError: the artifact carries no memory plan, or does not take this size.
        InputError: this system has no gauge for the base.
    """
    chosen = _graph_of(Path(path), artifact)
    io, activations = predict_run(chosen, tokens, batch, spill)
    opened = measure_opened(path, artifact, runtime, threads)
    return Prediction(opened.base_bytes, opened.weights_bytes, io, activations)


def token_count(artifact: Artifact, tokens: int | None) -> int | None:
    """The tokens of a run: those asked for, where the artifact takes them.

    Args:
        artifact: of a manifest.
        tokens: asked for; None: whatever number the artifact alone has.

    Returns:
        N; None where inputs of a fixed size do not say how many tokens they are (a model of your own that takes images).

    Raises:
        SizeError: it has another number, or takes any and none was asked for.
    """
    inputs = [spec for spec in artifact.inputs if not is_state(spec.name)]
    bounds = [] if artifact.form == "recurrent" else [b for spec in inputs for b in spec.bounds.items() if b[0] != BATCH]
    own = next((low for _, (low, high) in bounds if low == high), artifact.tokens)
    free = artifact.form == "recurrent" or any(isinstance(n, str) and n != BATCH for spec in inputs for n in spec.shape)
    sizes = ", ".join(map(str, inputs))
    if own is not None:
        if tokens not in (None, own):
            raise SizeError(
                f"--tokens is {tokens}; {artifact.file} has {own} tokens in every run ({sizes}). Leave --tokens out, or export "
                "the model for another size"
            )
        return own
    if not free:
        if tokens is not None:
            raise SizeError(f"--tokens is {tokens}; the inputs of {artifact.file} have one size ({sizes}): leave --tokens out")
        return None
    if tokens is None:
        raise SizeError(f"{artifact.file} takes runs of any length ({sizes}); say for how many with --tokens N")
    for axis, (low, high) in bounds:
        if tokens < low or (high is not None and tokens > high):
            raise SizeError(f"--tokens is {tokens}; {artifact.file} takes {low} to {high} {axis}")
    if artifact.form == "recurrent":
        low, high = chunk_lengths(artifact, tokens)
        if 0 < tokens % high < low:
            raise SizeError(f"--tokens is {tokens}; {artifact.file} takes chunks of {low} to {high}, which do not add up to it")
    return tokens


def predict_run(artifact: Artifact, tokens: int | None, batch: int = 1, spill: bool = False) -> tuple[int, int]:
    """Bytes of one run beyond runtime and weights, by arithmetic alone: inputs and outputs, and activations.

    Args:
        artifact: of a manifest.
        tokens, batch, spill: as in :func:`predict`.

    Raises:
        SizeError: the artifact carries no memory plan, or does not take this size.
    """
    tokens = token_count(artifact, tokens) or 1
    if not artifact.arena or any(plan is None for plan in artifact.arena):
        why = (
            "it only runs evaluated"
            if artifact.precision == "bf16"
            else "ONNX Runtime makes a tensor whose size its inputs do not tell"
        )
        raise SizeError(
            f"the memory of {artifact.file} cannot be predicted: {why}. The streamed form (--form streamed) can be, where the "
            "model has one; one run is measured at every export"
        )
    inputs, outputs = (_io_bytes(artifact, specs, tokens, batch) for specs in (artifact.inputs, artifact.outputs))
    stream = artifact.stream
    if artifact.form == "recurrent":
        return inputs + outputs, _chunked_bytes(artifact, tokens, batch, inputs, outputs)
    arena, sizes = Arena(), free_sizes(artifact, tokens, batch)
    for plan in artifact.arena:
        for piece in arena.run(plan or (), sizes).values():
            arena.give(piece)
    if stream is None:
        return inputs + outputs, max(arena.total - outputs, 0)  # the runtime hands its own memory out as the answer
    files = spill and _from_file_to_file(artifact)
    chunk = max(_host_bytes(stream, step, tokens, spill, files) for step in stream.passes)
    return 0 if files else inputs + outputs, arena.total + (0 if spill else stored_bytes(stream, tokens)) + chunk


def _chunked_bytes(artifact: Artifact, tokens: int, batch: int, inputs: int, outputs: int) -> int:
    """What a recurrent run needs beyond inputs and outputs: the answers of earlier chunks wait in the arena for the last."""
    longest = chunk_lengths(artifact, tokens)[1]
    count = -(-tokens // longest)
    plan = artifact.arena[0] or ()
    arena = Arena()
    totals: list[int] = []
    state: list[Piece] = []
    for index in range(min(count, SIMULATED)):
        length = min(longest, tokens - index * longest)
        made = arena.run(plan, free_sizes(artifact, length, batch))
        for piece in state:
            arena.give(piece)
        state = [piece for name, piece in made.items() if is_state(name)]
        totals.append(arena.total)
    if count == 1:
        return max(arena.total - outputs, 0)  # the runtime hands its own memory out as the answer
    half = SIMULATED // 2
    later = (count - SIMULATED) * (totals[-1] - totals[-1 - half]) // half if count > SIMULATED else 0
    copied = inputs * longest // tokens if batch > 1 else 0  # a chunk of several sequences is not contiguous
    return arena.total + later + copied


@dataclass(frozen=True)
class MemoryReport:
    """A prediction beside a measurement, and whether both keep a budget.

    Attributes:
        tokens: None where inputs of a fixed size do not say how many they are.
        budget: bytes of the whole process; None where none was given.
        enforced: what held the run to the budget, "cgroup v2" or "RLIMIT_DATA"; None: nothing did.
        exceeded: the system stopped a run that was to keep the budget; what it said.
        unmeasured: why there is no measurement, where that was decided before the run.
    """

    file: str
    form: str
    tokens: int | None
    batch: int
    predicted: Prediction
    measured: PeakMemory | None
    budget: int | None
    enforced: str | None
    exceeded: str | None = None
    unmeasured: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the budget holds: by measurement where there is one, else by prediction."""
        if self.exceeded is not None:
            return False
        total = self.predicted.total if self.measured is None else self.measured.total_bytes
        return self.budget is None or total <= self.budget

    def measurement(self, machine: Mapping[str, str], spill: bool, threads: int | None) -> Measurement:
        """For the bundle's manifest.

        Raises:
            InputError: nothing was measured.
        """
        measured = self.to_dict()["measured_bytes"]
        if measured is None:
            why = self.exceeded or self.unmeasured or "this system has no gauge; expected Linux"
            raise InputError(f"--record has nothing to record: {why}")
        return Measurement(
            file=self.file,
            tokens=self.tokens,
            batch=self.batch,
            spill=spill,
            threads=threads,
            machine=dict(machine),
            runtime=f"onnxruntime {require('onnxruntime', 'ort').__version__}",
            recorded=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            predicted=self.predicted.to_dict(),
            measured=measured,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (docs/cli.md)."""
        measured = self.measured
        return {
            "passed": self.passed,
            "file": self.file,
            "form": self.form,
            "tokens": self.tokens,
            "batch": self.batch,
            "budget_bytes": self.budget,
            "enforced": self.enforced,
            "exceeded": self.exceeded,
            "unmeasured": self.unmeasured,
            "predicted_bytes": self.predicted.to_dict(),
            "measured_bytes": None
            if measured is None
            else {
                "runtime": measured.base_bytes,
                "weights": measured.weights_bytes,
                "io": measured.io_bytes,
                "activations": measured.activations_bytes,
                "total": measured.total_bytes,
                "resident": measured.resident_bytes,
            },
        }


def check_budget(
    path: str | os.PathLike[str],
    tokens: int | None,
    batch: int = 1,
    *,
    budget: int | None = None,
    enforce: bool = False,
    artifact: str | None = None,
    runtime: str = "ort",
    spill: str | None = None,
    threads: int | None = None,
) -> MemoryReport:
    """Predict and measure one run on random inputs of the given size.

    Args:
        path, artifact, runtime, threads: as in :func:`pom_edge.runtimes.open_session`.
        tokens, batch: size of the run, as in :func:`predict`.
        budget: bytes of the whole process.
        enforce: measure under a limit of the system at the budget (limits.py); a run that needs more fails.
        spill: streamed form: a folder for the tokens, the inputs and the outputs.

    Raises:
        InputError: a budget below what the runtime and the weights take, a run that is to be enforced and cannot be made
            here, or as :func:`predict`.
    """
    chosen = _graph_of(Path(path), artifact)
    if spill is not None:
        check_spill(Path(spill), chosen)
    count = token_count(chosen, tokens)
    predicted = predict(path, tokens, batch, artifact, runtime, spill is not None, threads)
    tokens = 1 if count is None else count  # inputs of one size: it does not matter
    if budget is not None:
        predicted.check_possible(budget)
    reason = _too_large(chosen, predicted, tokens, batch, spill)
    if reason is not None:
        if enforce and budget is not None and predicted.total <= budget:
            raise InputError(f"--enforce needs a run, and this one cannot be made here: {reason}")
        return MemoryReport(chosen.file, chosen.form, count, batch, predicted, None, budget, None, unmeasured=reason)
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(memory_limit(budget)) if enforce and budget is not None else None
        kind = None if limit is None else limit.kind
        about = (chosen.file, chosen.form, count, batch, predicted)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=spill)))
        inputs: Any = make_arrays(chosen, tokens, batch)
        if spill is not None and _from_file_to_file(chosen):
            np.save(folder / "inputs.npy", next(iter(inputs.values())))
            inputs = folder / "inputs.npy"
        try:
            measured = measure_peak(path, artifact, inputs, runtime, threads, spill, limit)
        except InputError as error:
            if limit is None:
                raise
            return MemoryReport(*about, None, budget, kind, exceeded=str(error))
        return MemoryReport(*about, measured, budget, kind)


def _too_large(artifact: Artifact, predicted: Prediction, tokens: int, batch: int, spill: str | None) -> str | None:
    """Why a run cannot be measured on this machine; None where nothing speaks against it."""
    available = (memory_bytes() or (0, predicted.total))[1]
    if predicted.total > available:
        return f"it is predicted to take {human_bytes(predicted.total)}, and {human_bytes(available)} are available"
    inputs, outputs = (_io_bytes(artifact, specs, tokens, batch) for specs in (artifact.inputs, artifact.outputs))
    if inputs > available // 2:  # they are made here, and read or copied by the process that runs
        return f"its inputs are {human_bytes(inputs)}, and {human_bytes(available)} of memory are available"
    if spill is not None and artifact.stream is not None:
        needed, free = inputs + outputs + stored_bytes(artifact.stream, tokens), shutil.disk_usage(spill).free
        if needed > free:
            return f"its files take {human_bytes(needed)}, and {human_bytes(free)} are free in {spill}"
    return None


def free_sizes(artifact: Artifact, tokens: int, batch: int) -> dict[str, int]:
    """Lengths of all free axes of an artifact.

    Raises:
        SizeError: its batch is fixed at another number, or a size is beyond what ONNX can express.
    """
    for option, size in (("--tokens", tokens), ("--batch", batch)):
        if size > MAX_SIZE:
            raise SizeError(f"{option} is {size}; expected at most {MAX_SIZE}, the longest axis that ONNX has")
    fixed = artifact.inputs[0].shape[0]
    if isinstance(fixed, int) and fixed != batch:
        raise SizeError(f"{artifact.file} takes batches of {fixed}, found --batch {batch}")
    low, high = artifact.inputs[0].bounds.get(BATCH, (1, None))
    if batch < low or (high is not None and batch > high):
        raise SizeError(f"{artifact.file} takes batches of {low} to {high}, found --batch {batch}")
    names = {dim for spec in (*artifact.inputs, *artifact.outputs) for dim in spec.shape if isinstance(dim, str)}
    image = artifact.stream.image if artifact.stream is not None else None
    strip = {} if image is None else {"height": image.patch, "width": image.patch * tokens}  # so many patches in a row
    return {
        "batch": batch,
        "tokens": tokens,
        **{name: batch if name == "batch" else tokens for name in names if name.isidentifier()},
        **strip,
    }


def make_arrays(artifact: Artifact, tokens: int, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of the given size: normal floats, integers within their table, positions that count."""
    generator = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    values = {spec.name: spec.values or (0, 1) for spec in artifact.inputs}
    for name, dtype, shape in _shapes(
        artifact, [s for s in artifact.inputs if not is_state(s.name)], free_sizes(artifact, tokens, batch)
    ):
        if "positions" in name:
            made[name] = np.zeros(shape, dtype) + np.arange(shape[0], dtype=dtype).reshape(-1, *[1] * (len(shape) - 1))
        elif "mask" in name:
            made[name] = np.ones(shape, dtype)
        elif np.dtype(dtype).kind == "f":
            made[name] = generator.standard_normal(shape).astype(dtype)
        else:
            made[name] = generator.integers(values[name][0], values[name][1] + 1, shape).astype(dtype)
    return made


def _shapes(artifact: Artifact, specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of tensors at these sizes."""
    for spec in specs:
        shape = [dim if isinstance(dim, int) else evaluate(dim, sizes) for dim in spec.shape]
        if artifact.stream is not None and spec.name not in artifact.stream.token_axes:
            shape = artifact.stream.shapes.get(spec.name, shape)
        yield spec.name, spec.dtype, shape


def _io_bytes(artifact: Artifact, specs: Sequence[TensorSpec], tokens: int, batch: int) -> int:
    """Of whole inputs or outputs; state is not among them."""
    whole = [spec for spec in specs if not is_state(spec.name)]
    if artifact.form == "recurrent":  # of a sequence, whatever the length of a chunk
        axes = artifact.token_axes
        lengths = {spec.name: [tokens if i == axes.get(spec.name) else n for i, n in enumerate(spec.shape)] for spec in whole}
        whole = [spec.model_copy(update={"shape": lengths[spec.name]}) for spec in whole]
    shapes = _shapes(artifact, whole, free_sizes(artifact, tokens, batch))
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in shapes)


def _from_file_to_file(artifact: Artifact) -> bool:
    """Whether inputs and outputs of a spilled run stay in files: one of each, with a row for each token."""
    stream = artifact.stream
    return (
        stream is not None
        and len(artifact.inputs) == len(artifact.outputs) == 1
        and artifact.outputs[0].name in stream.token_axes
    )


def _host_bytes(stream: StreamSpec, step: PassSpec, tokens: int, spill: bool, files: bool) -> int:
    """Peak of the arrays that are made around one run of a pass; what comes out of it is the runtime's own memory.

    A chunk is a part of an array that is there, and costs nothing, unless it is cut from an image, read from a file, of several
    sequences (not contiguous: copied), or filled up (copied): see :mod:`pom_edge.runtimes.streamed`.

    Args:
        stream, step: which pass.
        tokens: N.
        spill: what is stored for each token is in a file.
        files: inputs and outputs are, too.
    """
    image = stream.image
    stored = {name for each in stream.passes for name in each.stores}

    def size(name: str) -> int:
        return math.prod(stream.shapes[name]) * np.dtype(stream.dtypes[name]).itemsize

    def several(name: str) -> int:  # arrays that a chunk of several sequences needs more than a chunk of one
        return int(math.prod(stream.shapes[name][: stream.token_axes[name]]) > 1)

    def peak(count: int) -> int:  # for a chunk of so many tokens
        held = most = 0
        for name in step.inputs:
            if name not in stream.token_axes:
                continue
            if image is not None and name in (image.patches, image.positions):
                reading, kept = 2, 1  # patches: the strip they come from and themselves; positions: counted, divided, joined
            elif spill and (files or name in stored):
                reading, kept = 1 + several(name), 1
            else:
                reading, kept = several(name), several(name)
            part = size(name) * count // stream.chunk
            filled = size(name) if count < stream.chunk else 0
            most = max(most, held + reading * part, held + kept * part + filled)
            held += filled or kept * part
        for name in (*step.stores, *step.results):
            if name in stream.token_axes:
                pixels = image is not None and name in image.pixels
                copied = pixels or (several(name) and spill and (files or name in stored))
                most = max(most, held + (size(name) * count // stream.chunk if copied else 0))
        return max(most, held)

    return max(peak(count) for count in {min(tokens, stream.chunk), tokens % stream.chunk or stream.chunk} if count <= tokens)


def stored_bytes(stream: StreamSpec, tokens: int) -> int:
    """The buffer between passes, in memory; values of equal kind take over each other's place."""
    widths: dict[tuple[Any, ...], int] = {}
    for step in stream.passes:
        for kind in {(tuple(stream.shapes[n]), stream.token_axes[n], stream.dtypes[n]) for n in step.stores}:
            shape, axis, dtype = kind
            count = sum((tuple(stream.shapes[n]), stream.token_axes[n], stream.dtypes[n]) == kind for n in step.stores)
            row = math.prod(n for i, n in enumerate(shape) if i != axis) * np.dtype(dtype).itemsize
            widths[kind] = max(widths.get(kind, 0), row * count)
    return sum(widths.values()) * tokens
