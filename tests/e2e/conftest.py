"""Models and answers that several end-to-end tests share."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent.parent / "grammar"))

import model_harness
import transformers
from safetensors.torch import load_file, save_file
from server_process import ServerProcess, serving

from headrace.cache.tier import DiskTier
from headrace.config.machine import SECRET_VARIABLE
from headrace.config.server_args import ServerArgs
from headrace.disaggregation import wire
from headrace.execution import step_times
from headrace.processes.model_files import open_tokenizer
from headrace.scheduler.rooms import DecodeRooms
from headrace.scheduler.tier_queue import TierQueue
from headrace.text.tokenizers import Tokenizer
from smollm2_tokenizer import smollm2_tokenizer

_open: list[Tokenizer] = []  # engines of this process find that of their model open


@pytest.fixture(scope="module", autouse=True)
def steps_that_take_what_they_usually_take() -> Iterator[None]:
    """How many tokens an engine of this process drafts does not depend on the machine's speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "measured_seconds", lambda *arguments: {})
        yield


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """Of a prefill and a decode engine nobody is taken for dead, and nobody gives up, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, "a secret of this test")
        patch.setattr(wire, "SILENT_S", 120.0)
        patch.setattr(DecodeRooms, "is_over", lambda rooms, one, now_s: False)
        yield


@pytest.fixture
def patient_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for every load of a tier, and come after the hash of the weights, however busy the machine is."""
    start = DiskTier.start

    def open_and_start(tier: DiskTier) -> None:
        assert tier.work()
        assert tier.opens_in_s == 0
        start(tier)

    monkeypatch.setattr(DiskTier, "start", open_and_start)
    monkeypatch.setattr(TierQueue, "is_over", lambda queue, one, now_s: one.loading.load.is_done)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of smollm2, which the tiny model has too."""
    return smollm2_tokenizer()


@pytest.fixture(scope="session")
def smollm2_server() -> Iterator[ServerProcess]:
    """A server of smollm2 for all modules that speak to one. Nobody changes what it is; counters are not zero."""
    options = ("--max-total-tokens", "24576", "--max-stored-responses", "8")
    with serving("smollm2", *options, "--custom-logit-processors", "play=scripted_output:play") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """A folder with a random Llama of two layers and a real tokenizer."""
    return _save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, "llama")


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """The same with a mixture of five experts."""
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    return _save_tiny(tmp_path_factory.mktemp("mixture"), tokenizer, "mixtral", **experts)


@pytest.fixture(scope="session")
def tiny_deep_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """The Llama with five layers."""
    return _save_tiny(tmp_path_factory.mktemp("deep"), tokenizer, "llama", num_layers=5)


@pytest.fixture(scope="session")
def tiny_uneven_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """The Llama with three KV heads and a tied embedding, as smollm2 has: of two ranks one has two of the heads."""
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return _save_tiny(tmp_path_factory.mktemp("uneven"), tokenizer, "llama", **heads)


@pytest.fixture(scope="session")
def tiny_biased_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> str:
    """A Qwen2 of two layers, whose keys have large biases as those of Qwen2.5 have."""
    folder = Path(_save_tiny(tmp_path_factory.mktemp("biased"), tokenizer, "qwen2"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor[::3], tensor[1::3] = 200.0, -70.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _save_tiny(folder: Path, tokenizer: Tokenizer, family: str, *, num_layers: int = 2, **changes: Any) -> str:
    facts = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **changes,
    }
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=tokenizer.vocab_size,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_ids[0],
        pad_token_id=tokenizer.pad_id,
        **facts,
    )
    model_harness.save_tiny(config, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(folder)
    companions = {**tokenizer.named_tokens, "chat_template": tokenizer.chat_template["default"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(companions))
    _open.append(open_tokenizer(ServerArgs(model_path=str(folder))))
    return str(folder)
