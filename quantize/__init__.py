"""Float -> INT8.

(filled by the modules of this folder)
"""

from __future__ import annotations

__all__: list[str] = []
