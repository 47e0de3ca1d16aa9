"""Core ML's side of coremltools where there is no Core ML: every call is bound to the signature of the real class.

A misspelt or missing argument fails as it would on a Mac; what the real thing computes, the MIL evaluator does. The structures
are coremltools' own dataclasses, so that a misspelt attribute fails too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.models import compute_device, compute_plan
from coremltools.models.model import MLState

from pom_edge.runtimes.mil_program import MilProgram, model_file


def _bound(real: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the real function, defaults filled in."""
    bound = inspect.signature(real).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


class FakeState:
    """``MLState``."""

    def __init__(self, program: MilProgram) -> None:
        self.arrays = {name: np.zeros(shape, np.float32) for name, shape in program.states.items()}

    def read_state(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.arrays[_bound(MLState.read_state, self, *args, **kwargs)["name"]].astype(np.float16)

    def write_state(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(MLState.write_state, self, *args, **kwargs)
        name, value = given["name"], given["value"]
        assert value.dtype == np.float16 and value.shape == self.arrays[name].shape
        self.arrays[name] = value.astype(np.float32)


class FakeMLModel:
    """``MLModel``, loaded."""

    loaded: list[Any]  # compute units, in the order in which models were loaded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _bound(ct.models.MLModel.__init__, self, *args, **kwargs)
        assert isinstance(given["model"], str) and isinstance(given["compute_units"], ct.ComputeUnit)
        assert not given["skip_model_load"]
        self._path = Path(given["model"])
        self._program = MilProgram(self._path)
        FakeMLModel.loaded.append(given["compute_units"])

    def get_spec(self, *args: Any, **kwargs: Any) -> Any:
        _bound(ct.models.MLModel.get_spec, self, *args, **kwargs)
        from coremltools.proto import Model_pb2

        spec = Model_pb2.Model()
        spec.ParseFromString(model_file(self._path).read_bytes())
        return spec

    def make_state(self, *args: Any, **kwargs: Any) -> FakeState:
        _bound(ct.models.MLModel.make_state, self, *args, **kwargs)
        return FakeState(self._program)

    def get_compiled_model_path(self, *args: Any, **kwargs: Any) -> str:
        _bound(ct.models.MLModel.get_compiled_model_path, self, *args, **kwargs)
        return f"{self._path}c"

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
        given = _bound(ct.models.MLModel.predict, self, *args, **kwargs)
        described = {each.name: each.type.multiArrayType for each in self.get_spec().description.input}
        assert set(given["data"]) == set(described), "Core ML wants every input, and no other"
        for name, array in given["data"].items():
            flexible = described[name].WhichOneof("ShapeFlexibility")
            assert flexible or list(array.shape) == list(described[name].shape), name
            assert array.dtype == {65568: np.float32, 65552: np.float16, 131104: np.int32}[described[name].dataType]
        return self._program.run(given["data"], states=given["state"].arrays if given["state"] else None)


class FakePlan:
    """``MLComputePlan``: everything on the Neural Engine but sums and casts."""

    def __init__(self, program: MilProgram) -> None:
        operations = [
            compute_plan.MLModelStructureProgramOperation({}, f"ios17.{kind}", [], [], None)
            for kind, count in program.counts.items()
            for _ in range(count)
        ]
        block = compute_plan.MLModelStructureProgramBlock([], operations, [])
        function = compute_plan.MLModelStructureProgramFunction([], block)
        structure = compute_plan.MLModelStructureProgram({"main": function})
        self.model_structure = compute_plan.MLModelStructure(None, structure, None)

    @classmethod
    def load_from_path(cls, *args: Any, **kwargs: Any) -> FakePlan:
        given = _bound(compute_plan.MLComputePlan.load_from_path, *args, **kwargs)
        assert given["path"].endswith(".mlpackagec") and isinstance(given["compute_units"], ct.ComputeUnit)
        return cls(MilProgram(Path(given["path"][:-1])))

    def get_compute_device_usage_for_mlprogram_operation(self, *args: Any, **kwargs: Any) -> Any:
        real = compute_plan.MLComputePlan.get_compute_device_usage_for_mlprogram_operation
        name = _bound(real, self, *args, **kwargs)["operation"].operator_name
        if name == "ios17.identity":
            return None
        here = name not in ("ios17.cast", "ios17.reduce_mean")
        kind = compute_device.MLNeuralEngineComputeDevice if here else compute_device.MLCPUComputeDevice
        device = object.__new__(kind)
        return compute_plan.MLComputePlanDeviceUsage(device, [device])


def fake_coremltools() -> SimpleNamespace:
    """The module as macOS has it."""
    FakeMLModel.loaded = []
    models = SimpleNamespace(MLModel=FakeMLModel, compute_plan=SimpleNamespace(MLComputePlan=FakePlan))
    return SimpleNamespace(__version__=ct.__version__, ComputeUnit=ct.ComputeUnit, models=models)
