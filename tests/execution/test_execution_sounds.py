"""Prompts with sounds, in steps: the greedy text of a whole model equals that of transformers, however the prompt is cut."""

import functools
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import CONTEXT, Driver, int32, make_driver, prompt
from vision_harness import FAMILIES, IMAGE, MELS, save_seeing, sound

from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaItem, MediaSpan
from headrace.messages.requests import PromptContent
from headrace.messages.step import EncodeWork, StepResult

FAMILY = "qwen2_audio"
FRAMES = (38, 120)
COUNT = 6


@functools.cache
def checkpoint() -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), save_seeing(FAMILY, Path(folder.name)), folder


@pytest.fixture(scope="module")
def driver() -> Driver:
    """With pages of one token, so that a cached prefix can end anywhere."""
    return make_driver(checkpoint()[0], context_length=CONTEXT, max_total_tokens=4 * CONTEXT, page_size=1)


@functools.cache
def content() -> PromptContent:
    """Text, a sound, text, the longest sound, text."""
    ids: list[int] = []
    media: list[MediaItem] = []
    spans: list[MediaSpan] = []
    for number, num_frames in enumerate(FRAMES):
        given = sound(num_frames, seed=number)
        num_rows = given.grid[0] // 2
        raw = given.values.numpy().tobytes()
        key = hashlib.blake2b(raw, digest_size=16).digest()
        ids += [10 + number, 20 + number]
        spans.append(MediaSpan(len(ids), num_rows, number))
        media.append(MediaItem(key, num_rows, raw, tuple(given.values.shape), kind=MediaKind.AUDIO, grid=given.grid))
        ids += [IMAGE] * num_rows
    ids += [30, 31, 32]
    return PromptContent(int32(ids).tobytes(), media=tuple(media), spans=tuple(spans))


@functools.cache
def reference() -> list[int]:
    """What transformers writes."""
    model = checkpoint()[1]
    values = [torch.frombuffer(bytearray(item.values), dtype=torch.float32).view(-1, MELS) for item in content().media]
    inputs = FAMILIES[FAMILY].inputs(values, [item.grid for item in content().media])
    ids = content().ids()
    with torch.inference_mode():
        for _ in range(COUNT):
            ids.append(int(model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1].argmax()))
    return ids[-COUNT:]


def encode(driver: Driver, epoch: int) -> StepResult:
    """All sounds of the prompt. epoch: another than the last one's forgets what is known."""
    items = content().media
    return driver.encode(EncodeWork(epoch=epoch, begin=items, num_slices=100))


@pytest.mark.parametrize("chunks", [(), (1,) * 45, (7,) * 6, (5, 30)])
def test_the_text_is_that_of_transformers_however_the_prompt_is_cut(driver: Driver, chunks: tuple[int, ...]):
    assert len(encode(driver, 100 + len(chunks)).encoded) == 2
    # With what is encoded already, the second time.
    for seq in (0, 1):
        assert driver.generate(seq, content().ids(), COUNT, chunks, content=content()) == reference()


@pytest.mark.parametrize("num_cached", [3, 16, 40])
def test_a_prefix_that_is_cached_may_end_within_a_sound(driver: Driver, num_cached: int):
    encode(driver, 200 + num_cached)
    driver.generate(0, content().ids(), 1, content=content())
    slots = int32(range(num_cached))  # of sequence 0

    got = driver.generate(1, content().ids(), COUNT, content=content(), prefix_slots=slots)

    assert got == reference()


def test_a_prompt_with_sounds_and_one_without_share_their_steps(driver: Driver):
    text = prompt(30, 3)
    alone = driver.generate(0, text, COUNT)
    encode(driver, 300)
    new = (driver.new(1, content().ids(), content=content()), driver.new(2, text))

    found: dict[int, list[int]] = {1: [], 2: []}
    left = {1: content().num_tokens, 2: len(text)}
    while len(found[1]) < COUNT or len(found[2]) < COUNT:
        rows = []
        for seq, more in left.items():
            if len(found[seq]) < COUNT:
                count = min(9, more) if more else 1
                left[seq] -= min(count, more)
                rows.append((seq, count, not left[seq]))
        result = driver.step(rows, new)
        new = ()
        sampling = [seq for seq, _, samples in rows if samples]
        for seq, token in zip(sampling, result.ids.tolist(), strict=True):
            found[seq].append(token)

    assert found == {1: reference(), 2: alone}


def test_a_sound_that_cannot_be_encoded_is_called_a_sound(driver: Driver):
    good = content().media[0]
    bad = MediaItem(bytes(16), 9, good.values, good.shape, kind=MediaKind.AUDIO, grid=(200, 1, 1))
    result = driver.encode(EncodeWork(epoch=400, begin=(good, bad), num_slices=100))

    assert result.encoded == (good.key,)
    assert result.encode_errors == {
        bad.key: "one audio clip of the request could not be encoded; the server's log has the cause"
    }
