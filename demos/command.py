"""How the demos' commands end: a user's mistake is one message and an exit code, a bug keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pom_edge.errors import PomError

__all__ = ["exit_code"]


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
