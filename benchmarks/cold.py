"""What a user waits for before anything runs: python -m benchmarks.cold [--depth 12] [--repeats 3] [--json FILE]

help      ``pom-export --help``, a fresh process from start to end                              (goal < 0.5 s)
export    ``pom-export model.pt`` of an encoder (d 384, 6 heads), a fresh process, gates held     (goal < 30 s)
import    ``import pom_edge`` and ONNX Runtime, in a fresh process
open      ``open_session`` on what was exported, in a fresh process that has imported both       (goal < 1 s)
first     its first run, 256 tokens
Medians of the repeats; the export once. Processor time beside it: on a busy machine the clock says little.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lockstep import arguments_of, described, positive, writable, write_json

GOALS = {"help": 0.5, "export": 30.0, "open": 1.0}
OPEN = """
import sys, time
start = time.perf_counter()
spent = time.process_time
import numpy, onnxruntime, pom_edge.runtimes
imported, before = time.perf_counter(), spent()
session = pom_edge.runtimes.open_session(sys.argv[1])
opened, processor = time.perf_counter(), spent() - before
session.run_named({"x": numpy.zeros((1, 256, 384), numpy.float32), "mask": numpy.ones((1, 256), numpy.float32)})
print(imported - start, opened - imported, time.perf_counter() - opened, processor)
"""


def save_model(depth: int, path: Path) -> None:
    """A checkpoint of an encoder with fresh weights; its coefficients are redrawn: fresh ones leave a mixer nearly silent."""
    import torch

    from pom_edge import ModelConfig, build_model, save_checkpoint

    torch.manual_seed(0)
    config = ModelConfig("encoder", dim=384, depth=depth, input_dim=384, n_sel_heads=6)
    model = build_model(config).eval()
    for block in model.blocks:  # type: ignore[union-attr]
        torch.nn.init.normal_(block.mixer.po_coeff, std=0.3)
    save_checkpoint(path, model, config)


def timed(arguments: list[str], processor: list[float]) -> float:
    """Seconds of a process; appends those of the processors."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each."""
    parser = arguments_of(__doc__)
    parser.add_argument("--depth", type=positive, default=12, help="blocks of the encoder")
    parser.add_argument("--repeats", type=positive, default=3, help="fresh processes for each")
    parser.add_argument("--json", type=writable, help="also write the rows there")
    options = parser.parse_args()
    command = [sys.executable, "-c", "import pom_edge.cli; pom_edge.cli.export_main()"]
    used: dict[str, list[float]] = {"help": [], "export": []}
    found = {"help": [timed([*command, "--help"], used["help"]) for _ in range(options.repeats)]}
    with tempfile.TemporaryDirectory() as folder:
        model, bundle = Path(folder) / "model.pt", Path(folder) / "model.pom"
        save_model(options.depth, model)
        found["export"] = [timed([*command, str(model), "--out", str(bundle)], used["export"])]
        for _ in range(options.repeats):
            run = [sys.executable, "-c", OPEN, str(bundle)]
            text = subprocess.run(run, check=True, capture_output=True, text=True).stdout
            *seconds, processor = map(float, text.split())
            used.setdefault("open", []).append(processor)
            for name, each in zip(("import", "open", "first"), seconds, strict=True):
                found.setdefault(name, []).append(each)
    print(f"{described()}, encoder of {options.depth} blocks, d 384, 6 heads")
    made: list[dict[str, Any]] = []
    for what, taken in found.items():
        middle, goal = statistics.median(taken), GOALS.get(what)
        verdict = "" if goal is None else f"   goal {goal:g} s: {'kept' if middle < goal else 'MISSED'}"
        processor_s = statistics.median(used[what]) if what in used else None
        beside = "" if processor_s is None else f" (processors {processor_s:.3f} s)"
        print(f"{what:8} {middle:7.3f} s{beside}{verdict}")
        made.append({"what": what, "seconds": round(middle, 4), "processor_s": processor_s, "goal_s": goal})
    write_json(options.json, None, made)


if __name__ == "__main__":
    main()
