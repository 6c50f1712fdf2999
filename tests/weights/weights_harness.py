"""What the tests of this room share: engines, tensors, answers."""

from pathlib import Path
from typing import Any

import model_harness
import torch
import transformers
from engines import running_engine
from safetensors.torch import load_file

from headrace.api.engine import Engine
from smollm2_tokenizer import smollm2_tokenizer

PROMPTS = [[1, 5, 9, 1000, 77], list(range(20, 60)), [333, 4, 8]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}


def engine_of(model: str, **options: Any):
    """A small engine of one process."""
    return running_engine(model, **{"num_threads": 1, "max_total_tokens": 2048, "dtype": "float32", **options})


def tokens(engine: Engine) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    return [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def fresh(model: str, **options: Any) -> list[list[int]]:
    """Greedy tokens of an engine that starts from `model`."""
    with engine_of(model, **options) as engine:
        return tokens(engine)


def tensors_of(folder: str | Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint."""
    return load_file(Path(folder) / "model.safetensors")


def save(folder: Path, seed: int, tied: bool, family: str = "llama", **changes: Any) -> str:
    """A random model of two layers with the tokenizer of smollm2."""
    folder.mkdir()
    tokenizer = smollm2_tokenizer()
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
