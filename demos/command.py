"""How the demos' commands end: a user's mistake is one message and an exit code, a bug keeps its traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pom_edge.errors import InputError, PomError

__all__ = ["check_options", "exit_code"]


def check_options(options: argparse.Namespace, **least: float) -> None:
    """Numbers that are large enough, and a folder for ``out``: said now, not after minutes of training.

    Raises:
        InputError: the first that is wrong.
    """
    for name, low in least.items():
        if not getattr(options, name) >= low:  # NaN too
            raise InputError(f"--{name} is {getattr(options, name)}; expected at least {low:g}")
    if options.out is not None and not options.out.parent.is_dir():
        raise InputError(f"--out {options.out}: the folder {options.out.parent} is not there; create it first")


def exit_code(run: Callable[[], None]) -> int:
    """Run a command; 0, the code of its error, or 130 for Ctrl-C."""
    try:
        run()
    except PomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0
