"""Decoders that are embedding models, rerankers or classifiers: their vectors and scores are those of transformers, whole or in chunks."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_harness import Texts, open_pooled, pooled_in_chunks, random_texts, reference
from model_harness import BACKENDS
from safetensors.torch import load_file, save_file

from headrace.checkpoint.source import open_checkpoint
from headrace.layers.weight import Weight
from tiny_encoder import KINDS, randomise, tiny_encoder

# float32 on both sides, sums in another order.
TOLERANCE = 2e-5
IDS = random_texts((50,), 60, seed=1).ids[0]

CASES: dict[str, dict[str, Any]] = {
    "qwen3-embedding": {"kind": "qwen3", "pooling": "lasttoken"},
    "llama-mean": {"kind": "llama", "pooling": "mean", "normalize": False},
    "qwen2-without-modules": {"kind": "qwen2", "pooling": None},
    "qwen2-reward": {"kind": "qwen2", "num_labels": 1},
    "llama-classifier": {"kind": "llama", "num_labels": 3, "tie_word_embeddings": True},
}

cases = pytest.mark.parametrize("case", CASES)
backends = pytest.mark.parametrize("backend", BACKENDS)


@functools.cache
def written(case: str) -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), tiny_encoder(Path(folder.name), **CASES[case]), folder


@cases
@backends
def test_vectors_are_those_of_transformers_whole_and_in_chunks(case: str, backend: str):
    folder, theirs, _ = written(case)
    runner, model = open_pooled(folder, backend)

    whole = pooled_in_chunks(runner, model, IDS, [])

    want = reference(theirs, Texts([IDS]), model.pooler.config)[0]
    torch.testing.assert_close(whole, want, atol=TOLERANCE * max(1.0, want.abs().max().item()), rtol=0)
    assert torch.equal(pooled_in_chunks(runner, model, IDS, [16, 1, 20]), whole)


def test_a_checkpoint_with_an_output_projection_is_served_for_its_hidden_states(tmp_path: Path):
    sizes = KINDS["llama"] | {"vocab_size": 70, "tie_word_embeddings": False}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **sizes), dtype=torch.float32
    )
    randomise(theirs)
    theirs.eval().save_pretrained(tmp_path)

    runner, model = open_pooled(tmp_path, BACKENDS[-1], is_embedding=True)

    want = reference(theirs.model, Texts([IDS]), model.pooler.config)[0]
    torch.testing.assert_close(pooled_in_chunks(runner, model, IDS, []), want, atol=TOLERANCE, rtol=0)
    assert "lm_head.weight" in open_checkpoint(tmp_path).tensor_names()
    assert "lm_head.weight" not in [weight.name for weight in model.weights()]


def test_a_reward_head_of_two_layers(tmp_path: Path):
    theirs = tiny_encoder(tmp_path, "qwen2", pooling=None)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    randomise(head, 3)
    trunk = load_file(tmp_path / "model.safetensors")
    tensors = {f"model.{name}": tensor for name, tensor in trunk.items()}
    tensors |= {f"score.{name}": tensor.data for name, tensor in head.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))

    runner, model = open_pooled(tmp_path, BACKENDS[-1])

    with torch.inference_mode():
        want = head(theirs(torch.tensor([IDS])).last_hidden_state[0, -1])
    assert model.pooler.config.activation == "none"
    torch.testing.assert_close(pooled_in_chunks(runner, model, IDS, []), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_without_an_output_projection_the_embedding_is_kept_once(tmp_path: Path, quantization: str):
    tiny_encoder(tmp_path, "qwen3", pooling="lasttoken", tie_word_embeddings=True)

    _, model = open_pooled(tmp_path, BACKENDS[-1], quantization=quantization)

    embedding: Weight = next(weight for weight in model.weights() if weight.name == "model.embed_tokens.weight")
    assert len(embedding.keepers) == 1
    assert embedding.itemsize == 4


@pytest.mark.skipif("cpu" not in BACKENDS, reason="only native kernels run all layers in one call")
@cases
def test_all_layers_in_one_call_give_the_bits_of_the_layers_one_by_one(case: str):
    runner, model = open_pooled(written(case)[0], "cpu")
    by_layer = pooled_in_chunks(runner, model, IDS, [16])

    assert model.fuse(runner.attention) == ""

    assert torch.equal(pooled_in_chunks(runner, model, IDS, [16]), by_layer)
