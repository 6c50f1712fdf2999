"""Two sets of weights of one tiny model, which has only the first of its tokenizer's ids."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
for folder in ("e2e", "models", "scheduler"):
    sys.path.insert(0, str(TESTS / folder))

import model_harness  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from headrace.checkpoint.names import resolve_model  # noqa: E402
from headrace.text.tokenizers import load_tokenizer  # noqa: E402


def save(folder: Path, seed: int, tied: bool, family: str = "llama", **changes: Any) -> str:
    """A random model of two layers with the tokenizer of smollm2."""
    folder.mkdir()
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_ids[0],
        pad_token_id=tokenizer.pad_id,
        **changes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    model_harness.randomise(model, seed)
    model.eval().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    return str(folder)


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
