"""Read handwritten digits with an exported bundle. No torch: numpy, Pillow and one runtime are all that it takes.

Run as:

    python demos/digits/run.py model.pom                       # the photos beside this file, then 1,000 test images
    python demos/digits/run.py model.pom my-photo.jpg --json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.digits.images import Bytes, Digits, ascii_view, load_digits, model_input, open_photo, preprocess, softmax
from pom_edge.errors import InputError, PomError
from pom_edge.runtimes import Session, open_session

HERE = Path(__file__).parent
PHOTO_NAME = re.compile(r"(\d)-test\d+")  # our photos carry their label in the name

__all__ = ["classify_photos", "main", "measure"]


def classify_photos(session: Session, paths: list[Path]) -> list[dict[str, Any]]:
    """Read each photo; all are opened before the first is shown, so that a bad path is reported at once.

    Returns:
        For each photo: file, digit, probability, expected (None when unknown) and view (28x28 uint8).

    Raises:
        InputError: a photo is missing, unreadable or blank; the message names it.
    """
    views = [_view(path) for path in paths]
    rows = []
    for path, view in zip(paths, views, strict=True):
        probabilities = softmax(_logits(session, view[None]))[0]
        digit = int(probabilities.argmax())
        label = PHOTO_NAME.fullmatch(path.stem)
        rows.append(
            {
                "file": str(path),
                "digit": digit,
                "probability": round(float(probabilities[digit]), 6),
                "expected": int(label[1]) if label else None,
                "view": view,
            }
        )
    return rows


def measure(session: Session, digits: Digits, batch: int) -> dict[str, Any]:
    """Accuracy over all digits, and the median time an image takes, alone and in batches (after one warm-up each)."""
    predictions, batch_times = _timed(session, digits.images, batch)
    _, single_times = _timed(session, digits.images[:100], 1)
    right = int((predictions == digits.labels).sum())
    full = batch_times[: len(digits) // batch] or batch_times  # a last, shorter batch would flatter the median
    return {
        "images": len(digits),
        "correct": right,
        "accuracy": right / len(digits),
        "batch": min(batch, len(digits)),
        "median_ms_per_image": round(1e3 * statistics.median(full) / min(batch, len(digits)), 4),
        "median_ms_single_image": round(1e3 * statistics.median(single_times), 4),
    }


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code (2: a wrong argument, an unreadable image or a damaged bundle)."""
    options = _parser().parse_args(argv)
    try:
        if options.batch < 1:
            raise InputError(f"--batch is {options.batch}; expected at least 1")
        report = _run(options)
    except PomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report))
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    digits = load_digits(HERE / "test_images.npz")
    paths = options.images or sorted((HERE / "photos").glob("*.png"))
    with open_session(options.bundle, runtime=options.runtime, threads=options.threads) as session:
        _check_batch(session, options.batch)
        photos = classify_photos(session, paths)
        for row in photos:
            say(_describe(row))
        test, runtime = measure(session, digits, options.batch), session.runtime
    say(
        f"{test['images']:,} held-out test images: accuracy {test['accuracy']:.2%} ({test['correct']} right); "
        f"{test['median_ms_per_image']:.3f} ms an image in batches of {test['batch']}, "
        f"{test['median_ms_single_image']:.3f} ms alone (medians, {runtime})"
    )
    torch_imported = "torch" in sys.modules
    say(f"torch imported: {'yes' if torch_imported else 'no'}")
    return {
        "bundle": str(options.bundle),
        "runtime": runtime,
        "torch_imported": torch_imported,
        "photos": [{key: value for key, value in row.items() if key != "view"} for row in photos],
        "test": test,
    }


def _check_batch(session: Session, batch: int) -> None:
    """Bundles of the streamed form, and those exported with --batch, take batches of one size.

    Raises:
        InputError: another one was asked for.
    """
    fixed = session.inputs[0].shape[0]
    if isinstance(fixed, int) and (fixed, batch) != (1, 1):
        hint = "run with --batch 1" if fixed == 1 else "photos are read one by one; export without --batch, or with --batch 1"
        raise InputError(f"the bundle ({session.artifact.file}) takes batches of {fixed}, found --batch {batch}; {hint}")


def _view(path: Path) -> Bytes:
    """The photo as a model image; errors name the file."""
    photo = open_photo(path)
    try:
        return preprocess(photo)
    except InputError as error:
        raise InputError(f"image {path}: {error}") from None


def _logits(session: Session, images: Bytes) -> np.ndarray:
    """(N, 28, 28) uint8 -> (N, 10)."""
    logits = session.run(x=model_input(images))
    if not isinstance(logits, np.ndarray) or logits.shape != (len(images), 10):
        found = f"shape {logits.shape}" if isinstance(logits, np.ndarray) else f"outputs {sorted(logits)}"
        raise InputError(f"the bundle gives {found}; expected one output ({len(images)}, 10): not a digit classifier")
    return logits


def _timed(session: Session, images: Bytes, batch: int) -> tuple[np.ndarray, list[float]]:
    """Predictions, and seconds for each batch."""
    _logits(session, images[:batch])  # warm-up: the first call of a shape allocates
    predictions, seconds = [], []
    for start in range(0, len(images), batch):
        started = time.perf_counter()
        logits = _logits(session, images[start : start + batch])
        seconds.append(time.perf_counter() - started)
        predictions.append(logits.argmax(-1))
    return np.concatenate(predictions), seconds


def _describe(row: dict[str, Any]) -> str:
    verdict = "" if row["expected"] is None else " (right)" if row["expected"] == row["digit"] else " (WRONG)"
    head = f"{Path(row['file']).name}: {row['digit']}, probability {row['probability']:.3f}{verdict}"
    return head + "\n" + "\n".join("    " + line for line in ascii_view(row["view"]).splitlines() if line.strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the .pom folder that pom-export wrote")
    parser.add_argument("images", type=Path, nargs="*", metavar="IMAGE", help="photos of digits (default: our own)")
    parser.add_argument("--batch", type=int, default=100, help="images a batch of the test (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="threads of the runtime (default: its own choice)")
    parser.add_argument("--runtime", help="which runtime runs the bundle (default: its artifact's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


if __name__ == "__main__":
    sys.exit(main())
