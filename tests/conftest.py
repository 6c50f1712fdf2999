"""Packed weights of the tests go to a folder of their own, and away with it. Joined models stay where they are.

Without a GPU Triton interprets its kernels. It decides so when it is imported: the variable is set before any test is. So is that of
torch's threads, which would otherwise spin between two operations: test processes share the cores with each other and with servers.

Each run has an order of its own: no verdict may depend on what ran before.
"""

import atexit
import functools
import gc
import hashlib
import logging
import os
import random
import ssl
import tempfile
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from headrace.checkpoint.names import cache_dir
from headrace.child_pool import pool

if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No verdict depends on how fast the machine is. In CI the examples are the same every time; elsewhere each run looks for new ones.
settings.register_profile(
    "headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("headrace")
pool.PATIENCE = 100  # a child that loops is ended by the processor time that it has taken, however little it gets

SEED = "HEADRACE_TEST_SEED"
"""Environment variable with the seed of the order, which repeats an order. The processes of one run have it from the first."""
START_PROCESSES = {"attacks", "e2e", "reliability", "weights"}
"""Folders with the tests that take longest."""
SERVERS = ("smollm2_server", "pool")
"""Fixtures that start a server for the whole run of a test process: the modules that use the same stay together."""


# As with examples: in CI the same every time, elsewhere each run looks for new ones.
def pytest_configure():
    in_ci = os.environ.get("CI") == "true"
    os.environ.setdefault(SEED, "7620" if in_ci else str(random.randrange(1_000_000)))


def pytest_report_header():
    return f"order of the tests: {SEED}={os.environ[SEED]}"


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat the order: {SEED}={os.environ[SEED]}")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the collector of garbage, which would look through all modules and tests again and again: they stay, a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules want to see their objects deleted
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # pytest then keeps tests together that share a parameter of a fixture
def pytest_collection_modifyitems(items):
    """In the order of what the seed makes of their names, modules whole and those of one server together: the same with fewer tests.

    Each test process gets an equal part of the list and, at its end, takes from the ends of others' parts. So every part begins
    with modules that start servers: nobody waits at the end for a long one.
    """
    num_parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))

    def place(name):
        return hashlib.sha256(f"{os.environ[SEED]} {name}".encode()).digest()

    def module_of(item):
        return item.nodeid.partition("::")[0]

    used = {(module_of(item), name) for item in items for name in getattr(item, "fixturenames", ())}

    def key(item):
        module = module_of(item)
        of_group = place(next((name for name in SERVERS if (module, name) in used), module))
        starts_none = Path(module).parent.name not in START_PROCESSES
        return of_group[0] % num_parts, starts_none, of_group, place(module), place(item.nodeid)

    items.sort(key=key)


@pytest.fixture(scope="session", autouse=True)
def own_weight_cache():
    models = cache_dir() / "models"
    with tempfile.TemporaryDirectory(prefix="headrace-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", folder)
        if models.is_dir():
            Path(folder, "models").symlink_to(models)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_that_are_read_once():
    """Clients of httpx share what they trust: each would read the certificates of the world anew, for 20 ms, and no test speaks to it."""
    read = ssl.create_default_context
    of_the_world = os.environ.get("SSL_CERT_FILE") or certifi.where()
    once = functools.cache(lambda: read(cafile=of_the_world))

    def context(*purpose, **trusted):
        return once() if not purpose and trusted == {"cafile": of_the_world} else read(*purpose, **trusted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(autouse=True)
def logger_that_reaches_root():
    """An engine of a test before may have set the logger up for good; `caplog` would then hear some of its records twice, and others not."""
    logging.getLogger("headrace").propagate = True
