"""Core ML packages of the demos and of a 12-block encoder: conversion time, size, operators, parity, and long streams.

Run as: python -m benchmarks.coreml digits|text|encoder [--precision fp16]... [--stateful] [--steps 8192]

Everything is evaluated with numpy on the package that was saved; nothing runs on a device. The evaluator is no runtime, so the
conversion's processor time is all that is shown.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lockstep import arguments_of, positive
from pom_edge import load
from pom_edge.bundle import Bundle
from pom_edge.mixer import PoM
from pom_edge.models import ModelConfig, build_model
from pom_edge.pipeline import ExportOptions, ExportReport, export_bundle, export_file
from pom_edge.runtimes import open_session
from pom_edge.runtimes.parity import measure

DEMOS = {"digits": Path("demos/digits/model.pt"), "text": Path("demos/text/model.pt")}
TOKENS, WIDTH, BLOCKS = 256, 384, 12
LAST = 256  # tokens of a stream that are compared apart, since a state that drifts shows at the end


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    model = build_model(ModelConfig(kind="encoder", dim=WIDTH, depth=BLOCKS, input_dim=WIDTH, n_sel_heads=6, rotary="1d"))
    for module in model.modules():
        if isinstance(module, PoM):  # fresh coefficients leave the mixers near zero
            nn.init.normal_(module.po_coeff, std=0.5)
    return model.eval()


class Steps:
    """When each step of an export began."""

    def __init__(self) -> None:
        self.began: list[tuple[str, float]] = []

    def __call__(self, step: str) -> None:
        self.began.append((step, time.process_time()))  # of the processor: other programs on the machine do not count

    def seconds(self, prefix: str) -> float:
        """Processor time of the steps whose names begin so."""
        ends = [start for _, start in self.began[1:]]
        return sum(end - start for (step, start), end in zip(self.began, ends, strict=False) if step.startswith(prefix))


def export(name: str, options: dict[str, Any], out: Path) -> tuple[ExportReport, Steps]:
    """One model in one precision."""
    steps = Steps()
    if name == "encoder":
        example = {"x": torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))}
        precision = options.pop("precisions")
        report = export_bundle(_encoder(), "coreml", precision, example_inputs=example, out=out, progress=steps, **options)
        return report, steps
    return export_file(DEMOS[name], ExportOptions(targets=("coreml",), **options), out, steps), steps


def stream(report: ExportReport, count: int) -> None:
    """Single-token steps of held-out text, against PyTorch in one pass."""
    ids = np.frombuffer(Path("demos/text/heldout.txt").read_bytes(), np.uint8)[:count].astype(np.int64)[None]
    with torch.no_grad():
        truth = load(DEMOS["text"])(torch.from_numpy(ids)).numpy()
    with open_session(report) as session:
        found = np.concatenate([np.asarray(session.step(ids[:, i : i + 1])) for i in range(count)], axis=1)
    whole, last = measure(truth, found), measure(truth[:, -LAST:], found[:, -LAST:])
    print(f"  {count} single-token steps: {whole.snr_db:.1f} dB, the last {LAST}: {last.snr_db:.1f} dB", flush=True)


def main() -> None:
    """Print a row for each precision."""
    parser = arguments_of(__doc__)
    parser.add_argument("model", choices=[*DEMOS, "encoder"])
    parser.add_argument("--precision", action="append", help="may be given several times")
    parser.add_argument("--stateful", action="store_true", help="text: the state in the package")
    parser.add_argument("--steps", type=positive, default=0, help="text: length of a stream")
    asked = parser.parse_args()
    for precision in asked.precision or ["fp16"]:
        options: dict[str, Any] = {"precisions": (precision,), "overwrite": True}
        if asked.model == "text":
            options |= {"form": "recurrent", "stateful": asked.stateful}
        if asked.stateful or precision == "w4":
            options["deployment_target"] = "iOS18"
        with tempfile.TemporaryDirectory() as folder:
            report, steps = export(asked.model, options, Path(folder) / "a.pom")
            (made,) = report.artifacts
            operators = (Bundle.open(report.bundle).manifest.artifacts[0].parity or {})["operators"]
            parity = made.parity or {}
            print(
                f"{asked.model} {made.file}: convert {steps.seconds('convert to Core ML'):.1f} s of {steps.seconds(''):.1f} s, "
                f"{made.bytes / 1024:.0f} KiB, {made.nodes} operations, y {parity['snr_db']:.1f} dB, worst mixer "
                f"{parity['worst_mixer']['snr_db']:.1f} dB"
            )
            print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(operators.items(), key=lambda i: -i[1])))
            for note in report.notes:
                print(f"  note: {note}")
            if asked.steps and asked.model == "text":
                stream(report, asked.steps)


if __name__ == "__main__":
    main()
