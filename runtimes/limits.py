"""A limit of the system on the memory of a child process.

    cgroup v2      where a group can be made and entered: the kernel kills what takes more than memory.max. Everything counts,
                   pages of files that were read (given up first) and the kernel's own tables too
    RLIMIT_DATA    elsewhere: the kernel refuses what a process asks for. It counts what is reserved, used or not, so the
                   process sets it itself once its threads have their stacks (RLIMIT_RSS does nothing on Linux, RLIMIT_AS
                   breaks the creation of threads)

Whether a group can be made is found out by making one: files may look writable and not be.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP, RLIMIT = "cgroup v2", "RLIMIT_DATA"
PROC = Path("/proc/self")
REMOVE_SECONDS = 1.0  # a group is busy until its last process is gone for good

__all__ = ["CGROUP", "RLIMIT", "Limit", "memory_limit"]


@dataclass(frozen=True)
class Limit:
    """A limit in force; see :func:`memory_limit`.

    Attributes:
        total: bytes.
        group: folder of the control group; None: the child sets RLIMIT_DATA.
    """

    total: int
    group: Path | None

    @property
    def kind(self) -> str:
        """What enforces it."""
        return RLIMIT if self.group is None else CGROUP

    @contextlib.contextmanager
    def entering(self) -> Iterator[Callable[[], None] | None]:
        """What a child calls between fork and exec to be under the limit (``preexec_fn``); None: nothing yet."""
        if self.group is None:
            yield None
            return
        procs = os.open(self.group / "cgroup.procs", os.O_WRONLY)
        try:
            yield lambda: _enter(procs)
        finally:
            os.close(procs)

    @property
    def killed(self) -> bool:
        """Whether the system has killed a process for exceeding it."""
        if self.group is None:
            return False
        counts = dict(line.split() for line in (self.group / "memory.events").read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0


@contextlib.contextmanager
def memory_limit(total: int, proc: Path = PROC) -> Iterator[Limit]:
    """A limit for one child process; a control group that was made for it is removed in the end, however that comes.

    Args:
        total: bytes that the child may take.
        proc: folder of this process in /proc.
    """
    group = next(filter(None, (_make_group(parent, total) for parent in _parents(proc))), None)
    try:
        yield Limit(total, group)
    finally:
        if group is not None:
            _remove(group)


def _enter(procs: int) -> None:
    os.write(procs, str(os.getpid()).encode())


def _parents(proc: Path) -> Iterator[Path]:
    """Groups that could get a child with a memory limit: this process's own, then those around it."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        own = next(line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):  # not Linux, or cgroup v1 alone
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        if not after.startswith("cgroup2 "):
            continue
        root = Path(before.split()[4].replace("\\040", " "))
        group = root / own.strip("/")
        for parent in (group, *group.parents):
            if root in (parent, *parent.parents) and "memory" in _words(parent / "cgroup.subtree_control"):
                yield parent


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _make_group(parent: Path, total: int) -> Path | None:
    """A group with the limit that a process has entered; None where that does not work."""
    group = parent / f"pom-edge-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group.mkdir(0o700)
        _set(group / "memory.max", str(total))
        if (group / "memory.swap.max").exists():
            _set(group / "memory.swap.max", "0")
        with Limit(total, group).entering() as enter:
            # it may be killed for lack of memory: it was in, and that is all that is asked here
            subprocess.run([sys.executable, "-ISE", "-c", ""], preexec_fn=enter, capture_output=True, check=False)
    except BaseException as error:
        _remove(group)
        if isinstance(error, (OSError, subprocess.SubprocessError)):
            return None
        raise
    return group


def _set(file: Path, value: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)  # never creates it: a group without this file has no such controller
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        _set(group / "cgroup.kill", "1")  # what an interrupted run left inside
    end = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            group.rmdir()  # the kernel's files go with it
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        else:
            return
