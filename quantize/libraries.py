"""torchao without its monologue: on import it prints about GPU libraries that a CPU machine does not have."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from pom_edge.errors import InputError
from pom_edge.export.quiet import quiet

__all__ = ["imported_quietly"]


@contextlib.contextmanager
def imported_quietly() -> Iterator[None]:
    """Around imports of torchao: its notes are not shown, and a missing torchao is named with what installs it.

    Raises:
        InputError: torchao is not installed.
    """
    names = ("torchao", "torch.utils._pytree", "torch")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise InputError("INT8 needs torchao, which is not installed: pip install 'pom-edge[export]'") from error
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
