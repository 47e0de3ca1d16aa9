"""Tables fit the terminal, and no figure is cut or folded at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pom_edge.grid import print_grid

HEADERS = ["artifact", "tokens", "tokens/s", "of GEMM rate", "against fp32", "memory", "SNR"]
NAME = "a-rather-long-name-of-a-folder/parallel.fp32.onnx"
FIGURES = ["16,384", "1,234,567", "101%", "slower here: 0.85x", "1,023.9 MiB", "127.3 dB"]


def _print(width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, emoji=False)
    print_grid(console, HEADERS, [[NAME, *FIGURES], ["b.onnx", *FIGURES]], text={0}, title="a title")
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", range(40, 161, 5))
def test_no_figure_is_cut(width: int) -> None:
    lines = _print(width)
    assert "…" not in "".join(lines)
    for figure in FIGURES:
        assert sum(figure in line for line in lines) == 2, (width, figure)
    assert all(len(line.rstrip()) <= width for line in lines if NAME not in line)
    boxed = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert "".join(boxed) == f"{NAME}b.onnx" or (not boxed and NAME in lines)


def test_the_widest_form_that_fits_is_chosen() -> None:
    whole, broken, lines = _print(160), _print(130), _print(80)
    assert any("of GEMM rate" in line and NAME not in line for line in whole) and len(whole) == 7
    headers = [[word.strip() for word in line.split("┃")] for line in broken if line.startswith("┃")]
    assert [row[4] for row in headers] == ["of", "GEMM", "rate"]
    assert "┃" not in "".join(lines) and any("against fp32 slower here: 0.85x" in line for line in lines)
