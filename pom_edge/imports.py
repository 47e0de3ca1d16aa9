"""``module:callable`` names of the command line to Python objects. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pom_edge.errors import InputError

__all__ = ["call_named", "import_callable", "import_path", "where"]


@contextmanager
def import_path(*folders: Path) -> Iterator[None]:
    """Let imports see these folders first, as ``python script.py`` would, for as long as the block runs.

    A user's code may change the working directory: it is changed back, since every other path is relative to it.
    """
    here = Path.cwd()
    added = [str(folder.resolve()) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            if entry in sys.path:
                sys.path.remove(entry)
        os.chdir(here)


def import_callable(spec: str, option: str) -> Callable[..., Any]:
    """Find the callable that ``package.module:callable`` or ``path/to/file.py:callable`` names.

    Args:
        spec: the name. Modules are looked up in the current directory first.
        option: where the name was given, for messages, for example ``"--factory"``.

    Raises:
        InputError: no such module, file or name, or not a callable; an import that fails inside the module.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name.isidentifier():
        raise InputError(
            f"{option} is {spec!r}; expected package.module:callable or path/to/file.py:callable, for example my_model:build"
        )
    with import_path(*_import_folders(module_name)):
        module = _import(module_name, option)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
        raise InputError(f"{option}: {module_name} has no {name!r}; it defines {', '.join(sorted(own)) or 'no callable'}")
    found = getattr(module, name)
    if not callable(found):
        raise InputError(f"{option}: {spec} is of type {type(found).__name__}; expected something that can be called")
    return found  # type: ignore[no-any-return]


def call_named(spec: str, option: str) -> Any:
    """Import a callable and call it without arguments.

    Raises:
        InputError: as :func:`import_callable`; it needs arguments; or it raises, which is reported with its line.
    """
    function = import_callable(spec, option)
    needed = _required_arguments(function)
    if needed:
        raise InputError(
            f"{option}: {spec} needs arguments ({', '.join(needed)}), but it is called with none. Give a function that takes "
            "none and passes them itself"
        )
    with import_path(*_import_folders(spec.rpartition(":")[0])):
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise InputError(f"{option}: {spec} raised {type(error).__name__}: {error}{where(error)}") from error


def _import_folders(module_name: str) -> tuple[Path, ...]:
    """The current directory, and for a file its own folder, where its sibling modules are."""
    folder = Path(module_name).parent
    return (folder, Path.cwd()) if module_name.endswith(".py") else (Path.cwd(),)


def _import(module_name: str, option: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name), option)
        importlib.invalidate_caches()  # the file may be younger than the directory listing that Python remembers
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"{option}: there is no module {error.name!r}, neither installed nor in {Path.cwd()}. Give "
                "package.module:callable, or the file itself: path/to/file.py:callable"
            ) from error
        raise InputError(
            f"{option}: {module_name} imports {error.name!r}, which is neither installed nor in {Path.cwd()}; install it, or "
            "run from the folder that holds it"
        ) from error
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{option}: importing {module_name} raised {type(error).__name__}: {error}{where(error)}") from error


def _import_file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{option}: {path} does not exist or is not a file; expected path/to/file.py:callable")
    name = path.stem
    present = sys.modules.get(name)
    if present is not None:
        if getattr(present, "__file__", None) and Path(str(present.__file__)).resolve() == path.resolve():
            return present
        name = f"{name}_from_file"  # never shadow an installed module of the same name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # builtins without a signature: the call itself will tell
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [p.name for p in named if p.default is p.empty]


def where(error: BaseException) -> str:
    """File and line of the innermost frame, so that a user's bug is found without a traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
