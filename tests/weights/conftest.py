"""Two sets of weights of one tiny model, which has only the first of its tokenizer's ids."""

import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
for folder in ("e2e", "models", "scheduler"):
    sys.path.insert(0, str(TESTS / folder))

from weights_harness import save  # noqa: E402


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What engines start from."""
    return save(tmp_path_factory.mktemp("weights") / "old", 1, tied=False)


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What they are updated to."""
    return save(tmp_path_factory.mktemp("weights") / "new", 2, tied=False)


@pytest.fixture(scope="session")
def old_tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `old`, with the output projection tied to the embedding."""
    return save(tmp_path_factory.mktemp("weights") / "old-tied", 1, tied=True)


@pytest.fixture(scope="session")
def new_tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As `new`, tied."""
    return save(tmp_path_factory.mktemp("weights") / "new-tied", 2, tied=True)


@pytest.fixture
def copy_of(tmp_path: Path):
    """Makes a copy of a checkpoint that a test may break."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))
