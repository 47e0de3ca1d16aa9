"""A real headless browser, where there is one."""

from __future__ import annotations

import shutil
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


def find_browser() -> str | None:
    """What tests/install_browser.sh brought, or ``playwright install chromium``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        own = tools.chromium.executable_path
    return next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
