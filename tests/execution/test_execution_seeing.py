"""Whole models that see or hear: their logits equal transformers', alone and in a batch, whole and in chunks, and with what is cached."""

import functools
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import CONTEXT, Driver, int32, make_driver
from vision_harness import FAMILIES, IMAGE, VOCAB_SIZE, images, save_seeing

from headrace.messages.media import MediaItem, MediaSpan
from headrace.messages.requests import PromptContent
from headrace.messages.step import EncodeWork
from headrace.models.media import MediaInput

TOLERANCE = 2e-4
SMALL = [family for family in FAMILIES if family != "idefics3 27"]  # whose images take more tokens than the context


def text(count: int, seed: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(10, VOCAB_SIZE, count)
    return ids.tolist()


@functools.cache
def checkpoint(family: str) -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), save_seeing(family, Path(folder.name)), folder


@functools.cache
def driver(family: str) -> Driver:
    return make_driver(checkpoint(family)[0], context_length=CONTEXT, max_total_tokens=4 * CONTEXT)


@functools.cache
def features(family: str) -> list[torch.Tensor]:
    with torch.inference_mode():
        return FAMILIES[family].features(checkpoint(family)[1], images(family))


def item(values: MediaInput, num_tokens: int) -> MediaItem:
    raw = values.values.numpy().tobytes()
    key = hashlib.blake2b(raw, digest_size=16).digest()
    return MediaItem(key, num_tokens, raw, tuple(values.values.shape), grid=values.grid)


def content(family: str, parts: list[int | tuple[int, int]]) -> PromptContent:
    """Pairs are so many tokens of text, from a seed; numbers are images or sounds."""
    ids: list[int] = []
    media: list[MediaItem] = []
    spans: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, tuple):
            ids += text(*part)
            continue
        rows = len(features(family)[part])
        spans.append(MediaSpan(len(ids), rows, len(media)))
        media.append(item(images(family)[part], rows))
        ids += [IMAGE] * rows
    return PromptContent(int32(ids).tobytes(), media=tuple(media), spans=tuple(spans))


def prompts(family: str) -> list[PromptContent]:
    """Two images with text around them, another image at the end, and only text."""
    return [
        content(family, [(6, 1), 0, (4, 2), 1, (7, 3)]),
        content(family, [(3, 4), 2, (1, 5)]),
        content(family, [(20, 6)]),
    ]


def reference(family: str, number: int) -> torch.Tensor:
    """transformers' logits of a prompt, float32[tokens, vocabulary]."""
    model, prompt = checkpoint(family)[1], prompts(family)[number]
    ids = torch.tensor([prompt.ids()])
    given = [np.frombuffer(one.values, np.float32).reshape(one.shape) for one in prompt.media]
    inputs: dict[str, Any] = {}
    if given:
        tensors = [torch.from_numpy(values.copy()) for values in given]
        inputs = FAMILIES[family].inputs(tensors, [one.grid for one in prompt.media])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    if "gemma3" in family:
        inputs["token_type_ids"] = (ids == IMAGE).int()
        inputs.pop("mm_token_type_ids", None)
    if "qwen" not in family or "audio" in family:
        inputs.pop("mm_token_type_ids", None)
    with torch.inference_mode():
        return model(input_ids=ids, **inputs).logits[0]


def hidden_states(made: Driver, numbers: list[int], family: str, chunks: list[int]) -> list[torch.Tensor]:
    """After the last norm, of these prompts in one batch, in chunks of at most these sizes, the last one again and again."""
    asked = [prompts(family)[number] for number in numbers]
    items = {one.key: one for prompt in asked for one in prompt.media}
    work = EncodeWork(epoch=made.num_steps + 1, begin=tuple(items.values()), num_slices=100)
    assert not made.encode(work).encode_errors
    new = tuple(
        made.new(seq, prompt.ids(), content=prompt, return_hidden_states=True) for seq, prompt in enumerate(asked)
    )
    parts: list[list[torch.Tensor]] = [[] for _ in asked]
    for size in [*chunks, *[chunks[-1]] * 200]:
        rows = []
        for seq, prompt in enumerate(asked):
            start = made.computed[seq]
            if (left := prompt.num_tokens - start) > 0:
                rows.append(
                    (seq, whole_images(prompt, start, min(size, left)) if "gemma" in family else min(size, left), False)
                )
        if not rows:
            break
        result = made.step(rows, new)
        new = ()
        counts = {seq: count for seq, count, _ in rows}
        for row, (seq, _, _) in enumerate(rows):
            states = torch.frombuffer(bytearray(result.hidden_states[row]), dtype=torch.float32)
            parts[seq].append(states.view(counts[seq], -1))
    return [torch.cat(part) for part in parts]


def whole_images(prompt: PromptContent, start: int, count: int) -> int:
    """So many tokens that no image is cut."""
    cut = next((span for span in prompt.spans if span.start < start + count < span.end), None)
    return count if cut is None else cut.end - start


@pytest.mark.parametrize("family", SMALL)
def test_logits_are_those_of_transformers(family: str):
    head = checkpoint(family)[1].get_output_embeddings().weight.detach()
    for number in range(3):
        got = hidden_states(driver(family), [number], family, [1000])[0] @ head.T
        torch.testing.assert_close(got, reference(family, number), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", SMALL)
def test_neither_chunks_nor_neighbours_change_a_bit(family: str):
    made = driver(family)
    alone = [hidden_states(made, [number], family, [1000])[0] for number in range(3)]
    for chunks in ([1], [7], [5, 30, 2]):
        for got, want in zip(hidden_states(made, [0, 1, 2], family, chunks), alone, strict=True):
            assert torch.equal(got, want)
