"""What a Jetson says of itself, read from files; nothing privileged runs, nothing is installed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pom_edge.system import human_bytes

ROOT = Path("/")
# L4T release -> JetPack (docs/jetson.md)
JETPACKS = {
    "R36.3": "6.0",
    "R36.4": "6.1 or 6.2",
    "R36.5": "6.2.2",
    "R38.2": "7.0",
    "R38.4": "7.1",
    "R39.2.0": "7.2",
    "R39.2.1": "7.2.1",
    "R39": "7.2 or later",
    "R35": "5.1 (out of scope)",
}
KNOWN_BAD = {
    "10.2.0": "TensorRT 10.2.0 is known to be broken; use the JetPack's own",
    "10.3": "TensorRT 10.3 has wrong ViT outputs (ros2-depth-anything-v3-trt#16) and an INT8 builder assertion "
    "(ultralytics#23841): always check engines against the golden data",
}
ORIN_BAD = "10.13.3"
ORIN_REASON = "TensorRT 10.13.3 does not build for Orin (Target GPU SM 87 is not supported); use that of JetPack 6 or 7.2"

__all__ = ["Jetson", "find_jetson", "known_bad"]


@dataclass(frozen=True)
class Jetson:
    """A board.

    Attributes:
        board: for example ``"NVIDIA Jetson Orin Nano Developer Kit"``.
        l4t: ``"R36.4.3"``; None where the file is not there.
        jetpack: by the L4T release; None: not one that is known here.
        power_mode: as nvpmodel wrote it down.
        swap: each swap area, with its size.
        nvmap_bytes: memory that GPU buffers take (NvMapMemUsed).
    """

    board: str
    l4t: str | None
    jetpack: str | None
    power_mode: str | None
    swap: list[str]
    nvmap_bytes: int | None

    def to_dict(self) -> dict[str, str]:
        """For ``pom-edge doctor``."""
        return {
            "board": self.board,
            "L4T": self.l4t or "unknown",
            "JetPack": self.jetpack or "unknown",
            "power mode": self.power_mode or "unknown (sudo nvpmodel -q tells)",
            "swap": ", ".join(self.swap) or "none; an engine build may need a swap file (docs/jetson.md)",
            "GPU buffers (NvMap)": "unknown" if self.nvmap_bytes is None else human_bytes(self.nvmap_bytes),
        }


def find_jetson(root: Path = ROOT) -> Jetson | None:
    """The board, or None on any other machine.

    Args:
        root: where its file system begins.
    """
    board = _text(root / "proc/device-tree/model").strip("\0\n ")
    release = _text(root / "etc/nv_tegra_release")
    if not release and not re.search("jetson|orin|thor|xavier", board.lower()):
        return None
    l4t = _l4t(release)
    return Jetson(board or "unknown", l4t, _jetpack(l4t), _power_mode(root), _swap(root), _nvmap(root))


def known_bad(version: str, gpu: str | None) -> str | None:
    """A warning about a TensorRT that is known to fail, or None.

    Args:
        version: of TensorRT.
        gpu: the GPU's name.
    """
    if version.startswith(ORIN_BAD) and gpu is not None and "orin" in gpu.lower():
        return ORIN_REASON
    return next((reason for known, reason in KNOWN_BAD.items() if version == known or version.startswith(known + ".")), None)


def _l4t(release: str) -> str | None:
    """``# R36 (release), REVISION: 4.3, ...`` -> R36.4.3."""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", release)
    return None if found is None else f"R{found[1]}.{found[2]}"


def _jetpack(l4t: str | None) -> str | None:
    return next((jetpack for known, jetpack in JETPACKS.items() if l4t is not None and l4t.startswith(known)), None)


def _power_mode(root: Path) -> str | None:
    found = re.search(r"pmode:(\d+)", _text(root / "var/lib/nvpmodel/status"))
    if found is None:
        return None
    names = re.search(rf"POWER_MODEL ID=0*{int(found[1])} NAME=(\S+?)\s*>", _text(root / "etc/nvpmodel.conf"))
    return f"{int(found[1])}{f' ({names[1]})' if names else ''}"


def _swap(root: Path) -> list[str]:
    lines = _text(root / "proc/swaps").splitlines()[1:]
    fields = [line.split() for line in lines if len(line.split()) >= 3]
    return [f"{'zram' if 'zram' in each[0] else each[1]} {human_bytes(int(each[2]) * 1024)}" for each in fields]


def _nvmap(root: Path) -> int | None:
    found = re.search(r"NvMapMemUsed:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return None if found is None else int(found[1]) * 1024


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
