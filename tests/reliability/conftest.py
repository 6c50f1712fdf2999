"""The tiny model and the servers on it. A test that uses `server` is followed by the oracle."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from reliability_harness import Oracle, Server, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Pool:
    """The server with default options, kept for the whole run, and at most one with others."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.servers: dict[tuple[str, ...], Server] = {}

    def get(self, options: tuple[str, ...]) -> Server:
        if options not in self.servers:
            for other in [key for key in self.servers if key]:
                self.servers.pop(other).close()
            self.servers[options] = Server(self.model, options, keys=True)
            self.servers[options].wait_started().warm_up()
        return self.servers[options]

    def discard(self, server: Server) -> None:
        server.close()
        self.servers = {key: value for key, value in self.servers.items() if value is not server}


@pytest.fixture(scope="session")
def pool(tiny_model: Path) -> Iterator[Pool]:
    pool = Pool(tiny_model)
    yield pool
    for server in pool.servers.values():
        server.close()


@pytest.fixture
def oracle(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Oracle]:
    """Asserted when the test has ended, whatever its outcome; a server that fails it is not used again."""
    server = pool.get(getattr(request, "param", ()))
    oracle = Oracle(server)
    yield oracle
    try:
        oracle.check()
    except BaseException:
        pool.discard(server)
        raise


@pytest.fixture
def server(oracle: Oracle) -> Server:
    """A running server, with `oracle` after the test. Parametrize `oracle` (indirect) for other options."""
    return oracle.server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
