"""The process in which an engine is built. A native library that crashes, or is killed, becomes a message here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pom_edge import errors
from pom_edge.errors import GateError, PomError
from pom_edge.export.tensorrt_engine import EngineJob, remedies
from pom_edge.runtimes.tensorrt_library import NAMES

BUILDER = "pom_edge.export.tensorrt_engine"

__all__ = ["build_in_process"]


def build_in_process(job: EngineJob, say: Callable[[str], None] | None = None, module: str = BUILDER) -> dict[str, Any]:
    """Build an engine in a fresh interpreter.

    Args:
        job: what to build.
        say: called with a line of progress.
        module: what runs there; reads a job on stdin and writes events.

    Returns:
        The facts of :func:`pom_edge.export.tensorrt_engine.build_engine`.

    Raises:
        MissingToolError, GateError: as there; or the process died, with what that means and what helps.
    """
    root = str(Path(sys.modules["pom_edge"].__file__ or "").resolve().parents[1])  # may be a bare checkout
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    answer: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        with subprocess.Popen(  # noqa: S603  # our own interpreter, our own module
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(job.to_json())
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died before it read: the return code tells
            for line in process.stdout:
                event = _event(line)
                if event.get("pom_edge") == "progress" and say is not None:
                    say(event["value"])
                elif event.get("pom_edge") in ("done", "error"):
                    answer = event
            code = process.wait()
        noise.seek(0)
        last = noise.read().strip().splitlines()[-3:]
    if answer.get("pom_edge") == "done" and code == 0:
        facts: dict[str, Any] = answer["value"]
        return facts
    if answer.get("pom_edge") == "error":
        kind: type[PomError] = getattr(errors, answer["value"]["kind"], GateError)
        raise kind(answer["value"]["message"])
    raise GateError(_died(job.target, code, last))


def _event(line: str) -> dict[str, Any]:
    """Native libraries print into the same pipe: what is not an event of ours is nothing."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _died(target: str, code: int, last: list[str]) -> str:
    name = NAMES[target]
    told = f" ({' | '.join(last)})" if last else ""
    if code == -signal.SIGKILL:
        return (
            f"the process that builds with {name} was killed by the system, which does so when memory runs out{told}. "
            f"{remedies(target)}"
        )
    if code < 0:
        names = {each.value: each.name for each in signal.Signals}
        return (
            f"{name} crashed while it built ({names.get(-code, code)}){told}. Build again; if it crashes again, another "
            f"version of {name}, another --precision or --optimization-level 2 may not"
        )
    return f"the process that builds with {name} ended with {code} and no answer{told}"
