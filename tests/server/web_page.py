"""A browser for the tests of the web pages, and what is the same in all of them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000


@contextmanager
def open_browser() -> Iterator[Any]:
    """Debian's chromium; the test is skipped where it or playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    if CHROMIUM is None:
        pytest.skip("the browser tests need chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        sync_api.expect.set_options(timeout=WAIT_MS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Any) -> Iterator[Any]:
    """A page of a browser that has seen nothing. What it logs as an error fails the test, unless the test takes it from `page.errors`."""
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    errors = list(page.errors)
    context.close()
    assert errors == []


def check_accessible(page: Any) -> None:
    """axe finds nothing serious in the page as it is now; the test is skipped where axe is missing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = axe.run(page)
    bad = [
        (violation["id"], [node["html"][:200] for node in violation["nodes"]])
        for violation in found.response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert bad == []
    assert len(found.response["passes"]) > 10, "it looked"
