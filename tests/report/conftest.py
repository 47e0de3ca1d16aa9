"""Pages in a real browser, at the size of a phone and of a window, light and dark."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import find_browser

SIZES = {"phone": (360, 740), "window": (1280, 900)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, by tests/install_browser.sh."""
    path = find_browser()
    if path is None:
        reason = "NO BROWSER: nothing opened the report; sh tests/install_browser.sh says how to get one"
        warnings.warn(reason, stacklevel=1)  # pytest lists warnings at its end, where a skip is a letter
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        chromium = tools.chromium.launch(executable_path=path)
        yield chromium
        chromium.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")], ids="-".join)
def view(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """An empty page of that size and scheme; whatever it complains of or asks for ends the test."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    noticed: list[str] = []
    page.on("console", lambda message: noticed.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: noticed.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (noticed.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda asked: noticed.append(f"request: {asked.url}") if asked.resource_type != "document" else None)
    yield page
    context.close()
    assert noticed == []
