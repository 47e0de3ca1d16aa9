"""Encode a million tokens under a hard memory limit, and see how far attention of equal width gets in the same memory.

Run as:

    python demos/long_document/run.py                       # 1,000,000 tokens, four blocks, 384 wide: some minutes
    python demos/long_document/run.py --tokens 100000 --budget 128MiB
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.command import exit_code
from pom_edge import ModelConfig, build_model, export_bundle
from pom_edge.errors import GateError, InputError
from pom_edge.runtimes.memory import check_budget, parse_size, predict

FEATURES, DIM, DEPTH, HEADS = 64, 384, 4, 6
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--budget", default="160MiB", help="of the whole process")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="for the bundles and the tokens (default: a temporary one)")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    budget = parse_size(options.budget, "--budget")
    if options.folder is not None and not options.folder.is_dir():
        raise InputError(f"--folder {options.folder} is not there; create it first")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _compare(options, budget, Path(folder))


def _compare(options: argparse.Namespace, budget: int, folder: Path) -> None:
    torch.manual_seed(0)
    settings = {"dim": DIM, "depth": DEPTH, "input_dim": FEATURES}
    inputs = {"x": torch.randn(1, 24, FEATURES)}
    pom = build_model(ModelConfig("encoder", n_sel_heads=HEADS, **settings))  # type: ignore[arg-type]
    out = folder / "pom.pom"
    export_bundle(pom, form="streamed", chunk=options.chunk, example_inputs=inputs, out=out)
    start = time.perf_counter()
    report = check_budget(out, options.tokens, budget=budget, enforce=True, spill=str(folder))
    seconds = time.perf_counter() - start
    if report.exceeded or report.measured is None:
        raise GateError(f"the run did not keep the limit of {options.budget}: {report.exceeded or 'not measured here'}")
    print(
        f"PoM, streamed: {options.tokens:,} tokens in {report.measured.total_bytes / 2**20:.0f} MiB "
        f"(activations {report.measured.activations_bytes / 2**20:.0f} MiB) under a limit of {options.budget}, "
        f"{options.tokens / seconds:,.0f} tokens a second with making the input"
    )
    attention = build_model(ModelConfig("encoder", blocks=("full",) * DEPTH, n_heads=HEADS, **settings))  # type: ignore[arg-type]
    longest = _longest(_Beside(attention), inputs, budget, folder / "attention.pom")
    print(f"attention of equal width, in the same memory: {longest}")


class _Beside(torch.nn.Module):
    """An attention model beside one small PoM, since pom-edge makes no bundle of a model without any."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.pom = build_model(ModelConfig("encoder", dim=8, depth=1, input_dim=FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x) + 0.001 * self.pom(x[:, :, :FEATURES]).mean()  # type: ignore[no-any-return]


def _longest(model: torch.nn.Module, inputs: dict[str, torch.Tensor], budget: int, out: Path) -> str:
    try:
        export_bundle(model, example_inputs=inputs, out=out)
    except InputError as error:
        return f"not exported ({error})"
    sizes = {tokens: predict(out, tokens).total for tokens in LENGTHS}
    fitting = [tokens for tokens, total in sizes.items() if total <= budget]
    listed = ", ".join(f"{tokens:,}: {total / 2**20:,.0f} MiB" for tokens, total in sizes.items())
    return f"{max(fitting):,} tokens at most (predicted: {listed})" if fitting else f"no length (predicted: {listed})"


if __name__ == "__main__":
    sys.exit(main())
