"""Kernels that earlier builds measured, in a file that several builds may share at once. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["TimingCache"]


class TimingCache:
    """Kernels measured by earlier builds of the same graph, version, GPU and flags. Several builds may run at once.

    TensorRT-RTX measures nothing ahead of time and has none.
    """

    def __init__(self, config: Any, file: Path | None) -> None:
        self._config, self._file, self.what = config, file, "none"

    def __enter__(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self._file):
            data = self._file.read_bytes() if self._file.exists() else b""
        cache = self._config.create_timing_cache(data)
        self.what = f"{len(data)} bytes from earlier builds" if data else "new"
        if cache is None or not self._config.set_timing_cache(cache, False):
            self.what = "of another device; begun anew"
            self._config.set_timing_cache(self._config.create_timing_cache(b""), False)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        cache = None if self._file is None or kind is not None else self._config.get_timing_cache()
        if self._file is None or cache is None:
            return
        with _locked(self._file):  # another build may have written in the meantime
            if self._file.exists():
                other = self._config.create_timing_cache(self._file.read_bytes())
                if other is not None:
                    cache.combine(other, False)
            beside = self._file.with_suffix(f".{os.getpid()}")
            beside.write_bytes(cache.serialize())
            os.replace(beside, self._file)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: the replacement is atomic all the same
        yield
        return
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
