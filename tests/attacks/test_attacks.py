"""The short form of each attack on a server: what it does to others, or to itself, is bounded."""

import pytest
from killed_children import attack


@pytest.mark.slow
def test_killed_children_are_not_the_fault_of_clients():
    report = attack(6, twice_every=2)
    assert report["wrong"] == []
    assert report["answered as the client's fault"] == 0
    assert min(report["killed at work"].values()) >= 3
    for answers in report["answers"].values():
        assert answers["200"] > 0
        assert answers["200 when sent again"] > 0
