"""One server for the tests that need no options of their own, and pages of a browser."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import Running, running_server
from web_page import open_browser, open_page


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Running:
    shared_server.frontend.reset()
    return shared_server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """See `open_page`."""
    with open_page(browser) as page:
        yield page
