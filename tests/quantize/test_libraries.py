"""torchao talks on import; users of ours do not hear it."""

from __future__ import annotations

import subprocess
import sys


def test_importing_everything_is_silent() -> None:
    code = "import pom_edge.quantize as q; [getattr(q, name) for name in q.__all__]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_package_alone_does_not_import_torchao() -> None:
    code = "import sys, pom_edge.quantize; assert 'torchao' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
