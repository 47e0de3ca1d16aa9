"""Run the MIL program of a saved .mlpackage with numpy: what the file says, operator by operator, on any machine.

It is an evaluation of the file, not a run of it: Core ML may order sums in another way, and fuse. A result typed FP16 is
rounded to FP16. Needs coremltools for the format alone, and no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.errors import BundleError, InputError
from pom_edge.runtimes.coreml_library import load_coremltools, quiet_coremltools
from pom_edge.runtimes.mil_operators import DTYPES, MOVING, OPERATORS, Operator

Arrays = dict[str, np.ndarray]
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights"
HALF = "fp16"
BITS = {"uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6, "int4": 4}
STATE_OPERATORS = {"read_state", "coreml_update_state", "write_state"}

__all__ = ["MilProgram", "Operation", "model_file"]


@dataclass
class Operation:
    """One operation: constants are filled in, everything else is read by name.

    Attributes:
        kind: its operator.
        outputs, dtypes: names and MIL types of its results.
        constants: arguments known beforehand.
        reads: argument -> name of a value, or names.
        last: values that nobody reads afterwards.
    """

    kind: str
    function: Operator
    outputs: list[str]
    dtypes: list[str]
    constants: dict[str, Any]
    reads: dict[str, str | list[str]]
    last: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> bool:
        """Whether results are to be rounded to FP16."""
        return HALF in self.dtypes and self.kind not in MOVING


class MilProgram:
    """The ``main`` function of a saved package.

    Args:
        path: the ``.mlpackage``.

    Attributes:
        inputs, outputs: names and MIL types of the function's.
        states: names of its states, with shape.
        counts: how often each operator occurs, constants left out.

    Raises:
        BundleError: no ML program, or a file of it is missing or damaged.
        InputError: an operator that this evaluator does not know; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._load_library()
        self.description, function = self._function()
        (block,) = function.block_specializations.values()
        self.inputs = {value.name: self._dtype(value.type) for value in function.inputs if not self._is_state(value.type)}
        self.states = {
            value.name: self._shape(value.type.stateType.wrappedType) for value in function.inputs if self._is_state(value.type)
        }
        self.outputs = list(block.outputs)
        self.constants: dict[str, Any] = {}
        self.weight_dtypes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.half_operations = self.float_operations = 0
        self._operations: list[Operation] = []
        for operation in block.operations:
            self._add(operation)
        self._schedule(set(self.outputs))

    def run(
        self, inputs: Mapping[str, np.ndarray], wanted: Mapping[str, str] | None = None, states: Arrays | None = None
    ) -> Arrays:
        """Evaluate.

        Args:
            inputs: by the program's names.
            wanted: names of results -> values inside the program; None takes its outputs.
            states: changed in place.

        Returns:
            FP32 for floats of any width, else integers and booleans as they are.
        """
        wanted = {name: name for name in self.outputs} if wanted is None else wanted
        kept = set(wanted.values())
        values: dict[str, Any] = {name: _entering(array, self.inputs[name]) for name, array in inputs.items()}
        states = {} if states is None else states
        with np.errstate(all="ignore"):  # infinity and NaN are results here: the gate counts them
            for operation in self._operations:
                self._step(operation, values, states)
                for name in operation.last:
                    if name not in kept:
                        values.pop(name, None)
        return {name: np.asarray(self._value(value, values)) for name, value in wanted.items()}

    def replace(self, name: str, array: np.ndarray) -> None:
        """Give a constant other values of the same shape, for everything that reads it."""
        self.constants[name][...] = array

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        return self.constants[name] if name in self.constants else values[name]

    def _step(self, operation: Operation, values: dict[str, Any], states: Arrays) -> None:
        if operation.kind in STATE_OPERATORS:
            self._step_state(operation, values, states)
            return
        arguments = dict(operation.constants)
        for name, read in operation.reads.items():
            arguments[name] = (
                self._value(read, values) if isinstance(read, str) else [self._value(each, values) for each in read]
            )
        try:
            result = operation.function(**arguments)
        except (TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise InputError(f"{self.path.name}: operator {operation.kind} ({operation.outputs[0]}): {error}") from error
        results = result if isinstance(result, (list, tuple)) else [result]
        for name, dtype, array in zip(operation.outputs, operation.dtypes, results, strict=True):
            values[name] = rounded(array, dtype) if operation.rounds else _typed(array, dtype)

    def _step_state(self, operation: Operation, values: dict[str, Any], states: Arrays) -> None:
        """States live in ``states`` under the function's names; their handles are passed on by name."""
        handle = operation.reads["state" if operation.kind == "coreml_update_state" else "input"]
        assert isinstance(handle, str)
        if operation.kind == "read_state":
            values[operation.outputs[0]] = states.setdefault(handle, np.zeros(self.states[handle], np.float32))
            return
        source = operation.reads["value" if operation.kind == "coreml_update_state" else "data"]
        assert isinstance(source, str)
        states[handle] = rounded(self._value(source, values), HALF)
        if operation.outputs:
            values[operation.outputs[0]] = states[handle]

    def _load_library(self) -> None:
        load_coremltools()
        with quiet_coremltools():
            from coremltools.converters.mil.frontend.milproto.helper import proto_to_types
            from coremltools.converters.mil.mil import types
            from coremltools.libmilstoragepython import _BlobStorageReader
            from coremltools.proto import Model_pb2

        self._proto_to_types, self._types = proto_to_types, types
        self._blob_reader, self._model_class = _BlobStorageReader, Model_pb2.Model
        self._blobs: dict[str, Any] = {}

    def _function(self) -> tuple[Any, Any]:
        model = self._model_class()
        try:
            model.ParseFromString(model_file(self.path).read_bytes())
        except OSError as error:
            raise BundleError(f"{self.path.name} cannot be read ({error.strerror}); export again") from error
        except Exception as error:  # protobuf's own family of exceptions
            raise BundleError(f"{self.path.name} is not a Core ML model ({error}); export again") from error
        if model.WhichOneof("Type") != "mlProgram" or "main" not in model.mlProgram.functions:
            raise BundleError(f"{self.path.name} holds no ML program; expected a package that pom-export made")
        self.spec_version = int(model.specificationVersion)
        return model.description, model.mlProgram.functions["main"]

    @staticmethod
    def _is_state(kind: Any) -> bool:
        return bool(kind.WhichOneof("type") == "stateType")

    def _dtype(self, kind: Any) -> str:
        if self._is_state(kind):
            return HALF
        found = self._proto_to_types(kind)
        primitive = found.get_primitive() if self._types.is_tensor(found) else found
        return str(self._types.builtin_to_string(primitive))

    def _shape(self, kind: Any) -> tuple[int, ...]:
        return tuple(int(d.constant.size) for d in kind.tensorType.dimensions)

    def _add(self, operation: Any) -> None:
        kind, names = operation.type, [value.name for value in operation.outputs]
        if kind == "const":
            self.constants[names[0]] = self._constant(operation.attributes["val"])
            return
        constants: dict[str, Any] = {}
        reads: dict[str, str | list[str]] = {}
        if kind.startswith("constexpr_"):
            constants |= {name: self._constant(value) for name, value in operation.attributes.items() if name != "name"}
        for name, argument in operation.inputs.items():
            bound = [self._bound(binding) for binding in argument.arguments]
            several = len(bound) > 1 or name == "values"
            if any(isinstance(each, str) for each, _ in bound):
                place = f"{len(self._operations)}.{name}"  # no name that a program could have
                found = [self._named(each, value, f"{place}.{i}") for i, (each, value) in enumerate(bound)]
                reads[name] = found if several else found[0]
            else:
                constants[name] = [value for _, value in bound] if several else bound[0][1]
        if kind not in OPERATORS and kind not in STATE_OPERATORS:
            raise InputError(
                f"{self.path.name} holds the operator {kind!r} ({', '.join(names)}), which pom-edge cannot evaluate on this "
                "machine; on macOS Core ML runs it"
            )
        dtypes = [self._dtype(value.type) for value in operation.outputs]
        made = Operation(kind, OPERATORS.get(kind, np.asarray), names, dtypes, constants, reads)
        if kind.startswith("constexpr_") and not reads:
            result = made.function(**constants)
            self.constants[names[0]] = rounded(result, dtypes[0]) if dtypes[0] == HALF else result
            self.counts[kind] += 1
            return
        self.counts[kind] += 1
        self.half_operations += HALF in dtypes
        self.float_operations += HALF in dtypes or "fp32" in dtypes
        self._operations.append(made)

    def _named(self, name: str | None, value: Any, own: str) -> str:
        """A value among others that are computed: by its name, and a constant by one of our own."""
        if name is None:
            self.constants[own] = value
        return own if name is None else name

    def _bound(self, binding: Any) -> tuple[str | None, Any]:
        """Name of a value, or None and the constant."""
        if binding.WhichOneof("binding") == "value":
            return None, self._constant(binding.value)
        name = binding.name
        return (None, self.constants[name]) if name in self.constants else (name, None)

    def _constant(self, value: Any) -> Any:
        kind = value.type
        dtype = self._dtype(kind)
        shape = self._shape(kind)
        if value.WhichOneof("value") == "blobFileValue":
            array = self._blob(value.blobFileValue, dtype)
        else:
            tensor = value.immediateValue.tensor
            which = tensor.WhichOneof("value")
            content = getattr(tensor, which).values
            if dtype == "string":
                return content[0]
            array = (
                np.frombuffer(content, np.dtype("float16" if dtype == HALF else dtype))
                if which == "bytes"
                else np.array(content)
            )
        self.weight_dtypes[dtype] += math.prod(shape) if len(shape) else 0
        if dtype in BITS:
            return _unpacked(array, dtype, math.prod(shape)).reshape(shape)
        return np.asarray(array).astype(DTYPES[dtype]).reshape(shape)

    def _blob(self, value: Any, dtype: str) -> np.ndarray:
        name = value.fileName.rsplit("/", 1)[-1]
        file = self.path / WEIGHTS / name
        if name not in self._blobs:
            if not file.is_file():
                raise BundleError(
                    f"{self.path.name}: its weight file {name} is missing; copy the whole folder again, or export again"
                )
            self._blobs[name] = self._blob_reader(str(file))
        method = {"fp32": "float", "bool": "uint8"}.get(dtype, dtype)
        try:
            array = np.asarray(getattr(self._blobs[name], f"read_{method}_data")(value.offset))
        except RuntimeError as error:
            raise BundleError(
                f"{self.path.name}: {name} is damaged ({error}); copy the folder again, or export again"
            ) from error
        return np.frombuffer(array.tobytes(), np.float16) if dtype == HALF else array

    def _schedule(self, kept: set[str]) -> None:
        """Which values are read for the last time where."""
        seen = set(kept)
        for operation in reversed(self._operations):
            read = {n for each in operation.reads.values() for n in ([each] if isinstance(each, str) else each)}
            operation.last = sorted((read | set(operation.outputs)) - seen)
            seen |= read | set(operation.outputs)


def model_file(path: Path) -> Path:
    """The specification inside a package."""
    return path / MODEL


def rounded(array: Any, dtype: str) -> np.ndarray:
    """An FP32 array on the grid of its MIL type."""
    array = np.asarray(array)
    if dtype == HALF:
        array = array.astype(np.float16).astype(np.float32)
    return _typed(array, dtype)


def _typed(array: Any, dtype: str) -> np.ndarray:
    wanted = np.dtype(DTYPES[dtype])
    return np.asarray(array, wanted)


def _entering(array: np.ndarray, dtype: str) -> np.ndarray:
    array = np.asarray(array)
    if dtype == "int32" and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise InputError(f"values reach {array.max()}, and Core ML's integers are of 32 bits")
    return rounded(array, dtype)


def _unpacked(array: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Elements narrower than a byte, lowest bits first; a weight file's reader has unpacked them already."""
    bits, kind = BITS[dtype], np.int8 if not dtype.startswith("u") else np.uint8
    if array.size == count:
        return array.astype(kind)
    stream = np.unpackbits(array.view(np.uint8), bitorder="little")[: count * bits].reshape(count, bits)
    levels = (stream.astype(np.int32) << np.arange(bits)).sum(1)
    if kind is np.int8:
        levels = np.where(levels >= 1 << (bits - 1), levels - (1 << bits), levels)
    return np.asarray(levels, kind)
