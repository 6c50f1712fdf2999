"""Videos in models of Qwen: logits equal transformers', whole and in chunks, beside images and text.

transformers is told the places of tokens, by the rule of the models' authors: those of what comes next begin behind the largest of all before.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_harness import CONTEXT, Driver, int32, make_driver
from vision_harness import IMAGE, VIDEO, VOCAB_SIZE, images, save_seeing

from headrace.messages import media
from headrace.messages.media import MediaItem, MediaSpan
from headrace.messages.requests import PromptContent
from headrace.messages.step import EncodeWork

TOLERANCE = 2e-4
STEP_S = 1.3
PLACES_PER_S = 4
"""transformers' tokens_per_second."""

GRID = (5, 4, 6)
"""More steps than rows or columns of tokens, so that the last place in time is behind the text after it."""


@functools.cache
def checkpoint(family: str) -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), save_seeing(family, Path(folder.name)), folder


@functools.cache
def driver(family: str) -> Driver:
    return make_driver(checkpoint(family)[0], context_length=CONTEXT, max_total_tokens=4 * CONTEXT)


def text(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, VOCAB_SIZE, count).tolist()


def prompt_of(family: str, after: int) -> PromptContent:
    """Text, a video, text, an image, and so many tokens of text. Of Qwen3-VL each step of the video is by itself, after text."""
    size = images(family)[0].values.shape[1]
    values = np.random.default_rng(3).standard_normal((GRID[0], GRID[1] * GRID[2], size)).astype(np.float32)
    video = MediaItem(b"v" * 16, int(np.prod(GRID)) // 4, values.tobytes(), values.shape, "video", GRID, STEP_S)
    still = images(family)[0]
    rows = int(np.prod(still.grid)) // 4
    image = MediaItem(b"i" * 16, rows, still.values.numpy().tobytes(), tuple(still.values.shape), grid=still.grid)
    ids, spans = text(5, 1), []
    per_step = video.num_tokens // GRID[0]
    for step in range(GRID[0]):
        if family == "qwen3_vl":
            ids += text(3, 20 + step)
        if family == "qwen3_vl" or not step:
            length = per_step if family == "qwen3_vl" else video.num_tokens
            spans.append(MediaSpan(len(ids), length, 0, step * per_step))
            ids += [VIDEO] * length
    ids += text(2, 4)
    spans.append(MediaSpan(len(ids), rows, 1))
    ids += [IMAGE] * rows + text(after, 5)
    return PromptContent(int32(ids).tobytes(), media=(video, image), spans=tuple(spans))


def inputs(prompt: PromptContent, family: str) -> dict[str, Any]:
    """What transformers' model takes of it."""
    video, image = (
        torch.from_numpy(np.frombuffer(one.values, np.float32).reshape(one.shape).copy()) for one in prompt.media
    )
    ids = torch.tensor([prompt.ids()])
    given = {
        "pixel_values_videos": video.flatten(0, 1),
        "video_grid_thw": torch.tensor([GRID]),
        "pixel_values": image,
        "image_grid_thw": torch.tensor([prompt.media[1].grid]),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }
    return given | {"position_ids": torch.tensor(places(prompt, family))[:, None]}


def places(prompt: PromptContent, family: str) -> list[list[int]]:
    """In time, height and width of every token."""
    second = {"qwen2_5_vl": PLACES_PER_S * STEP_S}.get(family, 1)
    found: list[tuple[int, int, int]] = []
    spans = {span.start: span for span in prompt.spans}
    while len(found) < prompt.num_tokens:
        first = max((max(place) for place in found), default=-1) + 1
        span = spans.get(len(found))
        if span is None:
            found.append((first, first, first))
            continue
        _, height, width = prompt.media[span.item].grid
        steps = span.length // (height // 2 * width // 2)
        speed = second if prompt.media[span.item].kind == "video" else 1
        found += [
            (first + int(step * speed), first + row, first + column)
            for step in range(steps)
            for row in range(height // 2)
            for column in range(width // 2)
        ]
    return [list(axis) for axis in zip(*found, strict=True)]


def states(made: Driver, prompt: PromptContent, chunk: int) -> torch.Tensor:
    """After the last norm."""
    work = EncodeWork(epoch=made.num_steps + 1, begin=prompt.media, num_slices=100)
    assert not made.encode(work).encode_errors
    new = (made.new(0, prompt.ids(), content=prompt, return_hidden_states=True),)
    parts = []
    for start in range(0, prompt.num_tokens, chunk):
        count = min(chunk, prompt.num_tokens - start)
        result = made.step([(0, count, False)], new)
        parts.append(torch.frombuffer(bytearray(result.hidden_states[0]), dtype=torch.float32).view(count, -1))
        new = ()
    return torch.cat(parts)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_logits_are_those_of_transformers_in_chunks_of_any_size(
    family: str, after: int, monkeypatch: pytest.MonkeyPatch
):
    prompt, model = prompt_of(family, after), checkpoint(family)[1]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt.ids()]), **inputs(prompt, family)).logits[0]

    whole = states(driver(family), prompt, 1000)
    head = model.get_output_embeddings().weight.detach()
    torch.testing.assert_close(whole @ head.T, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for chunk, most in ((1, 20_000), (7, 3000)):
        # The encoder's work is cut between the steps of the video, and within layers.
        monkeypatch.setattr(media, "MAX_BATCH_BYTES", most)
        num_parts = media.num_parts(item.shape for item in prompt.media)
        assert 1 < num_parts <= GRID[0] + 1 if chunk == 1 else num_parts > GRID[0] + 1
        assert torch.equal(states(driver(family), prompt, chunk), whole)
