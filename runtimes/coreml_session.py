"""Core ML packages: run by Core ML itself on macOS, evaluated with numpy elsewhere (:mod:`pom_edge.runtimes.mil_program`).

Names: Core ML takes letters, digits and underscores, so ``state.0.mean`` of the manifest is ``state_0_mean`` of the package.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pom_edge.bundle import Artifact, Bundle
from pom_edge.errors import InputError
from pom_edge.runtimes.coreml_device import UNITS, CoreMLModel, check_units
from pom_edge.runtimes.coreml_library import load_coremltools, on_apple
from pom_edge.runtimes.mil_program import MilProgram
from pom_edge.runtimes.session import Session
from pom_edge.runtimes.stepping import NEXT, STATE, run_rows

EVALUATED = "evaluated, not run on a device"

__all__ = ["EVALUATED", "CoreMLSession", "open_package"]


class CoreMLSession(Session):
    """A ``.mlpackage`` artifact.

    Args:
        units: macOS: which compute units may take part, of :data:`UNITS`; elsewhere it has no meaning.
    """

    extension = ".mlpackage"

    def __init__(self, bundle: Bundle, artifact: Artifact, spill: Path | None = None, units: str = "ALL") -> None:
        super().__init__(bundle, artifact, spill)
        self._version = load_coremltools().__version__
        files = [artifact.file] if artifact.stream is None else [step.file for step in artifact.stream.passes]
        self._paths = [bundle.path / file for file in files]
        self._load(units)

    def _load(self, units: str) -> None:
        self._units = check_units(units)
        self._natives: list[Any] = [CoreMLModel(path, units) if on_apple() else MilProgram(path) for path in self._paths]

    def variants(self) -> Iterator[Session]:
        """On macOS for each choice of compute units in turn, elsewhere as it is."""
        for units in UNITS if on_apple() else (self._units,):
            if units != self._units:
                self._load(units)
            yield self

    def plan(self) -> dict[str, Any] | None:
        """Where Core ML means to run the operations of all passes; None where it cannot be asked."""
        try:
            plans = [native.plan() for native in self._natives if isinstance(native, CoreMLModel)]
        except InputError as error:  # an older macOS: the results are what they are without it
            return {"unavailable": str(error)}
        if not plans:
            return None
        return {key: dict(sum((Counter(plan[key]) for plan in plans), Counter())) for key in plans[0]}

    @property
    def runtime(self) -> str:
        if on_apple():
            return f"Core ML on macOS {platform.mac_ver()[0]} ({self._units})"
        return f"MIL of coremltools {self._version}, {EVALUATED}"

    def run_named(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As :meth:`Session.run_named`; more sequences than the package takes go through it one part after the other."""
        first = self.inputs[0].shape[0] if self.inputs[0].shape else None
        arrays = {spec.name: np.asarray(inputs[spec.name]) for spec in self.inputs if spec.name in inputs}
        if not isinstance(first, int) or len(arrays) < len(inputs) or not arrays or not next(iter(arrays.values())).ndim:
            return super().run_named(inputs)
        return run_rows(super().run_named, arrays, first)

    def _run_graph(self, index: int, names: list[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not self._natives:
            raise InputError("this session is closed; open another one")
        return run_named(self._natives[index], {name: name for name in names}, inputs)

    def close(self) -> None:
        self._natives = []


def package_name(name: str) -> str:
    """A tensor's name inside the package."""
    return re.sub(r"\W", "_", name)


def run_named(native: Any, wanted: Mapping[str, str], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a package by the manifest's names.

    Args:
        native: what :class:`MilProgram` is.
        wanted: names of results -> values in the manifest's or the package's spelling.
        inputs: by the manifest's names.
    """
    feeds, states = {}, {}
    for name, array in inputs.items():
        known = package_name(name)
        if known in native.states:
            states[known] = np.asarray(array).astype(np.float32)
            continue
        if known not in native.inputs:  # coremltools wraps a number into a vector, under a longer name
            known = next((each for each in native.inputs if each.startswith(known)), known)
            array = np.reshape(array, (1,)) if np.ndim(array) == 0 else array
        feeds[known] = np.asarray(array)
    kept = {name: package_name(STATE + value.removeprefix(NEXT)) for name, value in wanted.items() if value.startswith(NEXT)}
    kept = {name: state for name, state in kept.items() if state in native.states}
    values = {name: package_name(value) for name, value in wanted.items() if name not in kept}
    found = dict(native.run(feeds, values, states))
    return found | {name: states[state].astype(np.float16) for name, state in kept.items()}


def open_package(path: Path, wanted: Mapping[str, str]) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """A saved package, evaluated, with values of its inside as further outputs.

    Args:
        path: the ``.mlpackage``.
        wanted: names of results (outputs, module paths) -> values in the program.
    """
    program = MilProgram(path)
    return lambda inputs: run_named(program, wanted, inputs)
