"""Make "photos" from held-out test digits: a pen on unevenly lit paper, taken by a noisy camera.

They are synthesised, not taken: they test the preprocessing honestly (size, light, noise, tilt), not a real camera.
Run as a file, this writes demos/digits/photos, the same every time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.digits.images import SIDE, Bytes, load_digits

HERE = Path(__file__).parent
SEED = 7
PENS = [(24, 26, 34), (30, 44, 120), (60, 58, 60), (20, 60, 90)]  # black, blue, pencil, petrol

__all__ = ["photo_of", "write_photos"]


def photo_of(digit: Bytes, rng: np.random.Generator, width: int = 168, height: int = 208) -> Image.Image:
    """A photo, (height, width) RGB, of one model image (28, 28) drawn on paper."""
    stroke = _upscaled(digit, rng, width, height)[..., None]  # (H, W, 1), 1 where there is ink
    light = _light(rng, width, height)[..., None]
    paper = np.array([236, 232, 222]) + rng.uniform(-14, 10)
    pen = np.array(PENS[rng.integers(len(PENS))]) + rng.uniform(0, 40)
    density = rng.uniform(0.8, 1.0) * (1 - 0.15 * _blobs(rng, width, height, 24)[..., None])  # ink is never even
    grain = 3 * _blobs(rng, width, height, 60)[..., None]
    colours = (paper + grain) * (1 - stroke * density) + pen * stroke * density
    noisy = colours * light + rng.normal(0, rng.uniform(2, 6), (height, width, 1))
    return Image.fromarray(noisy.clip(0, 255).round().astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(float(rng.uniform(0.4, 1.0)))
    )


def write_photos(folder: Path, seed: int = SEED) -> list[Path]:
    """One photo for each digit 0..9, named after its label; returns their paths."""
    rng = np.random.default_rng(seed)
    digits = load_digits(HERE / "test_images.npz")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for label in range(10):
        index = int(rng.choice(np.flatnonzero(digits.labels == label)))
        path = folder / f"{label}-test{index:04d}.png"
        # 64 grey levels a channel are enough for an uneven paper and halve the file
        photo_of(digits.images[index], rng).point(lambda value: value & 0xFC).save(path, optimize=True)
        paths.append(path)
    return paths


def _upscaled(digit: Bytes, rng: np.random.Generator, width: int, height: int) -> NDArray[np.float64]:
    """The digit with smooth, sharp strokes, tilted and placed somewhere on the page: (H, W) in 0..1."""
    side = int(min(width, height) * rng.uniform(0.7, 0.95))
    large = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC)
    large = large.filter(ImageFilter.GaussianBlur(side / SIDE * 0.35)).rotate(
        float(rng.uniform(-8, 8)), Image.Resampling.BICUBIC
    )
    cut = rng.uniform(0.35, 0.55)  # where the ink begins: decides how wide the pen is
    ink = ((np.asarray(large, np.float64) / 255 - cut) / 0.12 + 0.5).clip(0, 1)
    page = np.zeros((height, width))
    top, left = int(rng.uniform(0.1, 0.9) * (height - side)), int(rng.uniform(0.1, 0.9) * (width - side))
    page[top : top + side, left : left + side] = ink
    return page


def _light(rng: np.random.Generator, width: int, height: int) -> NDArray[np.float64]:
    """A lamp to one side and darker corners, (H, W), at most 1."""
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    angle, slope, corner = rng.uniform(0, 2 * np.pi), rng.uniform(0.05, 0.25), rng.uniform(0, 0.12)
    light = 1 + slope * (x * np.cos(angle) + y * np.sin(angle)) - corner * (x * x + y * y)
    return np.asarray(light / light.max() * rng.uniform(0.75, 1.0))


def _blobs(rng: np.random.Generator, width: int, height: int, cells: int) -> NDArray[np.float64]:
    """Smooth random texture in about 0..1, (H, W)."""
    coarse = Image.fromarray(rng.uniform(0, 1, (cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "photos")
    for written in write_photos(parser.parse_args().out):
        print(written)
