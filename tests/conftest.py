"""Packed weights of the tests go to a folder of their own, and away with it. Joined models stay where they are.

Without a GPU Triton interprets its kernels. It decides so when it is imported: the variable is set before any test is.
"""

import os
import tempfile
from pathlib import Path

import pytest

from headrace.checkpoint.names import cache_dir

if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def own_weight_cache():
    models = cache_dir() / "models"
    with tempfile.TemporaryDirectory(prefix="headrace-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", folder)
        if models.is_dir():
            Path(folder, "models").symlink_to(models)
        yield
