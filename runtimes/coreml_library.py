"""coremltools, imported when it is needed and without what it says while it loads (6 to 11 s on Linux, proxy warnings)."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from pom_edge.errors import InputError, require

OLDEST = (9, 0)  # what the tests run on; numpy 2.4 needs the torch.export route, whose gaps 9.0 closed

__all__ = ["load_coremltools", "on_apple", "quiet_coremltools"]


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


def load_coremltools() -> Any:
    """The module.

    Raises:
        MissingExtraError: it is not installed.
        InputError: it is too old.
    """
    with quiet_coremltools():
        library = require("coremltools", "coreml")
    version = tuple(int(part) for part in library.__version__.split(".")[:2] if part.isdigit())
    if version < OLDEST:
        raise InputError(
            f"coremltools {library.__version__} is too old; expected {'.'.join(map(str, OLDEST))} or newer. Run: "
            "pip install --upgrade 'pom-edge[coreml]'"
        )
    return library
