"""Reading a ``.pt2`` archive of torch.export without letting it run code.

torch.export.load (seen in torch 2.13) unpickles odd tensors and custom objects with weights_only=False, loads compiled
libraries, and gives the text of symbolic sizes to sympy's evaluator. An archive made by torch.export.save from a plain model
needs none of that, so whatever does is refused before torch sees the file.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from pom_edge.errors import CheckpointError

_COMPILED = (".so", ".dll", ".dylib", ".cubin")
_PICKLED = ("/data/constants/custom_obj_", "/data/constants/opaque_obj_")
# Sizes are written as sympy's srepr: Add(Mul(Integer(2), Symbol('s27', positive=True)), Integer(1)). Class names, numbers,
# operators and plain names in quotes; no call of a lower-case name, no attribute, no dunder.
_NAME = re.compile(r"'\w+'")
_EXPRESSION = re.compile(r"[\w\s(),=+\-*/<>.]*")
_UNSAFE = re.compile(r"__|\.\s*[A-Za-z_]|\b[a-z_]\w*\s*\(|\blambda\b")

__all__ = ["load_program"]


def load_program(path: Path, unsafe_pickle: bool = False) -> ExportedProgram:
    """Load an archive of torch.export.save.

    Args:
        path: the archive; any suffix.
        unsafe_pickle: also load archives that unpickle objects or load libraries, which runs code from the file.

    Raises:
        CheckpointError: the archive holds code, or this torch cannot read it.
    """
    if not unsafe_pickle:
        _refuse_code(path)
    try:
        with path.open("rb") as file, warnings.catch_warnings(), _weights_only(not unsafe_pickle):
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.load(file)
    except Exception as error:  # schema, archive, operator and zip errors each have their own type
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read by torch {torch.__version__} as a torch.export archive: {first}. Export it again with "
            "this torch version, or give the weights with --factory"
        ) from error


def _refuse_code(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = "/" + info.filename.lower()  # torch's zip reader does not tell case apart
            if name.endswith(_COMPILED) or "/data/aotinductor/" in name:
                raise _holds_code(path, f"a compiled library ({info.filename})")
            if any(marker in name for marker in _PICKLED):
                raise _holds_code(path, f"a pickled object ({info.filename})")
            if name.endswith(".json"):
                _check_expressions(path, archive.read(info))


def _check_expressions(path: Path, content: bytes) -> None:
    try:
        document = json.loads(content)
    except ValueError:
        return  # torch parses the same bytes, and says what is wrong with them
    for text in _expressions(document):
        bare = _NAME.sub("", text)
        if not _EXPRESSION.fullmatch(bare) or _UNSAFE.search(bare):
            raise _holds_code(path, f"a size that is no plain expression ({text[:60]!r})")


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "expr_str":
                yield str(value)
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


@contextmanager
def _weights_only(active: bool) -> Iterator[None]:
    """Make every torch.load inside the block a weights-only one, also where torch asks for more."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    if active:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if active:
            os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


def _holds_code(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {what}, which runs code when it is loaded. Export the model again without custom objects; if you trust "
        "the file and its author, --unsafe-pickle loads it as it is"
    )
