"""Limits of the system: a control group where one can be made, else RLIMIT_DATA; afterwards the group is gone in any case.

The kernel's files are played by ordinary ones: what a group would enforce is not tested, but who writes what where is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pom_edge.runtimes import limits
from pom_edge.runtimes.limits import CGROUP, RLIMIT, memory_limit

pytestmark = pytest.mark.skipif(os.name != "posix", reason="control groups are Linux")
FILES = ("cgroup.procs", "memory.max", "memory.swap.max", "memory.events")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/proc/self of a process in the group a/b, where a hands the memory controller on and b does not."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (root / "a" / "b").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/a/b\n")
    (proc / "mountinfo").write_text(f"30 24 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")
    for group, handed in ((root, "cpu memory"), (root / "a", "cpu memory"), (root / "a" / "b", "")):
        (group / "cgroup.subtree_control").write_text(handed)
    make = Path.mkdir

    def mkdir(group: Path, mode: int = 0o777) -> None:
        make(group, mode)
        for name in FILES:
            (group / name).write_text("oom 0\noom_kill 0\n" if name == "memory.events" else "")

    monkeypatch.setattr(limits.Path, "mkdir", mkdir)
    monkeypatch.setattr(limits.Path, "rmdir", lambda self: shutil.rmtree(self))
    return proc


def groups(proc: Path) -> list[Path]:
    return list((proc.parent / "cgroup").rglob("pom-edge-*"))


def test_a_child_enters_its_group_before_it_runs(proc: Path) -> None:
    with memory_limit(123 << 20, proc) as limit:
        assert limit.kind == CGROUP and limit.group is not None
        assert limit.group.parent.name == "a"  # the nearest that hands memory on
        assert (limit.group / "memory.max").read_text() == str(123 << 20)
        assert (limit.group / "memory.swap.max").read_text() == "0"
        (limit.group / "cgroup.procs").write_text("")  # as it was before somebody tried it out
        code = f"import os; print(os.getpid(), open({str(limit.group / 'cgroup.procs')!r}).read())"
        with limit.entering() as enter:
            done = subprocess.run([sys.executable, "-c", code], preexec_fn=enter, capture_output=True, text=True, check=True)
        pid, entered = done.stdout.split()
        assert pid == entered
        assert not limit.killed
        (limit.group / "memory.events").write_text("oom 1\noom_kill 1\n")
        assert limit.killed
    assert not groups(proc)


def test_a_group_is_removed_when_interrupted_as_soon_as_it_is_there(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, seen = limits.Path.mkdir, []

    def mkdir(group: Path, mode: int) -> None:
        make(group, mode)
        seen.extend(groups(proc))
        raise KeyboardInterrupt

    monkeypatch.setattr(limits.Path, "mkdir", mkdir)
    with pytest.raises(KeyboardInterrupt), memory_limit(1 << 30, proc):
        pass
    assert len(seen) == 1 and not groups(proc)


def test_a_group_is_removed_when_the_run_fails(proc: Path) -> None:
    def fail() -> None:
        with memory_limit(1 << 30, proc):
            assert len(groups(proc)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not groups(proc)


@pytest.mark.parametrize("missing", ["memory.max", "cgroup.procs"])
def test_what_looks_writable_and_is_not(proc: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(f"{__name__}.FILES", tuple(name for name in FILES if name != missing))
    with memory_limit(1 << 30, proc) as limit:
        assert limit.kind == RLIMIT and limit.group is None
        assert not groups(proc)


def test_a_process_that_cannot_be_moved(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(limits, "_enter", refuse)
    with memory_limit(1 << 30, proc) as limit:
        assert limit.kind == RLIMIT
    assert not groups(proc)


def test_without_cgroup_v2(tmp_path: Path) -> None:
    with memory_limit(1 << 30, tmp_path) as limit:
        assert limit.kind == RLIMIT and not limit.killed
    (tmp_path / "cgroup").write_text("4:memory:/x\n")  # v1 alone
    (tmp_path / "mountinfo").write_text("")
    with memory_limit(1 << 30, tmp_path) as limit:
        assert limit.kind == RLIMIT
