"""From a photo of a handwritten digit to a model image. numpy and Pillow only, so that a device can run it.

The way MNIST was made, plus what a camera adds:

    photo -> grey -> minus the paper (a quadratic surface) -> bright on dark -> largest strokes -> cropped
          -> fitted into 20x20 -> centre of mass in the middle of 28x28 -> full contrast
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps, UnidentifiedImageError

from pom_edge.errors import InputError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SIDE = 28  # pixels of a model image
BOX = 20  # pixels that the digit itself may take, as in MNIST
MEAN, STD = 0.1307, 0.3081  # of MNIST pixels in 0..1
CLASS_NAMES = [str(digit) for digit in range(10)]

WORK_SIDE = 224  # photos are shrunk to this first: averages noise away, and no digit needs more
MIN_CONTRAST = 0.08  # ink against paper, of the full range; below it there is nothing to read
SAME_DIGIT_AREA = 0.10  # a stroke smaller than this share of the largest one is a speck
MIN_STROKE = 0.075  # stroke width over digit height: a thin pen is thickened up to this (MNIST: median 0.12)

__all__ = [
    "CLASS_NAMES",
    "SIDE",
    "Digits",
    "ascii_view",
    "load_digits",
    "model_input",
    "open_photo",
    "preprocess",
    "softmax",
]


@dataclass(frozen=True)
class Digits:
    """Images (N, 28, 28) uint8, ink bright on black, and labels (N,) uint8."""

    images: Bytes
    labels: Bytes

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[Any]) -> Digits:
        """The images at ``index`` (integers or booleans)."""
        return Digits(self.images[index], self.labels[index])


def load_digits(path: Path) -> Digits:
    """Read an .npz with ``images`` (N, 28, 28) uint8 and ``labels`` (N,) uint8.

    Raises:
        InputError: the file is missing, is no .npz, or holds something else.
    """
    if not path.is_file():
        raise InputError(f"{path} is not there; expected an .npz with `images` and `labels`")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            digits = Digits(arrays["images"], arrays["labels"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an .npz with `images` and `labels`: {error}") from None
    shape = digits.images.shape
    if digits.images.dtype != np.uint8 or shape[1:] != (SIDE, SIDE) or digits.labels.shape != shape[:1]:
        raise InputError(
            f"{path}: images are {digits.images.dtype} {shape}, labels {digits.labels.shape}; "
            f"expected uint8 (N, {SIDE}, {SIDE}) and (N,)"
        )
    return digits


def model_input(images: Bytes) -> Floats:
    """uint8 (N, 28, 28) -> float32 (N, 1, 28, 28), zero mean and unit deviation over MNIST."""
    scaled: Floats = images[:, None].astype(np.float32) / np.float32(255)
    return (scaled - np.float32(MEAN)) / np.float32(STD)


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Probabilities over the last axis."""
    z = logits.astype(np.float64)
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def open_photo(path: Path) -> Image.Image:
    """Read an image file, turned upright as its EXIF data say.

    Raises:
        InputError: the file is missing, a folder, or no image that Pillow can read.
    """
    if not path.exists():
        raise InputError(f"image {path} is not there; give a PNG or JPEG with one handwritten digit")
    if path.is_dir():
        raise InputError(f"image {path} is a folder; give the files in it, for example {path}/*.png")
    try:
        with Image.open(path) as image:
            image.load()
            return ImageOps.exif_transpose(image)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)
        raise InputError(f"image {path} cannot be read ({reason}); give a PNG or JPEG") from None


def preprocess(photo: Image.Image | NDArray[Any]) -> Bytes:
    """One handwritten digit, photographed or drawn, as a model image.

    Args:
        photo: a Pillow image, or an array (H, W), (H, W, 3) or (H, W, 4); integers take the range of their type, floats
            0..1. Dark on light or light on dark, paper unevenly lit, any size from 12 pixels a side.

    Returns:
        uint8 (28, 28): bright on black, at most 20 pixels high and wide, centre of mass in the middle.

    Raises:
        InputError: not an image, too small, or without anything written on it.
    """
    grey = _shrink(_grey(photo))
    ink = _ink(grey)
    noise = 1.48 * float(np.median(np.abs(ink)))  # standard deviation of the paper, from its median deviation
    peak = float(np.percentile(ink, 99.5))
    if peak < MIN_CONTRAST:
        raise InputError(
            f"no digit found: the ink differs from the paper by {peak:.1%} of the full range, expected at least "
            f"{MIN_CONTRAST:.0%}; photograph dark ink on light paper (or the reverse), filling the frame"
        )
    strokes = _digit_mask(ink > max(_otsu(ink), min(4 * noise, peak / 2)))
    return _centre(_thicken(_crop(ink, strokes)))


def ascii_view(image: Bytes) -> str:
    """A model image as 14 lines of 28 characters (two rows a line: characters are twice as high as wide)."""
    ramp = np.array(list(" .:-=+*#%@"))
    rows = image.reshape(SIDE // 2, 2, SIDE).mean(1)
    return "\n".join("".join(line).rstrip() for line in ramp[(rows * (len(ramp) - 1) / 255).round().astype(int)])


def _grey(photo: Image.Image | NDArray[Any]) -> Floats:
    """(H, W) float32 in 0..1; transparency counts as white paper."""
    if isinstance(photo, Image.Image):
        if photo.mode.startswith(("I", "F")):  # 16-bit scans: convert("L") would clip them
            values = np.asarray(photo, np.float32)
            return _grey(values / (65535 if values.max() > 255 else 255 if values.max() > 1 else 1))
        return _grey(np.asarray(photo.convert("RGBA" if "A" in photo.mode or "transparency" in photo.info else "RGB")))
    if photo.ndim not in (2, 3) or (photo.ndim == 3 and photo.shape[2] not in (1, 3, 4)):
        raise InputError(f"image has shape {photo.shape}; expected (H, W), (H, W, 3) or (H, W, 4)")
    if min(photo.shape[:2]) < 12:
        raise InputError(f"image is {photo.shape[1]}x{photo.shape[0]} pixels; expected at least 12x12")
    scale = np.iinfo(photo.dtype).max if np.issubdtype(photo.dtype, np.integer) else 1
    values = photo.astype(np.float32) / np.float32(scale)
    if not np.isfinite(values).all():
        raise InputError("image holds NaN or Inf; expected finite values")
    if values.ndim == 2:
        return values
    if values.shape[2] == 4:
        values = values[..., :3] * values[..., 3:] + (1 - values[..., 3:])
    weights = np.array([0.299, 0.587, 0.114], np.float32) if values.shape[2] == 3 else np.ones(1, np.float32)
    return np.asarray(values @ weights, np.float32)


def _shrink(grey: Floats) -> Floats:
    """At most WORK_SIDE pixels a side, averaged."""
    height, width = grey.shape
    scale = WORK_SIDE / max(height, width)
    if scale >= 1:
        return grey
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(grey).resize(size, Image.Resampling.BOX), np.float32)


def _ink(grey: Floats) -> Floats:
    """How far each pixel is from the paper, in the direction of the ink: about 0 on paper, positive on ink."""
    residual = grey - _paper(grey)
    tail = max(1, residual.size // 50)  # ink covers more than 2 % of a photo that fills the frame
    ordered = np.sort(residual, axis=None)
    return residual if ordered[-tail:].mean() > -ordered[:tail].mean() else -residual


def _paper(grey: Floats) -> Floats:
    """The paper's brightness: a quadratic surface fitted to the pixels that lie close to it (ink does not)."""
    height, width = grey.shape
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1).reshape(-1, 6)
    values = grey.reshape(-1).astype(np.float64)
    surface = np.full_like(values, np.median(values))
    for _ in range(6):
        distance = np.abs(values - surface)
        keep = distance <= max(2.5 * float(np.median(distance)), 0.02)
        surface = terms @ np.linalg.lstsq(terms[keep], values[keep], rcond=None)[0]
    return np.asarray(surface.reshape(height, width), np.float32)


def _otsu(ink: Floats) -> float:
    """The threshold that separates paper from ink best (Otsu 1979: the largest variance between the two classes)."""
    counts, edges = np.histogram(ink.clip(min=0), bins=128)
    centres = (edges[:-1] + edges[1:]) / 2
    below = counts.cumsum()[:-1]
    above = ink.size - below
    sums = (counts * centres).cumsum()
    mean_below = sums[:-1] / np.maximum(below, 1)
    mean_above = (sums[-1] - sums[:-1]) / np.maximum(above, 1)
    return float(edges[1 + int(np.argmax(below * above * (mean_above - mean_below) ** 2))])


def _digit_mask(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Only the connected strokes that make the digit: no specks, nothing that runs in from the border."""
    labels = _components(mask)
    areas = np.bincount(labels.reshape(-1))
    areas[0] = 0
    border = np.unique(np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]]))
    inside = areas.copy()
    inside[border] = 0
    if inside.max() >= SAME_DIGIT_AREA * areas.max():
        areas = inside
    return np.asarray((areas >= max(1, SAME_DIGIT_AREA * areas.max()))[labels])


def _components(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Label 8-connected components 1.. (0 is background), row by row: a run joins those it touches in the row above."""
    labels = np.zeros(mask.shape, np.int64)
    parent = [0]

    def root(label: int) -> int:
        while parent[label] != label:
            label = parent[label]
        return label

    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            above = labels[row - 1, max(0, start - 1) : stop + 1] if row else labels[0, :0]
            touching = sorted({root(int(label)) for label in above if label})
            if not touching:
                touching = [len(parent)]
                parent.append(len(parent))
            for other in touching[1:]:
                parent[other] = touching[0]
            labels[row, start:stop] = touching[0]
    roots = np.array([root(label) for label in range(len(parent))])
    return np.asarray(np.unique(roots, return_inverse=True)[1].reshape(-1)[labels])


def _crop(ink: Floats, strokes: NDArray[np.bool_]) -> Floats:
    """The ink of the strokes and their soft edges, cropped, 0..1."""
    soft = Image.fromarray(strokes.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(3))
    full = float(np.percentile(ink[strokes], 75))
    kept = np.where(np.asarray(soft) > 0, ink / full, 0).clip(0, 1)
    rows, columns = (np.flatnonzero((kept > 0.2).any(axis)) for axis in (1, 0))  # a margin would shrink small images
    return np.asarray(kept[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1], np.float32)


def _thicken(crop: Floats) -> Floats:
    """Widen the strokes of a thin pen, which would fade when the digit is shrunk to 20 pixels."""
    height = max(crop.shape)
    inside = crop > 0.5
    padded = np.pad(inside, 1)
    edge = sum(int((padded[1:-1, 1:-1] & ~padded[1 + dy : -1 + dy or None, 1 + dx : -1 + dx or None]).sum())
               for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0)))  # fmt: skip
    width = 2 * inside.sum() / max(1, edge) * 1.27  # 4/pi: an edge at any angle, counted along the grid
    missing = MIN_STROKE * height - width
    grow = round(float(missing) / 2)
    if grow < 1:
        return crop
    grown = Image.fromarray((np.pad(crop, grow) * 255).astype(np.uint8)).filter(ImageFilter.MaxFilter(2 * grow + 1))
    return np.asarray(grown, np.float32) / np.float32(255)


def _centre(crop: Floats) -> Bytes:
    """Fit a crop 0..1 into 20x20 and put its centre of mass in the middle of 28x28, at full contrast."""
    height, width = crop.shape
    scale = BOX / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = np.asarray(Image.fromarray(crop).resize(size, Image.Resampling.BICUBIC), np.float32).clip(0, 1)
    small = (small / max(float(np.percentile(small[small > 0.1], 90)), 1e-6)).clip(max=1)
    weight = small.sum()
    row = round(SIDE / 2 - float((small.sum(1) * (np.arange(small.shape[0]) + 0.5)).sum() / weight))
    column = round(SIDE / 2 - float((small.sum(0) * (np.arange(small.shape[1]) + 0.5)).sum() / weight))
    row = min(max(row, 0), SIDE - small.shape[0])
    column = min(max(column, 0), SIDE - small.shape[1])
    image = np.zeros((SIDE, SIDE), np.uint8)
    image[row : row + small.shape[0], column : column + small.shape[1]] = (small * 255).round()
    return image
