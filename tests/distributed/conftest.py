"""Fixtures of the tests of ranks."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_harness import Nursery, RankProcess

from headrace.distributed import network


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this process are lost sooner when nothing comes, though not as soon as a busy machine may be silent."""
    monkeypatch.setattr(network, "SILENCE_S", 3.0)
    monkeypatch.setattr(network, "_SIGN_OF_LIFE_S", 0.1)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with closing(Nursery()) as made:
        yield made


@pytest.fixture(scope="module")
def others(nursery: Nursery) -> Iterator[list[RankProcess]]:
    """Three processes that play ranks."""
    with nursery.ranks(3) as processes:
        yield processes


@pytest.fixture
def victim(nursery: Nursery) -> Iterator[RankProcess]:
    """A process that plays a rank until the test ends it."""
    with nursery.ranks(1) as [process]:
        yield process
