"""A coremltools that is there and cannot be used: one error, with the line that installs it anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pom_edge.errors import BrokenExtraError, InputError
from pom_edge.runtimes.coreml_library import load_coremltools


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise OSError('libmil.so: cannot open shared object file')", "OSError: libmil.so: cannot open shared object file"),
        ("raise ImportError('cannot import\\n a name')", "ImportError: cannot import a name"),
        ("import a_dependency_that_is_absent", "ModuleNotFoundError: No module named 'a_dependency_that_is_absent'"),
        ("__version__ = '9.0'", "No module named 'coremltools.libmilstoragepython'"),  # a wheel without its native part
        ("", "AttributeError: module 'coremltools' has no attribute '__version__'"),  # a folder left behind
    ],
)
def test_a_broken_installation(code: str, found: str, put_coremltools: Callable[[str], None]) -> None:
    put_coremltools(code)
    with pytest.raises(BrokenExtraError) as caught:
        load_coremltools()
    told = str(caught.value)
    assert "coremltools is installed, but importing it fails" in told and found in told and "\n" not in told
    assert told.endswith("Install it anew: pip install --force-reinstall --no-cache-dir 'pom-edge[coreml]'")


def test_an_old_one_is_not_a_broken_one(put_coremltools: Callable[[str], None]) -> None:
    put_coremltools("__version__ = '8.3'")
    with pytest.raises(InputError, match=r"coremltools 8\.3 is too old; expected 9\.0") as caught:
        load_coremltools()
    assert not isinstance(caught.value, BrokenExtraError)
