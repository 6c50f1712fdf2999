"""Encoders and embedding models, run over packed texts without the runner, and what transformers makes of the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from model_harness import CPU, MAX_POSITIONS, Runner

from headrace.attention.cpu import CpuAttention
from headrace.attention.select import make_backend
from headrace.checkpoint.pooling import PoolingConfig, read_pooling
from headrace.checkpoint.source import open_checkpoint
from headrace.execution.load_weights import load_model
from headrace.layers.weight import Placement
from headrace.models.registry import encoder_class_for, pooled_class_for
from headrace.models.spec import EncoderModel, PooledCausalLM, kv_shape


@dataclass
class Texts:
    """Token ids, and token types, of some texts."""

    ids: list[list[int]]
    types: list[list[int]] | None = None

    def only(self, index: int) -> "Texts":
        """One of them."""
        return Texts([self.ids[index]], None if self.types is None else [self.types[index]])


def open_encoder(
    folder: Path, dtype: torch.dtype = torch.float32, quantization: Any = "none"
) -> tuple[EncoderModel, PoolingConfig]:
    """Load the checkpoint in `folder`."""
    checkpoint = open_checkpoint(folder)
    pooling = read_pooling(folder, checkpoint.config, False)
    assert pooling is not None
    placement = Placement(CPU, dtype, checkpoint.config.max_position_embeddings, quantization)
    return load_model(checkpoint, encoder_class_for(checkpoint.config, pooling), placement), pooling


@torch.inference_mode()
def pooled(model: EncoderModel, texts: Texts) -> torch.Tensor:
    """float32[num_texts, dimensions], the texts in one step."""
    starts = [0, *accumulate(map(len, texts.ids))]
    ids = torch.tensor([token for text in texts.ids for token in text])
    positions = torch.tensor([at for text in texts.ids for at in range(len(text))], dtype=torch.int32)
    types = None
    if texts.types is not None:
        types = torch.tensor([kind for text in texts.types for kind in text], dtype=torch.int32)
    hidden = model.forward(ids, positions, types, torch.tensor(starts, dtype=torch.int32), CpuAttention())
    return model.pooler(hidden, starts)


@torch.inference_mode()
def reference(model: Any, texts: Texts, pooling: PoolingConfig, dense: torch.nn.Module | None = None) -> torch.Tensor:
    """The same by transformers, text by text. dense: what follows pooling."""
    rows = []
    for index, ids in enumerate(texts.ids):
        given = {"input_ids": torch.tensor([ids])}
        if texts.types is not None:
            given["token_type_ids"] = torch.tensor([texts.types[index]])
        output = model(**given)
        if pooling.task == "classify":
            rows.append(output.logits[0])
            continue
        hidden = output.last_hidden_state[0]
        row = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[pooling.pooling]
        row = row if dense is None else dense(row)
        rows.append(torch.nn.functional.normalize(row, dim=0) if pooling.normalize else row)
    return torch.stack(rows)


def random_texts(lengths: Sequence[int], vocab_size: int, seed: int = 0, num_types: int = 0) -> Texts:
    """Texts of these lengths, without the ids of special tokens; with token types, the second part of each is of type 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    if num_types < 2:
        return Texts(ids)
    return Texts(ids, [[int(at > length // 2) for at in range(length)] for length in lengths])


def open_pooled(
    folder: Path,
    backend: str,
    is_embedding: bool = False,
    quantization: Any = "none",
    dtype: torch.dtype = torch.float32,
) -> tuple[Runner, PooledCausalLM]:
    """Load the decoder in `folder` as a model that pools, with room for four sequences."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    pooling = read_pooling(folder, config, is_embedding)
    assert pooling is not None
    placement = Placement(CPU, dtype, config.max_position_embeddings, quantization)
    model = load_model(checkpoint, pooled_class_for(config, pooling), placement)
    attention = make_backend(backend)
    pages_each = MAX_POSITIONS // 16
    pool = attention.make_kv_pool(kv_shape(config, torch.float32), 4 * pages_each * 16, 16, CPU)
    return Runner(model, attention, pool, pages_each), model


@torch.inference_mode()
def pooled_in_chunks(runner: Runner, model: PooledCausalLM, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """float32[dimensions] of one text, computed in chunks of these sizes (the last as large as it must be)."""
    parts, start = [], 0
    for size in [*sizes, len(ids)]:
        part = ids[start : start + size]
        if part:
            parts.append(runner.hidden([(0, start, part)]))
            start += len(part)
    hidden = torch.cat(parts)
    return model.pooler(hidden, [0, len(hidden)])[0]
