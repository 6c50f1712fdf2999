"""The order of the tests is another in each run, and can be repeated."""

import random
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

NAMES = [f"tests/room/test_{module}.py::test_{name:02}" for module in "abcdef" for name in range(20)]


@pytest.fixture
def in_order(monkeypatch):
    """`in_order(seed, names, used)`: these tests as a run with this seed has them. used: fixtures of a test that uses some."""
    spec = spec_from_file_location("conftest_of_all", Path(__file__).resolve().parents[1] / "conftest.py")
    conftest = module_from_spec(spec)
    spec.loader.exec_module(conftest)

    def run(seed, names, used=None):
        monkeypatch.setenv(conftest.SEED, seed)
        items = [SimpleNamespace(nodeid=name, fixturenames=(used or {}).get(name, ())) for name in names]
        conftest.pytest_collection_modifyitems(items)
        return [item.nodeid for item in items]

    return run


def test_modules_and_the_tests_in_them_are_mixed_and_modules_stay_whole(in_order):
    mixed = in_order("1", NAMES)

    assert sorted(mixed) == sorted(NAMES)
    modules = {module: list(tests) for module, tests in groupby(mixed, lambda name: name.partition("::")[0])}
    assert len(modules) == 6
    assert list(modules) != sorted(modules)
    assert all(tests != sorted(tests) for tests in modules.values())


def test_a_seed_gives_the_same_order_also_of_fewer_tests(in_order):
    some = random.Random(0).sample(NAMES, 40)

    assert in_order("1", some) == [name for name in in_order("1", NAMES) if name in some]
    assert in_order("1", NAMES) != in_order("2", NAMES)


def test_the_modules_of_one_server_stay_together(in_order):
    used = {name: ("client", "pool") for name in NAMES if name.startswith(("tests/room/test_a", "tests/room/test_d"))}
    modules = [module for module, _ in groupby(in_order("1", NAMES, used), lambda name: name[len("tests/room/test_")])]

    assert sorted(modules) == list("abcdef")
    assert abs(modules.index("a") - modules.index("d")) == 1
