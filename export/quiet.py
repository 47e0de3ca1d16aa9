"""Silence where torch talks about itself."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's registration notes (torchvision missing), its FutureWarnings, and the graph it prints when tracing fails.

    The reason of a failure is in its exception.
    """
    names = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
