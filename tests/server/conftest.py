"""One server for the tests that need no options of their own."""

from collections.abc import Iterator

import httpx
import pytest
from fake_frontend import Running, running_server


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
