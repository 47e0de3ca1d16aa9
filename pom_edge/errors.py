"""The exception tree. Imports nothing heavy, so that every layer can raise it.

    PomError                 exit code
    |- InputError            2   the input or the arguments are wrong
    |  |- CheckpointError    2   a model file cannot be read as what it claims to be
    |  |- BundleError        2   a .pom folder is damaged, foreign or of an unknown version
    |  `- MissingExtraError  2   an optional dependency is not installed
    |     `- BrokenExtraError  2   it is, and cannot be imported
    |- GateError             1   a gate failed: parity, vacuity, lint, memory budget, quality
    `- MissingToolError      3   all that can be made here is made; a compiler or a device is missing

A user's mistake is one of these: one message (what was found, what was expected, what to do) and an exit code. Anything
else that reaches the user is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "BrokenExtraError",
    "BundleError",
    "CheckpointError",
    "GateError",
    "InputError",
    "MissingExtraError",
    "MissingToolError",
    "PomError",
    "require",
]


class PomError(Exception):
    """Base of every error that pom-edge raises on purpose."""

    exit_code = 2


class InputError(PomError, ValueError):
    """The input or the arguments are wrong (a ValueError too, as callers of a Python library expect)."""


class CheckpointError(InputError):
    """A model file cannot be read as what it claims to be."""


class BundleError(InputError):
    """A bundle is damaged, foreign, or of a version this release does not know."""


class MissingExtraError(InputError):
    """An optional dependency is not installed; the message names the install line."""


class BrokenExtraError(MissingExtraError):
    """An optional dependency is installed and cannot be imported; the message names the line that installs it anew.

    Args:
        reason: what was found.
        install: that line.
    """

    def __init__(self, reason: str, install: str) -> None:
        super().__init__(f"{reason}. Install it anew: {install}")
        self.reason, self.install = reason, install


class GateError(PomError):
    """A gate failed: parity, vacuity, lint, memory budget or quality."""

    exit_code = 1


class MissingToolError(PomError):
    """Everything that can be made here is made, but a compiler or a device is missing."""

    exit_code = 3


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: importable name, for example ``"onnxruntime"``.
        extra: the extra of pom-edge that brings it, for example ``"export"``.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: it is not installed; the message names the install line.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the module is there, something it needs is broken: that is not ours to rephrase
        raise MissingExtraError(
            f"{module.split('.')[0]} is not installed, and this step needs it. Run: pip install 'pom-edge[{extra}]'"
        ) from None
