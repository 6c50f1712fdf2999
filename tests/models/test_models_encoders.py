"""Encoders: their vectors and logits are those of transformers, and a text's bits depend on nothing but the text."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_harness import Texts, open_encoder, pooled, random_texts, reference
from model_harness import CPU
from safetensors.torch import load_file, save_file

from headrace.attention.cpu import CpuAttention
from headrace.checkpoint.families import all_families
from headrace.checkpoint.pooling import read_pooling
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.execution.load_weights import load_model
from headrace.execution.weight_files import open_cache
from headrace.kernels.cpu import why_not as why_not_native
from headrace.layers.weight import Placement
from headrace.models.registry import encoder_class_for, model_class_for
from tiny_encoder import dense_of, tiny_encoder

# float32 on both sides, sums in another order.
TOLERANCE = 2e-6
LENGTHS = (1, 17, 2, 60, 33)

CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert-cls": {"pooling": "cls", "normalize": False},
    "roberta": {"kind": "roberta"},
    "xlm-roberta": {"kind": "xlm-roberta", "pooling": "cls"},
    "camembert": {"kind": "camembert"},
    "distilbert": {"kind": "distilbert"},
    "modernbert": {"kind": "modernbert"},
    "modernbert-biases": {
        "kind": "modernbert",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_activation": "silu",
    },
    "bert-tanh": {"hidden_act": "gelu_new"},
    "bert-relu": {"hidden_act": "relu", "type_vocab_size": 1},
    "dense": {"dense": 24},
    "cross-encoder": {"num_labels": 1},
    "xlm-roberta-cross-encoder": {"kind": "xlm-roberta", "num_labels": 1},
    "roberta-classifier": {"kind": "roberta", "num_labels": 3},
    "distilbert-classifier": {"kind": "distilbert", "num_labels": 3},
    "modernbert-classifier": {"kind": "modernbert", "num_labels": 3},
    "modernbert-mean-classifier": {
        "kind": "modernbert",
        "num_labels": 3,
        "classifier_pooling": "mean",
        "classifier_bias": True,
    },
}

cases = pytest.mark.parametrize("case", CASES)


@functools.cache
def written(case: str) -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    """A checkpoint and the transformers model that it is of."""
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), tiny_encoder(Path(folder.name), **CASES[case]), folder


@functools.cache
def opened(case: str) -> Any:
    return open_encoder(written(case)[0])


@functools.cache
def texts(case: str) -> Texts:
    config = written(case)[1].config
    return random_texts(LENGTHS, config.vocab_size, num_types=getattr(config, "type_vocab_size", 0))


def test_every_encoder_has_a_tiny_model():
    assert set(all_families().encoders) == {changes.get("kind", "bert") for changes in CASES.values()}


def test_an_encoder_is_not_taken_for_a_model_that_generates():
    config = open_checkpoint(written("bert")[0]).config

    with pytest.raises(ModelError, match="bert is an encoder, which does not generate"):
        model_class_for(config)


@cases
def test_vectors_are_those_of_transformers(case: str):
    model, pooling = opened(case)

    want = reference(written(case)[1], texts(case), pooling, dense_of(written(case)[0]))

    torch.testing.assert_close(pooled(model, texts(case)), want, atol=TOLERANCE, rtol=0)


@cases
def test_a_text_has_the_same_bits_alone_and_in_a_batch(case: str):
    model, _ = opened(case)

    batch = pooled(model, texts(case))

    for index in range(len(LENGTHS)):
        assert torch.equal(pooled(model, texts(case).only(index))[0], batch[index]), LENGTHS[index]


@cases
def test_all_layers_in_one_call_give_the_bits_of_the_layers_one_by_one(case: str):
    model, _ = opened(case)
    by_layer = pooled(model, texts(case))
    fused, _ = open_encoder(written(case)[0])

    assert fused.fuse(CpuAttention()) == why_not_native()

    assert torch.equal(pooled(fused, texts(case)), by_layer)


# Of the cosine with float32, at most: a bfloat16 mantissa has 8 bits, int16 rounds activations to 14, and int8 both sides to 8.
COSINE_LOSS: dict[str, float] = {"none": 5e-5, "int16": 2e-5, "int8": 5e-4}


@pytest.mark.parametrize("quantization", COSINE_LOSS)
@pytest.mark.parametrize("case", ["bert", "modernbert", "xlm-roberta", "dense"])
def test_fewer_bits_turn_vectors_little_and_keep_the_promises(case: str, quantization: str):
    folder, theirs, _ = written(case)
    model, pooling = open_encoder(folder, torch.bfloat16, quantization)

    by_layer = pooled(model, texts(case))

    want = reference(theirs, texts(case), pooling, dense_of(folder))
    cosine = torch.nn.functional.cosine_similarity(by_layer, want, dim=1)
    assert cosine.min() > 1 - COSINE_LOSS[quantization]
    assert torch.equal(pooled(model, texts(case).only(1))[0], by_layer[1])
    assert model.fuse(CpuAttention()) == why_not_native()
    assert torch.equal(pooled(model, texts(case)), by_layer)


@cases
def test_weights_can_be_read_back_under_the_names_of_the_base_model(case: str):
    folder, theirs, _ = written(case)
    stored = dict(open_checkpoint(folder).iter_tensors())
    prefix = "model." if case.startswith("modernbert") else f"{theirs.base_model_prefix}."
    stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}

    read = {weight.name: weight.read() for weight in opened(case)[0].weights()}

    # BERT's own pooler is of use to its classifiers only.
    assert {name for name in stored.keys() - read.keys() if "pooler" not in name} == set()
    for name, tensor in read.items():
        assert torch.equal(tensor.float(), stored[name].float()), name


def test_a_model_with_one_token_type_ignores_those_of_a_tokenizer():
    model, _ = opened("xlm-roberta-cross-encoder")
    pairs = Texts(texts("xlm-roberta-cross-encoder").ids, [[1] * length for length in LENGTHS])

    assert torch.equal(pooled(model, pairs), pooled(model, Texts(pairs.ids)))


def test_old_names_and_the_head_of_a_masked_language_model(tmp_path: Path):
    theirs = tiny_encoder(tmp_path, pooling=None)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            name = name.replace(new, old)
        tensors[f"bert.{name}"] = tensor
    tensors["bert.embeddings.position_ids"] = torch.arange(96)[None]
    tensors["cls.predictions.bias"] = torch.zeros(70)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    model, pooling = open_encoder(tmp_path)

    got = pooled(model, texts("bert"))
    torch.testing.assert_close(got, reference(theirs, texts("bert"), pooling), atol=TOLERANCE, rtol=0)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path):
    tiny_encoder(tmp_path, dense=24)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.layer.0.attention.self.rotary"] = tensors.pop("encoder.layer.1.output.dense.bias")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        ModelError, match=r"1 missing: encoder\.layer\.1\.output\.dense\.bias; .*0\.attention\.self\.rotary"
    ):
        open_encoder(tmp_path)


def test_dense_weights_that_are_pickled_are_not_read(tmp_path: Path):
    tiny_encoder(tmp_path, dense=24)
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"2_Dense contains no model\.safetensors"):
        open_encoder(tmp_path)


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path):
    tiny_encoder(tmp_path, hidden_act="silu")

    with pytest.raises(ModelError, match="activation 'silu' is not supported; known: gelu, gelu_new"):
        open_encoder(tmp_path)


@pytest.mark.skipif(bool(why_not_native()), reason="packed weights are the native kernels'")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_second_start_reads_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str):
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    tiny_encoder(tmp_path / "model", dense=24)
    checkpoint = open_checkpoint(tmp_path / "model")
    placement = Placement(CPU, torch.bfloat16, 96, quantization)
    pooling = read_pooling(tmp_path / "model", checkpoint.config, False)
    assert pooling is not None
    outcomes, vectors = [], []
    for _ in range(2):
        spec = encoder_class_for(checkpoint.config, pooling)
        cache = open_cache(checkpoint, spec.name, placement)
        assert cache is not None
        model = load_model(checkpoint, spec, placement, cache=cache)
        vectors.append(pooled(model, texts("bert")))
        outcomes.append(cache.outcome)
        if cache.needs_writing:
            cache.write(model.weights())

    assert outcomes[0] == "no file yet"
    assert "read in" in outcomes[1]
    assert torch.equal(*vectors)
