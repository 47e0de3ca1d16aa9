"""One interface for every runtime: open an artifact, look at its tensors, run it, check it against PyTorch's answers."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle, PassSpec, StreamSpec, TensorSpec
from pom_edge.engine_options import rebuild_command
from pom_edge.errors import BundleError, InputError
from pom_edge.extent import cut
from pom_edge.runtimes.stepping import COUNT, Execute, empty_state, is_state, load_state, next_state, run_chunks, save_state
from pom_edge.runtimes.streamed import Feed, Progress, run_passes, run_stream
from pom_edge.runtimes.tokens import Buffer, NpySink, NpySource, check_folder

if TYPE_CHECKING:
    from pom_edge.runtimes.checking import CheckReport

# What each runtime executes: the ending of its files, and the target where several share one. The first that fits is an
# artifact's own.
KINDS: dict[str, tuple[str, str | None]] = {
    "ort": (".onnx", None),
    "ort-cuda": (".onnx", None),
    "ort-trt": (".onnx", None),
    "coreml": (".mlpackage", None),
    "trt": (".engine", "trt"),
    "rtx": (".engine", "rtx"),
}
RUNTIMES = tuple(KINDS)
BATCH, TOKENS = "batch", "tokens"  # the names of free axes
MAX_CHUNK = 4096  # tokens that run() gives a recurrent graph at once: bounded memory, and no faster beyond

__all__ = ["RUNTIMES", "Session", "check_spill", "chunk_lengths", "open_session", "runtime_of", "select_artifact"]


class Session(ABC):
    """An opened artifact. Use as a context manager, or call :meth:`close`.

    An artifact of the recurrent form remembers: :meth:`step` and :meth:`stream` go on from what they have seen, until
    :meth:`reset`.

    Attributes:
        bundle, artifact: what is running.
        inputs, outputs: tensor specs; free axes are names. State is not among them.
        progress: streamed form: called after every chunk with the tokens done and all tokens, counted over all passes.
    """

    def __init__(self, bundle: Bundle, artifact: Artifact, spill: Path | None = None) -> None:
        self.bundle = bundle
        self.artifact = artifact
        self.inputs: list[TensorSpec] = [spec for spec in artifact.inputs if not is_state(spec.name)]
        self.outputs: list[TensorSpec] = [spec for spec in artifact.outputs if not is_state(spec.name)]
        self.progress: Progress | None = None
        self._spill = spill
        self._state: dict[str, np.ndarray] | None = None
        self._warned = False

    @property
    @abstractmethod
    def runtime(self) -> str:
        """What executes the artifact, with its version."""

    @abstractmethod
    def _run_graph(self, index: int, names: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one of the artifact's graphs (there are several in the streamed form) on validated inputs."""

    @abstractmethod
    def close(self) -> None:
        """Give the runtime's memory back; the session cannot be used afterwards."""

    @property
    def recurrent(self) -> bool:
        """Whether the artifact carries state from chunk to chunk."""
        return self.artifact.form == "recurrent"

    def run(self, x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """Run the artifact. A recurrent one starts anew for this call; its stream is left where it is.

        Args:
            x: the first input, for models where it needs no name.
            inputs: inputs by tensor name.

        Returns:
            The output, or all outputs by name when there are several.

        Raises:
            InputError: a name, dtype or shape does not fit; says what was found and expected.
        """
        return _only(self.run_named(self._named(x, inputs)))

    def run_named(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As :meth:`run`, with names in and names out."""
        if not self.recurrent:
            return self.execute(inputs)
        axes = self.artifact.token_axes
        inputs = self._validate(self._with_mask(inputs), [_any_length(spec, axes.get(spec.name)) for spec in self.inputs])
        length = next(inputs[name].shape[axis] for name, axis in axes.items() if name in inputs)
        state = empty_state(self.artifact.inputs, self._batch(inputs))
        return run_chunks(self.execute, inputs, axes, self._chunks(length), state)

    def execute(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the graph once, every one of its inputs and outputs by name, state included."""
        validated = self._validate(inputs, self.artifact.inputs)
        self._warn_beyond(validated)
        stream = self.artifact.stream
        if stream is None:
            return self._run_graph(0, [spec.name for spec in self.artifact.outputs], validated)
        with Buffer(self._spill) as buffer:
            outputs = run_stream(stream, self._executes(stream), validated, buffer, self.progress)
        return {spec.name: outputs[spec.name] for spec in self.artifact.outputs}  # in the model's order

    def run_file(self, source: Path, target: Path) -> dict[str, list[int]]:
        """Run on a ``.npy`` file of shape (1, tokens, ..) into another one, holding neither in memory: streamed form only.

        Returns:
            Shape of the output by name.

        Raises:
            InputError: another form, more than one input or output, or files that do not fit.
        """
        stream, names = self.artifact.stream, [spec.name for spec in self.outputs]
        if stream is None or (reason := self._not_from_files(stream)):
            reason = reason if stream is not None else f"is of the {self.artifact.form} form"
            raise InputError(
                f"{self.artifact.file} {reason}, so it cannot run from file to file: that takes the streamed form, one input, "
                "and one output with a row for each token. With run(), or --output y.npz, inputs and outputs are in memory"
            )
        reader = NpySource(source)
        try:
            (spec,) = self.inputs
            sample = reader.rows.read(0, min(1, reader.shape[1])).reshape(1, -1, *reader.shape[2:])
            _fit(spec.model_copy(update={"bounds": {}}), sample, {})
            tokens = reader.shape[1]
            shape = [tokens if i == stream.token_axes[names[0]] else n for i, n in enumerate(stream.shapes[names[0]])]
            writer = NpySink(target, shape, np.dtype(stream.dtypes[names[0]]))
            try:
                feed = Feed({spec.name: reader.rows}, {TOKENS: tokens}, sinks={names[0]: writer.rows})
                with Buffer(self._spill) as buffer:
                    run_passes(stream, self._executes(stream), feed, buffer, self.progress)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        finally:
            reader.close()
        return {names[0]: shape}

    def _not_from_files(self, stream: StreamSpec) -> str:
        """Why inputs and outputs of the streamed form cannot stay in files; empty where they can."""
        names = [spec.name for spec in self.inputs]
        if stream.image is not None:
            return f"takes images ({names[0]}), which lie in memory"
        if names[1:] == ["mask"]:
            return (
                f"has an input mask beside {names[0]} (export again without --mask padding, or with an --example of {names[0]} "
                "alone)"
            )
        if len(names) > 1:
            return f"has the inputs {', '.join(names)}"
        outputs = [spec.name for spec in self.outputs]
        if len(outputs) > 1:
            return f"has the outputs {', '.join(outputs)}"
        return "" if outputs[0] in stream.token_axes else f"gives {outputs[0]} once, not for each token"

    def _executes(self, stream: StreamSpec) -> list[Execute]:
        def execute(index: int, step: PassSpec) -> Execute:
            names = [*step.stores, *(each.name for each in step.sums), *step.results]
            return lambda inputs: self._run_graph(index, names, inputs)

        return [execute(index, step) for index, step in enumerate(stream.passes)]

    def step(self, x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """The next chunk of the stream: recurrent form only; arguments, result and errors as :meth:`run`.

        The number of sequences is that of the first chunk, until :meth:`reset`.
        """
        self._must_be_recurrent("step")
        named = self._chunk(x, inputs)
        if self._state is None:
            self._state = empty_state(self.artifact.inputs, self._batch(named))
        outputs = self.execute({**named, **self._state})
        following = next_state(outputs)
        if not all(np.isfinite(array).all() for array in following.values()):
            raise InputError("the chunk drives the state beyond what FP32 holds, where it would stay; the stream is unchanged")
        self._state = following
        return self._answer(outputs)

    def _chunk(self, x: np.ndarray | None, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next chunk of a stream, validated."""
        named = self._validate(self._with_mask(self._named(x, inputs)), self.inputs)
        for name, array in named.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(
                    f"input {name!r} contains NaN or infinity, which the state would carry for ever; the stream is unchanged"
                )
        return named

    @staticmethod
    def _answer(outputs: Mapping[str, np.ndarray]) -> np.ndarray | dict[str, np.ndarray]:
        return _only({name: array for name, array in outputs.items() if not is_state(name)})

    def stream(self, chunks: Iterable[np.ndarray | Mapping[str, np.ndarray]]) -> Iterator[np.ndarray | dict[str, np.ndarray]]:
        """:meth:`step` for each chunk of an iterable: arrays, or inputs by name."""
        self._must_be_recurrent("stream")
        for chunk in chunks:
            yield self.step(**chunk) if isinstance(chunk, Mapping) else self.step(chunk)

    def reset(self) -> None:
        """Forget the stream."""
        self._state = None

    @property
    def tokens_seen(self) -> list[int]:
        """How many tokens each sequence of the stream has had; empty before the first chunk."""
        return [] if self._state is None else [int(count) for count in self._state[COUNT]]

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the stream's state to a ``.safetensors`` file, whole or not at all.

        Raises:
            InputError: nothing has been streamed, or the place cannot be written.
        """
        self._must_be_recurrent("save_state")
        if self._state is None:
            raise InputError("the stream has seen nothing yet: there is no state to save")
        save_state(Path(path), self._state, self.artifact, self.bundle.sha256(self.artifact.file))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Go on from a saved state.

        Raises:
            InputError: not a state, or that of another model or version; the stream is unchanged.
        """
        self._must_be_recurrent("load_state")
        self._state = load_state(Path(path), self.artifact, self.bundle.sha256(self.artifact.file))

    def variants(self) -> Iterator[Session]:
        """What a check runs: this session, and where its runtime has choices that change results, itself for each of them."""
        yield self

    def plan(self) -> dict[str, Any] | None:
        """Which devices its operations run on, where the runtime says so."""
        return None

    def check(self) -> CheckReport:
        """Compare with the PyTorch answers that the bundle carries."""
        from pom_edge.runtimes.checking import check_session

        return check_session(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _must_be_recurrent(self, what: str) -> None:
        if not self.recurrent:
            raise InputError(
                f"{self.artifact.file} is of the {self.artifact.form} form, which keeps nothing between calls, so {what}() has "
                "no meaning; export the model with --form recurrent"
            )

    def _named(self, x: np.ndarray | None, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if isinstance(x, Mapping):
            raise InputError("expected arrays, by keyword where several: run(x, mask=mask); a dict goes to run_named(inputs)")
        first = self.inputs[0].name
        if x is not None and first in inputs:
            raise InputError(f"input {first!r} is given twice, by position and by name; give it once")
        return inputs if x is None else {first: x, **inputs}

    def _with_mask(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """A ragged artifact's mask: all tokens are real unless it is given, and real ones lead."""
        first = np.asarray(inputs[self.inputs[0].name]) if self.inputs[0].name in inputs else None
        if not self.artifact.ragged or first is None or first.ndim < 2:
            return inputs
        mask = np.asarray(inputs.get("mask", np.ones(first.shape[:2], np.float32))).astype(np.float32)
        if mask.ndim == 2 and (((mask != 0) & (mask != 1)).any() or (np.diff(mask, axis=1) > 0).any()):
            raise InputError(
                "input 'mask' has padding before a real token, or other values than 0 and 1; in a stream the real "
                "tokens of each row lead: [1, 1, 0, 0]"
            )
        return {**inputs, "mask": mask}

    def _batch(self, inputs: Mapping[str, np.ndarray]) -> int:
        return next((int(inputs[spec.name].shape[0]) for spec in self.inputs if spec.shape[0] == BATCH), 1)

    def _chunks(self, length: int) -> list[int]:
        """A sequence in the longest chunks that the artifact takes."""
        listed = next((spec.lengths[TOKENS] for spec in self.inputs if TOKENS in spec.lengths), None)
        if listed is not None:
            chunks = cut(length, listed)
            if not chunks:
                raise InputError(f"{length} tokens cannot be cut into chunks of {one_of(listed)}, which this artifact takes")
            return chunks
        low, high = chunk_lengths(self.artifact, length)
        chunks = [high] * (length // high) + ([length % high] if length % high else [])
        if chunks[-1] < low:
            raise InputError(f"{length} tokens cannot be cut into chunks of {low} to {high}, which this artifact takes")
        return chunks

    @staticmethod
    def _validate(inputs: Mapping[str, np.ndarray], specs: list[TensorSpec]) -> dict[str, np.ndarray]:
        """The arrays in the graph's types, or one clear error."""
        expected = {spec.name: spec for spec in specs}
        unknown, missing = sorted(set(inputs) - set(expected)), sorted(set(expected) - set(inputs))
        if unknown or missing:
            wrong = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
            raise InputError(f"input names do not fit ({wrong}); expected {', '.join(map(str, specs))}")
        sizes: dict[str, tuple[int, str]] = {}
        return {name: _fit(spec, inputs[name], sizes) for name, spec in expected.items()}

    def _warn_beyond(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Half precision: say once when inputs are larger than those for which no value overflows."""
        limits = (self.artifact.ranges or {}).get("assumed_inputs", {})
        beyond = {name: limit for name, limit in limits.items() if name in inputs and np.abs(inputs[name]).max() > limit}
        if beyond and not self._warned:
            self._warned = True
            listed = ", ".join(f"|{name}| <= {limit:g}" for name, limit in beyond.items())
            warnings.warn(
                f"{self.artifact.file}: the ranges of {self.artifact.precision} are bounded for {listed}, and this input is "
                "larger: values may overflow. Export with an example as large as inputs get, or run an FP32 artifact",
                RuntimeWarning,
                stacklevel=4,
            )


def chunk_lengths(artifact: Artifact, length: int) -> tuple[int, int]:
    """Recurrent form: the shortest chunk that the artifact takes, and the longest in which a run of ``length`` tokens goes."""
    axes = artifact.token_axes
    spec = next(spec for spec in artifact.inputs if spec.name in axes)
    dim = spec.shape[axes[spec.name]]
    low, high = (dim, dim) if isinstance(dim, int) else spec.bounds.get(dim, (1, None))
    if high is None or length <= high:
        high = length if artifact.frames else min(length, MAX_CHUNK, high or length)
    return low, high


def one_of(lengths: list[int]) -> str:
    """Lengths in words: "64, 128 or 256"."""
    *others, last = map(str, lengths)
    return f"{', '.join(others)} or {last}"


def _only(outputs: dict[str, np.ndarray]) -> np.ndarray | dict[str, np.ndarray]:
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _any_length(spec: TensorSpec, axis: int | None) -> TensorSpec:
    """The spec of a whole sequence, which is cut into chunks of the graph's own length."""
    if axis is None:
        return spec
    shape = [TOKENS if i == axis else dim for i, dim in enumerate(spec.shape)]
    return spec.model_copy(
        update={"shape": shape, "bounds": {k: v for k, v in spec.bounds.items() if k != TOKENS}, "lengths": {}}
    )


def _fit(spec: TensorSpec, value: np.ndarray, sizes: dict[str, tuple[int, str]]) -> np.ndarray:
    """The array in the graph's dtype, or one clear error."""
    try:
        array = np.asarray(value)
    except Exception as error:  # a tensor on a GPU or with a gradient, a ragged list
        raise InputError(f"input {spec.name!r} is no array ({type(value).__name__}: {error}); expected {spec}") from error
    wanted = np.dtype(spec.dtype)
    if array.dtype != wanted:
        array = _converted(spec, array, wanted)
    if array.ndim != len(spec.shape):
        raise InputError(f"input {spec.name!r} has shape {array.shape}; expected {spec}")
    for axis, (length, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int):
            if length != dim:
                raise InputError(f"input {spec.name!r} has {length} along axis {axis}; expected {spec}")
            continue
        if length == 0:
            raise InputError(f"input {spec.name!r} is empty along {dim} (shape {array.shape}); expected at least 1")
        known, other = sizes.setdefault(dim, (length, spec.name))
        if known != length:
            raise InputError(f"{dim} is {known} in input {other!r} but {length} in {spec.name!r}; they must be equal")
        low, high = spec.bounds.get(dim, (1, None))
        if length < low or (high is not None and length > high):
            raise InputError(f"{dim} is {length}; this artifact takes {low} to {high}")
        if dim in spec.lengths and length not in spec.lengths[dim]:
            raise InputError(f"{dim} is {length}; this artifact takes {one_of(spec.lengths[dim])}")
    if spec.values is not None and array.size and not spec.values[0] <= array.min() <= array.max() <= spec.values[1]:
        raise InputError(
            f"input {spec.name!r} holds values from {array.min()} to {array.max()}; expected {spec.values[0]} to "
            f"{spec.values[1]}, "
            "the rows of the table that they look up"
        )
    return np.asarray(array, order="C")  # ascontiguousarray makes a vector of a number


def _converted(spec: TensorSpec, array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """Lossless or customary conversions only: masks of bool or integers, half and double floats, narrower integers."""
    is_mask = "mask" in spec.name and array.dtype.kind in "bui"
    both_float = array.dtype.kind == "f" and wanted.kind == "f"
    both_integer = array.dtype.kind in "ui" and wanted.kind == "i"
    if not (is_mask or both_float or both_integer):
        raise InputError(f"input {spec.name!r} is {array.dtype}; expected {spec}")
    return array.astype(wanted)


def open_session(
    path: str | os.PathLike[str],
    runtime: str | None = None,
    artifact: str | None = None,
    threads: int | None = None,
    spill: str | os.PathLike[str] | None = None,
    units: str | None = None,
) -> Session:
    """Open a bundle's artifact in a runtime.

    Args:
        path: the ``.pom`` folder; its hashes are verified before any native parser sees a byte.
        runtime: ``"ort"`` (ONNX Runtime, CPU), ``"ort-cuda"`` or ``"ort-trt"`` (its GPU providers), ``"coreml"`` (macOS;
            evaluated elsewhere), ``"trt"`` or ``"rtx"`` (an engine of that target, on a GPU); None takes that of the artifact.
        artifact: file name, when the bundle holds several that this runtime could execute.
        threads: for the runtime; None leaves the choice to it.
        spill: streamed form: a folder for the tokens between two passes; None keeps them in memory.
        units: Core ML on macOS: ``"ALL"`` (the default), ``"CPU_ONLY"``, ``"CPU_AND_GPU"`` or ``"CPU_AND_NE"``.

    Raises:
        BundleError: damaged or foreign bundle.
        InputError: unknown runtime, no artifact of the bundle fits it, or a folder that cannot be spilled into.
        MissingExtraError: the runtime is not installed.
    """
    if runtime is not None and runtime not in RUNTIMES:
        raise InputError(f"unknown runtime {runtime!r}; this version has {', '.join(RUNTIMES)}")
    bundle = Bundle.open(Path(path))
    runtime = runtime or runtime_of(bundle, artifact)
    extension, target = KINDS[runtime]
    chosen = select_artifact(bundle, extension, artifact, target)
    place = None if spill is None else Path(spill)
    if place is not None:
        check_spill(place, chosen)
    if runtime == "coreml":
        from pom_edge.runtimes.coreml_session import CoreMLSession

        return CoreMLSession(bundle, chosen, place, units or "ALL")
    if units is not None:
        raise InputError(f"units is {units!r}; compute units are Core ML's, and {chosen.file} runs in {runtime}")
    if target is not None:
        from pom_edge.runtimes.tensorrt_session import TensorRTSession

        return TensorRTSession(bundle, chosen, place)
    from pom_edge.runtimes.onnxruntime_session import OnnxRuntimeSession

    return OnnxRuntimeSession(bundle, chosen, threads, place, runtime)


def runtime_of(bundle: Bundle, name: str | None) -> str:
    """The runtime that takes the artifact of that name; without a name ONNX Runtime, if the bundle holds something for it."""
    for runtime in RUNTIMES:
        files = fitting_artifacts(bundle, runtime)
        if files and name in (None, *files):
            return runtime
    kind = next((each for each in bundle.manifest.artifacts if each.file == name), None)
    if kind is not None and kind.file in bundle.damaged:
        return kind.target
    return RUNTIMES[0]  # says what there is


def check_spill(folder: Path, artifact: Artifact) -> None:
    """Refuse to spill where that does not work.

    Raises:
        InputError: another form, or no folder that can be written.
    """
    if artifact.stream is None:
        raise InputError(f"spill is for the streamed form, {artifact.file} is of the {artifact.form} form; leave it out")
    check_folder(folder)


def fitting_artifacts(bundle: Bundle, runtime: str) -> list[str]:
    """Files of the artifacts that a runtime could execute; damaged ones are none of them."""
    extension, target = KINDS.get(runtime, ("", None))
    artifacts = [a for a in bundle.manifest.artifacts if a.file not in bundle.damaged]
    return [a.file for a in artifacts if extension and a.file.endswith(extension) and target in (None, a.target)]


def select_artifact(bundle: Bundle, extension: str, name: str | None, target: str | None = None) -> Artifact:
    """The artifact to run: by name, or the first with the runtime's extension, and of its target where several share one.

    Raises:
        InputError: none, or none of that name; says what there is, and for which runtime.
        BundleError: an engine of which a file is missing or changed.
    """
    artifacts = bundle.manifest.artifacts
    fitting = [each for each in artifacts if each.file.endswith(extension) and target in (None, each.target)]
    found = [each for each in fitting if name in (None, each.file)]
    whole = [each for each in found if each.file not in bundle.damaged]
    if whole:
        return whole[0]
    if found:
        raise BundleError(f"{bundle.damaged[found[0].file]}, or build the engine again: {_rebuild(bundle, found[0])}")
    listed = ", ".join(f"{each.file} (--runtime {runtime_of(bundle, each.file)})" for each in artifacts) or "none"
    wanted = f"{target.upper()} engine" if target else f"{extension} artifact"
    if name is None:
        raise InputError(f"{bundle.path.name} has no {wanted}; it holds {listed}")
    if any(each.file == name for each in artifacts):
        raise InputError(
            f"{name} is for --runtime {runtime_of(bundle, name)}; the runtime asked for takes an {wanted}. "
            f"{bundle.path.name} holds {listed}"
        )
    raise InputError(f"{bundle.path.name} has no artifact {name!r}; it holds {listed}")


def _rebuild(bundle: Bundle, artifact: Artifact) -> str:
    return rebuild_command(bundle.path.name, artifact.target, artifact.form, artifact.precision, artifact.engine or {})
