"""Fixtures of the tests of ranks."""

import pytest

from headrace.distributed import network


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this process are lost sooner when nothing comes, though not as soon as a busy machine may be silent."""
    monkeypatch.setattr(network, "SILENCE_S", 3.0)
    monkeypatch.setattr(network, "_SIGN_OF_LIFE_S", 0.1)
