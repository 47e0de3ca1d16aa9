"""A package in Core ML itself, macOS only: what :class:`pom_edge.runtimes.mil_program.MilProgram` is elsewhere, and its plan.

Not run on a Mac so far. The tests hold every call to the signatures of coremltools' own classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.errors import BundleError, InputError
from pom_edge.runtimes.coreml_library import load_coremltools, quiet_coremltools

UNITS = ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")
FLOATS = (65552, 65568)  # FLOAT16 and FLOAT32 of FeatureTypes.proto
DEVICES = {"MLNeuralEngineComputeDevice": "neural_engine", "MLGPUComputeDevice": "gpu", "MLCPUComputeDevice": "cpu"}

__all__ = ["UNITS", "CoreMLModel", "check_units"]


def check_units(units: str) -> str:
    """Known compute units.

    Raises:
        InputError: others.
    """
    if units not in UNITS:
        raise InputError(f"compute units {units!r} are unknown; expected one of {', '.join(UNITS)}")
    return units


class CoreMLModel:
    """A loaded package.

    Args:
        path: the ``.mlpackage``.
        units: which compute units may take part, of :data:`UNITS`.

    Attributes:
        inputs: their names.
        states: names of its states, with shape.

    Raises:
        BundleError: Core ML does not load it.
    """

    def __init__(self, path: Path, units: str) -> None:
        library = load_coremltools()
        self._library, self._units, self._name = library, getattr(library.ComputeUnit, check_units(units)), path.name
        try:
            with quiet_coremltools():
                self._model = library.models.MLModel(str(path), compute_units=self._units)
        except Exception as error:  # Core ML's own exceptions
            raise BundleError(f"Core ML cannot load {path.name} for {units}: {error}") from error
        description = self._model.get_spec().description
        self.inputs = {value.name: "" for value in description.input}
        self.states = {value.name: tuple(value.type.stateType.arrayType.shape) for value in description.state}
        self._float = {v.name for v in description.input if v.type.multiArrayType.dataType in FLOATS}

    def run(
        self, inputs: Mapping[str, np.ndarray], wanted: Mapping[str, str], states: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """As :meth:`pom_edge.runtimes.mil_program.MilProgram.run`, outputs only.

        Raises:
            InputError: Core ML does not run it.
        """
        feeds = {name: array.astype(np.float32 if name in self._float else np.int32) for name, array in inputs.items()}
        try:
            if not self.states:
                return self._outputs(self._model.predict(feeds), wanted)
            state = self._model.make_state()
            for name, array in states.items():
                state.write_state(name, array.astype(np.float16))
            found = self._model.predict(feeds, state=state)
            states.update({name: np.asarray(state.read_state(name), np.float32) for name in self.states})
        except Exception as error:
            raise InputError(f"Core ML cannot run {self._name}: {error}") from error
        return self._outputs(found, wanted)

    @staticmethod
    def _outputs(found: Mapping[str, np.ndarray], wanted: Mapping[str, str]) -> dict[str, np.ndarray]:
        return {name: np.asarray(found[value]) for name, value in wanted.items()}

    def plan(self) -> dict[str, Any]:
        """Where Core ML means to run each operation.

        Returns:
            ``operations``: how many for each device; ``off_neural_engine``: operators that run elsewhere, with how often.

        Raises:
            InputError: Core ML gives no plan (macOS 14.4 and later do).
        """
        try:
            plans = self._library.models.compute_plan.MLComputePlan
            plan = plans.load_from_path(path=self._model.get_compiled_model_path(), compute_units=self._units)
            operations: Counter[str] = Counter()
            elsewhere: Counter[str] = Counter()
            for operation in plan.model_structure.program.functions["main"].block.operations:
                usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
                if usage is None:  # constants: nothing runs
                    continue
                device = DEVICES.get(type(usage.preferred_compute_device).__name__, "unknown")
                operations[device] += 1
                if device != "neural_engine":
                    elsewhere[operation.operator_name.rpartition(".")[2]] += 1  # "ios17.mul"
        except Exception as error:
            raise InputError(f"Core ML has no compute plan of {self._name}: {error}") from error
        return {"operations": dict(operations), "off_neural_engine": dict(elsewhere.most_common())}
