"""The 60 recordings of the published module, read without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from tests.oracle import Case

FOLDER = Path(__file__).parent / "data" / "golden"
ROTARY = {"pom": None, "rope1d": "1d", "rope2d": "2d"}
MODES = {"cross_mask": "cross_per_query", "stream": "frames"}  # the published step() treats a chunk as a frame
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
STREAMS = [name for name in NAMES if "-stream-" in name]
PARALLEL = [name for name in NAMES if "-stream-" not in name]

__all__ = ["NAMES", "PARALLEL", "STREAMS", "Recording", "read"]


@dataclass(frozen=True)
class Recording:
    """What the published module was given, and what it answered.

    Attributes:
        case: settings, parameters (without rotary tables) and inputs.
        y: its output, (B, T, d) float32.
        chunk: tokens in each step of a stream; 0 for the other modes.
        state_mean: (B, 1, D), streams only.
    """

    case: Case
    y: NDArray[np.float32]
    chunk: int
    state_mean: NDArray[np.float32] | None


@cache
def read(name: str) -> Recording:
    """One recording by the stem of its file name."""
    with safe_open(FOLDER / f"{name}.safetensors", "np") as file:
        metadata = file.metadata()
        tensors: dict[str, NDArray[Any]] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no dict  # noqa: SIM118  # not a dict
    tables = ("freqs_", "row_", "col_")
    params = {
        key.removeprefix("param."): value
        for key, value in tensors.items()
        if key.startswith("param.") and not key.removeprefix("param.").startswith(tables)
    }
    inputs = {
        key.removeprefix("in.").replace("positions_hw", "positions"): value
        for key, value in tensors.items()
        if key.startswith("in.")
    }
    config = json.loads(metadata["config"]) | {"rotary": ROTARY[metadata["module"]]}
    mode = MODES.get(metadata["mode"], metadata["mode"])
    chunk = int(metadata.get("chunk", 0))
    frames = (chunk,) * (inputs["x"].shape[1] // chunk) if chunk else ()
    case = Case(config, params, inputs, mode, frames, note=name)
    return Recording(case, tensors["out.y"], chunk, tensors.get("out.state_mean"))
