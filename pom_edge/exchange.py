"""Replace a folder in one step: whoever looks sees the old one or the new one, never half of either.

Linux exchanges two names atomically (renameat2 with RENAME_EXCHANGE). Elsewhere the old folder steps aside under a name
that the next start recognises: if the new one did not arrive, the old one steps back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pom_edge.errors import InputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

__all__ = ["follow_umask", "recover", "replace_file", "replaced_folder", "writing_errors"]


@contextlib.contextmanager
def writing_errors(path: Path, remedy: str = "choose another --out") -> Iterator[None]:
    """Turn a refusal of the file system into one clear error.

    Args:
        path: what is written.
        remedy: what helps where the place itself cannot be written.

    Raises:
        InputError: the disk is full, the place is not writable, the name is taken.
    """
    try:
        yield
    except OSError as error:
        absent = "the folder to write into does not exist; create it first"
        reasons = {
            errno.ENOSPC: "the disk is full; free some space",
            errno.EDQUOT: "the disk quota is used up; free some space",
            errno.EACCES: f"no permission to write there; {remedy}",
            errno.EPERM: f"no permission to write there; {remedy}",
            errno.EROFS: f"the file system is read-only; {remedy}",
            errno.ENOENT: f"the system makes no file there; {remedy}" if path.parent.is_dir() else absent,  # /proc
            errno.ENOTDIR: f"a part of the path is a file; {remedy}",
        }
        code = error.errno if error.errno is not None else -1
        reason = reasons.get(code, error.strerror or str(error))
        raise InputError(f"cannot write {path}: {reason} (nothing was changed)") from error
    except Exception as error:
        # safetensors and onnx wrap the system's error in their own; its number is only in the text
        if "os error 28" in str(error) or "No space left" in str(error):
            raise InputError(f"cannot write {path}: the disk is full; free some space (nothing was changed)") from error
        raise


@contextlib.contextmanager
def replaced_folder(path: Path, remedy: str = "choose another --out") -> Iterator[Path]:
    """A new folder beside ``path`` that takes its place when the block ends well; otherwise it is removed.

    Args:
        path: the folder.
        remedy: what helps where the place cannot be written.

    Raises:
        InputError: the place cannot be written.
    """
    with writing_errors(path, remedy):
        for stale in path.parent.glob(f".{glob.escape(path.name)}.new-*"):
            if _abandoned(stale):
                shutil.rmtree(stale, ignore_errors=True)  # what a killed run left behind
    folder = _unused_name(path)
    try:
        with writing_errors(path, remedy):
            folder.mkdir(0o700)
        yield folder
        with writing_errors(path, remedy):
            follow_umask(folder, 0o777)  # it was private while it was written
            _sync(folder)
            _put_in_place(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_file(
    path: Path, content: bytes, remedy: str = "choose another --out", check: Callable[[], None] | None = None
) -> None:
    """Write a file beside ``path`` that takes its place when it is whole.

    Args:
        path: the file.
        content: of it.
        remedy: what helps where the place cannot be written.
        check: called at the last moment; what it raises leaves the old file where it is.

    Raises:
        InputError: the place cannot be written, or the disk is full.
    """
    new = _unused_name(path)
    try:
        with writing_errors(path, remedy):
            with open(new, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                new.chmod(path.stat().st_mode)
            if check is not None:
                check()
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _unused_name(path: Path) -> Path:
    """A name beside ``path``, known before anything bears it: an interrupt right after that can be cleaned up too."""
    return path.with_name(f".{path.name}.new-{os.getpid()}-{secrets.token_hex(4)}")


def _abandoned(folder: Path) -> bool:
    """Whether the process that was writing a folder is gone: another export of the same bundle may be under way."""
    pid = folder.name.rpartition(".new-")[2].partition("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return not pid.isdigit()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # alive, and somebody else's
    return False


def recover(path: Path) -> None:
    """Finish or undo an exchange that was interrupted where it is not atomic."""
    old = _aside(path)
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)  # the new folder arrived: the old one is done with
    else:
        os.rename(old, path)


def _put_in_place(folder: Path, path: Path) -> None:
    if not path.exists():
        os.rename(folder, path)
    elif not _exchange(folder, path):  # after an exchange `folder` holds the old bundle, and the caller removes it
        old = _aside(path)
        os.rename(path, old)
        try:
            os.rename(folder, path)
        except BaseException:  # Ctrl-C as well: the name must not stay empty until the next start
            os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return bool(libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _sync(folder: Path) -> None:
    """Bytes reach the disk before the name does, so that a power cut cannot leave an empty bundle."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def follow_umask(path: Path, mode: int = 0o666) -> None:
    """Permissions as those of any file that a program makes."""
    os.chmod(path, mode & ~_umask())


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
