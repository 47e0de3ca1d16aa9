"""pom-edge: trained PoM models in, verified artifacts for edge runtimes out.

Importing this package imports neither torch nor onnx: every name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pom_edge.attention import PolynomialMixer as PolynomialMixer
    from pom_edge.attention import replace_attention as replace_attention
    from pom_edge.checkpoint import load as load
    from pom_edge.checkpoint import save_checkpoint as save_checkpoint
    from pom_edge.errors import PomError as PomError
    from pom_edge.mixer import PoM as PoM
    from pom_edge.mixer import PoMState as PoMState
    from pom_edge.mixer import coefficient_penalty as coefficient_penalty
    from pom_edge.models import ModelConfig as ModelConfig
    from pom_edge.models import build_model as build_model
    from pom_edge.pipeline import export_bundle as export_bundle
    from pom_edge.runtimes import open_session as open_session

__version__ = "0.1.0"

# A checkout without its links (Windows, a zip) has pom_edge.export and its siblings beside this folder.
if not (Path(__path__[0]) / "runtimes").is_dir() and (Path(__path__[0]).parent / "runtimes" / "session.py").is_file():
    __path__.append(str(Path(__path__[0]).parent))

_HOME = {
    "ModelConfig": "pom_edge.models",
    "PoM": "pom_edge.mixer",
    "PoMState": "pom_edge.mixer",
    "PolynomialMixer": "pom_edge.attention",
    "PomError": "pom_edge.errors",
    "build_model": "pom_edge.models",
    "coefficient_penalty": "pom_edge.mixer",
    "export_bundle": "pom_edge.pipeline",
    "load": "pom_edge.checkpoint",
    "open_session": "pom_edge.runtimes",
    "replace_attention": "pom_edge.attention",
    "save_checkpoint": "pom_edge.checkpoint",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pom_edge' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOME[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from pom_edge.errors import MissingExtraError

        raise MissingExtraError(
            f"pom_edge.{name} needs torch, which is not installed. Run: pip install 'pom-edge[export]'"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
