"""Lists of lengths: what is wrong with one is said; and counts that read well."""

from __future__ import annotations

import re

import pytest

from pom_edge.errors import InputError
from pom_edge.words import counted, parse_lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64,", "'64,': a comma with nothing after it"),
        (",64", "',64': a comma with nothing before it"),
        ("64,,128", "'64,,128': a comma with nothing before the next"),
        (" , ", "holds no number"),
        ("64,1e3", "holds '1e3'; expected numbers"),
    ],
)
def test_lengths_that_are_no_list(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_lengths(text, "--tokens")


def test_lengths_and_counts() -> None:
    assert parse_lengths("64, 1024,7", "--tokens") == [64, 1024, 7]
    assert [counted(n, "token") for n in (0, 1, 1024)] == ["0 tokens", "1 token", "1,024 tokens"]
