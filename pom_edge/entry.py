"""The console scripts: a Ctrl-C while Python still imports ends as one later on, with one line and exit 130."""

from __future__ import annotations

import json
import os
import signal
import sys

__all__ = ["export_main", "main"]

MESSAGE = "interrupted; nothing was changed"


def _leave(number: int, _frame: object) -> None:
    """At once: an exception in the middle of an import would come out of it as a traceback, or as another error."""
    if "--json" in sys.argv:
        print(json.dumps({"passed": False, "error": MESSAGE, "exit_code": 128 + number}, indent=2), flush=True)
    print(f"error: {MESSAGE}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def main() -> None:
    """``pom-edge``."""
    before = signal.signal(signal.SIGINT, _leave)
    from pom_edge.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


def export_main() -> None:
    """``pom-export``."""
    before = signal.signal(signal.SIGINT, _leave)
    from pom_edge.cli import export_main as run

    signal.signal(signal.SIGINT, before)
    run()
