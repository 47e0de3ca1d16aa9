"""coremltools, imported when it is needed and without what it says while it loads (6 to 11 s on Linux, proxy warnings)."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from pom_edge.errors import BrokenExtraError, InputError, MissingExtraError, require

OLDEST_TORCH, TESTED_TORCH = (2, 8), (2, 13)  # torch.export's options came with 2.8; the tests run on 2.13
REINSTALL = "pip install --force-reinstall --no-cache-dir 'pom-edge[coreml]'"
OLDEST = (9, 0)  # what the tests run on; numpy 2.4 needs the torch.export route, whose gaps 9.0 closed

# What a conversion says about coremltools' and torch's own code: deprecated calls, folders cleaned up late
INTERNAL = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)

__all__ = ["listen_to_coremltools", "load_coremltools", "on_apple", "quiet_coremltools"]


def on_apple() -> bool:
    """Whether Core ML itself can run here."""
    return sys.platform == "darwin"


@contextlib.contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Keep coremltools' progress bars, proxy notes and deprecations from the user; errors are exceptions all the same."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it imports torch and torchao where they are installed, and those have notes of their own
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class _Listener(logging.Handler):
    """Collects what is logged."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextlib.contextmanager
def listen_to_coremltools() -> Iterator[list[str]]:
    """Collect coremltools' warnings about a model in place of printing them: they go into the report, one line each.

    Its progress bars, and what it says of its own code (:data:`INTERNAL`), are left out.
    """
    said: list[str] = []
    logger = logging.getLogger("coremltools")
    handlers, propagates = list(logger.handlers), logger.propagate
    logger.handlers, logger.propagate = [_Listener(said)], False
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught if not issubclass(each.category, INTERNAL)]
        said[:] = [" ".join(text.split()) for text in dict.fromkeys(said)]
    finally:
        logger.handlers, logger.propagate = handlers, propagates


def load_coremltools() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
        BrokenExtraError: it is, and importing it, or its own library that reads weights, fails.
        InputError: it is too old.
    """
    try:
        with quiet_coremltools():
            library = require("coremltools", "coreml")
            found = str(library.__version__)  # a folder that was left behind has none
            version = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
            if version >= OLDEST:
                import_module("coremltools.libmilstoragepython")  # coremltools itself only logs that it is missing
    except MissingExtraError:
        raise
    except Exception as error:  # whatever a half of an installation raises
        text = " ".join(str(error).split()) or "no reason given"
        reason = f"coremltools is installed, but importing it fails ({type(error).__name__}: {text})"
        raise BrokenExtraError(reason, REINSTALL) from error
    if version < OLDEST:
        raise InputError(
            f"coremltools {library.__version__} is too old; expected {'.'.join(map(str, OLDEST))} or newer. Run: "
            "pip install --upgrade 'pom-edge[coreml]'"
        )
    return library
