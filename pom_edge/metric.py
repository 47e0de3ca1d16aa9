"""``--metric``: what a model is worth on the user's own task, before and after. Imports no torch.

A metric is a function of one argument, ``run``, which takes inputs as ``Session.run`` does and returns outputs as numpy
arrays. It returns one number in points, where more is better:

    def accuracy(run):
        return 100 * float((run(images).argmax(-1) == labels).mean())

It is called with PyTorch's model, with the artifact, and with PyTorch's outputs replaced by zeros: a metric that these do not
lower by more than the gate allows could not notice a broken artifact.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pom_edge.errors import GateError, InputError, PomError
from pom_edge.imports import import_callable, import_path, where

MAX_DROP = 0.5  # points, unless --max-drop says otherwise
Outputs = Mapping[str, np.ndarray]

__all__ = ["MAX_DROP", "Metric", "Run", "runner"]


class Run(Protocol):
    """As :meth:`pom_edge.runtimes.session.Session.run`."""

    def __call__(self, x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """Outputs for inputs by name; ``x`` is the first input."""
        ...


@dataclass(frozen=True)
class Metric:
    """A task metric and the loss that it may show.

    Attributes:
        name: module and function, without the folders: a device has it elsewhere.
        function: see the module's docstring.
        max_drop: points that an artifact may lose against PyTorch.
    """

    name: str
    function: Callable[[Run], float]
    max_drop: float = MAX_DROP
    told: bool = False  # the user said what may be lost

    @classmethod
    def named(cls, spec: str | Callable[[Run], float], max_drop: float | None = None) -> Metric:
        """From ``module:function``, or the function itself.

        Raises:
            InputError: no such function of one argument, or a drop that is no number of points.
        """
        if not (isinstance(spec, str) or callable(spec)):
            raise InputError(f"metric is {spec!r}; expected module:function, or a function of one argument")
        if max_drop is not None and (isinstance(max_drop, (bool, str)) or not 0 <= max_drop < math.inf):
            raise InputError(f"--max-drop is {max_drop}; expected points that may be lost, 0 or more")
        function = import_callable(spec, "--metric") if isinstance(spec, str) else spec
        if inspect.iscoroutinefunction(function) or not _takes_one(function):
            raise InputError(f"--metric: {spec} cannot be called as metric(run); expected a function of one argument")
        given = spec if isinstance(spec, str) else f"{spec.__module__}:{getattr(spec, '__name__', type(spec).__name__)}"
        module, _, name = given.rpartition(":")
        stem = re.split(r"[/\\.]", module.removesuffix(".py"))[-1]
        return cls(f"{stem}:{name}", function, MAX_DROP if max_drop is None else max_drop, max_drop is not None)

    def of(self, run: Run) -> float:
        """The metric of one model, in points.

        Raises:
            InputError: it raises, never runs the model, or returns something else than a finite number.
        """
        answers: list[str] = []

        def counted(x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
            try:
                found = run(x, **inputs)
            except InputError as error:
                raise InputError(f"--metric: {self.name} gave inputs that do not fit: {error}") from error
            answers[:] = [f"a dict of {', '.join(found)}" if isinstance(found, dict) else f"one array {found.shape}"]
            return found

        try:
            with import_path():  # it may change the working directory
                value = self.function(counted)
        except PomError:
            raise
        except (Exception, SystemExit) as error:
            hint = f" (run gave {answers[0]})" if answers else ""
            raise InputError(f"--metric: {self.name} raised {type(error).__name__}: {error}{where(error)}{hint}") from error
        try:
            points = float("nan" if isinstance(value, (bool, np.bool_)) else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"--metric: {self.name} returned {type(value).__name__}; expected one number in points, more is better"
            ) from error
        if not math.isfinite(points):
            raise InputError(f"--metric: {self.name} returned {value}; expected a finite number in points")
        if not answers:
            raise InputError(f"--metric: {self.name} never called the model that it was given; expected run(inputs) inside")
        return points

    def reference(self, torch_model: Run, zeros: Run) -> float:
        """PyTorch's points.

        Raises:
            InputError: the points look like a share of 1, of which half a point is half of everything.
            GateError: outputs of zeros are worth as much, so the metric could not notice a broken artifact.
        """
        points = self.of(torch_model)
        if not self.told and 0 <= points <= 1:
            raise InputError(
                f"--metric: {self.name} gives PyTorch's model {points:g} points, of which {self.max_drop:g} could be "
                "lost. If it is a share, return per cent; else say what may be lost by --max-drop"
            )
        dead = self.of(zeros)
        if dead >= points - self.max_drop:
            raise GateError(
                f"the metric {self.name} is vacuous: PyTorch's model has {points:g} points, outputs of zeros {dead:g}, and "
                f"{self.max_drop:g} may be lost. Expected a metric where more is better, on data that the model knows"
            )
        return points

    def compare(self, reference: float, artifact: float) -> dict[str, Any]:
        """The entry for manifests and JSON."""
        drop = round(reference - artifact, 6) + 0.0  # no minus zero
        return {
            "name": self.name,
            "pytorch": round(reference, 6),
            "artifact": round(artifact, 6),
            "drop": drop,
            "max_drop": self.max_drop,
            "passed": drop <= self.max_drop,
        }


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature: the call itself will tell
        return True
    return True


def runner(execute: Callable[[dict[str, np.ndarray]], Outputs], dtypes: Mapping[str, str]) -> Run:
    """Anything that takes inputs by name and returns outputs by name, as a :class:`Run`.

    Args:
        execute: the model.
        dtypes: of its inputs, in order: arrays are converted, as a session does.
    """

    def run(x: np.ndarray | None = None, /, **inputs: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        named = inputs if x is None else {next(iter(dtypes)): x, **inputs}
        unknown = sorted(set(named) - set(dtypes))
        if unknown:
            raise InputError(f"inputs {', '.join(unknown)} are unknown; expected {', '.join(dtypes)}")
        outputs = execute({name: np.asarray(array).astype(dtypes.get(name)) for name, array in named.items()})
        return next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)

    return run
