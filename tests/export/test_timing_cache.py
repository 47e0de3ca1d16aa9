"""Kernels measured by several builds at once end in one file. What TensorRT does with them is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pom_edge.export.timing_cache import TimingCache


class Kernels:
    """ITimingCache: names of kernels, one a line."""

    def __init__(self, data: bytes) -> None:
        self.names = set(data.split())

    def combine(self, other: Kernels, ignore_mismatch: bool) -> bool:
        self.names |= other.names
        return not ignore_mismatch

    def serialize(self) -> bytes:
        return b"\n".join(sorted(self.names))


class Config:
    """IBuilderConfig: takes no cache of another device."""

    def __init__(self) -> None:
        self.cache = Kernels(b"")

    def create_timing_cache(self, data: bytes) -> Kernels:
        return Kernels(data)

    def set_timing_cache(self, cache: Kernels, ignore_mismatch: bool) -> bool:
        if b"foreign" in cache.names:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Kernels:
        return self.cache


def test_builds_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "timing" / "a.cache"
    one, two, three = Config(), Config(), Config()
    first, second, third = TimingCache(one, file), TimingCache(two, file), TimingCache(three, file)
    with first:
        with second:
            two.cache.names.add(b"second")
        one.cache.names.add(b"first")
    assert file.read_bytes() == b"first\nsecond" and (first.what, second.what) == ("new", "new")
    with third:
        assert three.cache.names == {b"first", b"second"}
    assert third.what == "12 bytes from earlier builds"
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".cache", ".lock"]


def test_a_build_that_fails_writes_nothing_and_a_cache_of_another_device_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.cache"
    file.write_bytes(b"foreign")
    config = Config()
    timing = TimingCache(config, file)
    with pytest.raises(KeyboardInterrupt), timing:
        raise KeyboardInterrupt
    assert timing.what.startswith("of another device") and file.read_bytes() == b"foreign"
