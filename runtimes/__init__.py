"""Run, check and measure a bundle. Imports no torch and no onnx.

session               Session, open_session()
onnxruntime_session   ONNX Runtime
parity                metrics, gates, vacuity
checking              an artifact against the answers in its bundle
layers                which layer diverges first
memory                peak memory of a run, measured in a fresh process
"""

from __future__ import annotations

from pom_edge.runtimes.checking import CheckReport, check_bundle
from pom_edge.runtimes.session import Session, open_session

__all__ = ["CheckReport", "Session", "check_bundle", "open_session"]
