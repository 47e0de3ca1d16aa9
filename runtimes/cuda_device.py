"""The NVIDIA GPUs of this machine, asked of the driver itself: no package is needed for that."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CUdevice_attribute

__all__ = ["Gpu", "GpuState", "find_gpus"]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as the driver says it, for example ``"Orin"``.
        compute_capability: ``"8.7"``.
        integrated: shares its memory with the CPU.
    """

    name: str
    compute_capability: str
    integrated: bool

    @property
    def slug(self) -> str:
        """The name as part of a file name: ``"nvidia-rtx-a2000"``."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.name.lower()).split()) or "gpu"


@dataclass(frozen=True)
class GpuState:
    """What the driver answers.

    Attributes:
        gpus: empty where there is none.
        cuda: the highest CUDA version that the driver runs, ``"12.6"``; None without a driver.
        reason: why there is no GPU; empty where there is one.
    """

    gpus: list[Gpu]
    cuda: str | None
    reason: str


def find_gpus() -> GpuState:
    """Ask the driver; nothing is allocated on a device."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return GpuState([], None, f"no NVIDIA driver ({name} is not there)")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = driver.cuInit(0)
    if status != 0:
        return GpuState([], cuda, f"the NVIDIA driver does not start (cuInit answers {status})")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    gpus = [_describe(driver, index) for index in range(count.value)]
    return GpuState(gpus, cuda, "" if gpus else "the NVIDIA driver sees no GPU")


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, text = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(text, len(text), device)
    major, minor, integrated = (_attribute(driver, device, which) for which in (_MAJOR, _MINOR, _INTEGRATED))
    return Gpu(text.value.decode(errors="replace"), f"{major}.{minor}", bool(integrated))


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value
