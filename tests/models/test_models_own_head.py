"""A config that ties the output projection to the embedding, and a file with one of its own: the file's is used, as transformers does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_harness import _BASE, BACKENDS, open_runner, random_tokens, save_tiny
from safetensors.torch import load_file, save_file

from headrace.checkpoint.source import open_checkpoint

PROMPT = random_tokens(20, seed=1)
# float32 on both sides, sums in another order.
TOLERANCE = 2e-4

TIED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 21},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    # run by transformers' code, with embeddings of other names
    "gpt2": {"num_attention_heads": 3, "n_positions": 160},
    "gpt_neox": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "opt": {"num_attention_heads": 3, "ffn_dim": 80, "word_embed_proj_dim": 48},
}


def save_tied(folder: Path, family: str, **changes: Any) -> None:
    """A random tied model."""
    config = {**copy.deepcopy(_BASE), "tie_word_embeddings": True, **TIED[family], **changes}
    if family in ("gpt2", "opt"):  # their heads are hidden_size / num_attention_heads, and each has its keys
        del config["head_dim"], config["num_key_value_heads"]
    save_tiny(transformers.AutoConfig.for_model(family, **config), folder)


def add_head(folder: Path, change: Any) -> dict[str, torch.Tensor]:
    """Write a head into the file that is `change` of the embedding; returns the file's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    heads = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith(heads))
    tensors["lm_head.weight"] = change(embedding.clone())
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def shifted(embedding: torch.Tensor) -> torch.Tensor:
    return embedding.flip(0) * 1.5


@pytest.mark.parametrize("family", TIED)
def test_the_logits_are_those_of_the_head_in_the_file(family: str, tmp_path: Path):
    save_tied(tmp_path, family)
    add_head(tmp_path, shifted)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]

    runner = open_runner(tmp_path, BACKENDS[-1])

    torch.testing.assert_close(runner.chunks(0, PROMPT, [7]), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "change, is_tied",
    [
        (torch.clone, True),
        (lambda embedding: embedding.double(), True),
        (shifted, False),
        # One value in the last row differs; and a copy that was rounded is no copy.
        (lambda embedding: embedding.index_fill_(0, torch.tensor([198]), 0.5), False),
        (lambda embedding: embedding.bfloat16(), False),
    ],
)
def test_a_copy_of_the_embedding_is_not_kept_twice(change: Any, is_tied: bool, tmp_path: Path):
    save_tied(tmp_path, "llama")
    tensors = add_head(tmp_path, change)
    checkpoint = open_checkpoint(tmp_path)

    names = {weight.name for weight in open_runner(tmp_path, BACKENDS[-1]).model.weights()}

    assert checkpoint.config.tie_word_embeddings == is_tied
    assert checkpoint.config.as_file()["tie_word_embeddings"] == is_tied
    assert bool(checkpoint.notes) != is_tied
    assert names == tensors.keys() - ({"lm_head.weight"} if is_tied else set())


def test_the_heads_of_layers_that_predict_further_tokens_are_not_the_models(tmp_path: Path):
    save_tied(tmp_path, "llama")
    tensors = add_head(tmp_path, shifted)
    further = {name: tensors[name].clone() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    further = {f"model.layers.9.{name.split('.')[-2]}.weight": tensor for name, tensor in further.items()}
    save_file(tensors | further, tmp_path / "model.safetensors")
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings

    del tensors["lm_head.weight"]
    copy_of_table = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for without in (tensors | further, tensors | further | copy_of_table):
        save_file(without, tmp_path / "model.safetensors")
        assert open_checkpoint(tmp_path).config.tie_word_embeddings


def test_a_quantised_head_of_a_tied_model_is_its_own(tmp_path: Path):
    save_tied(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"lm_head.qweight": torch.zeros(6, 199, dtype=torch.int32)}
    save_file(tensors, file)

    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
