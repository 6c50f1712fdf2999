"""Rows of an encoder stand in place of the embeddings of a prompt's image tokens, however the work is cut."""

import hashlib

import numpy as np
import pytest
import torch
from device_harness import device_driver
from runner_harness import Driver, make_driver, prompt, save_llama

from headrace.execution.media import Encoded, MediaRows
from headrace.messages.media import MediaItem, MediaSpan
from headrace.messages.requests import PromptContent
from headrace.messages.step import EncodeWork

TOKENS = prompt(30, 3)
FIRST, SECOND = range(4, 11), range(15, 27)


class Lookup:
    """An encoder whose images are token ids, and whose outputs are their embeddings; -1 cannot be encoded."""

    num_slices = 3
    sees_ahead = False
    num_deep = 0

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.batches: list[int] = []

    def slices(self, items):
        self.batches.append(len(items))
        for _ in range(self.num_slices - 1):
            yield
        if any(item.values.min() < 0 for item in items):
            raise ValueError("no such image")
        return [self.table[item.values.long()] for item in items]

    def weights(self):
        yield from ()

    def fuse(self, native=True):
        return ""


def image(ids: list[int]) -> MediaItem:
    values = np.array(ids, np.float32)
    return MediaItem(
        hashlib.blake2b(values.tobytes(), digest_size=16).digest(), len(ids), values.tobytes(), values.shape
    )


def content() -> PromptContent:
    """TOKENS, two parts of which are images: the second in two spans with a token of text between them."""
    ids = np.array(TOKENS, np.int32)
    second = [*SECOND[:5], *SECOND[6:]]
    media = tuple(image([TOKENS[place] for place in places]) for places in (list(FIRST), second))
    spans = (MediaSpan(4, 7, 0), MediaSpan(15, 5, 1), MediaSpan(21, 6, 1, first_row=5))
    for span in spans:
        ids[span.start : span.end] = 0
    return PromptContent(ids.tobytes(), media=media, spans=spans)


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    folder = tmp_path_factory.mktemp("llama")
    model = save_llama(folder)
    made = make_driver(folder)
    made.worker.runner.media = MediaRows(Lookup(model.get_input_embeddings().weight.detach()), torch.device("cpu"))
    return made


def work(driver: Driver, encode: EncodeWork) -> Encoded:
    """What a step for the encoder alone gives."""
    result = driver.encode(encode)
    return Encoded(result.encoded, result.encode_errors, result.encode_s)


@pytest.mark.parametrize("chunks", [(), (1,) * 29, (7, 7, 7), (16,), (5, 20)])
def test_images_are_seen_as_their_embeddings_however_the_prompt_is_cut(driver, chunks):
    want = driver.generate(0, TOKENS, 6)
    prompt_content = content()
    # Each case begins with nothing encoded.
    assert work(driver, EncodeWork(epoch=1 + len(chunks), begin=prompt_content.media, num_slices=2)).keys == ()
    done = work(driver, EncodeWork(epoch=1 + len(chunks), num_slices=1))
    assert done.keys == tuple(item.key for item in prompt_content.media)
    ids = prompt_content.ids()
    assert ids != TOKENS
    assert driver.generate(1, ids, 6, chunks, content=prompt_content) == want


def test_an_image_that_cannot_be_encoded_is_no_fault_of_those_beside_it(driver):
    good, bad = image(TOKENS[4:11]), image([-1, -1])
    assert work(driver, EncodeWork(epoch=50, begin=(good, bad), num_slices=2)) == Encoded(
        seconds=pytest.approx(0, abs=60)
    )
    done = work(driver, EncodeWork(epoch=50, num_slices=1))
    assert done.keys == (good.key,)
    assert list(done.errors) == [bad.key]


def test_what_is_dropped_is_encoded_again(driver):
    first = content().media[0]
    encode = EncodeWork(epoch=60, begin=(first,), num_slices=3)
    assert work(driver, encode).keys == (first.key,)
    assert work(driver, EncodeWork(epoch=60, drop=(first.key,))).keys == ()
    batches = driver.worker.runner.media.encoder.batches
    before = len(batches)
    assert work(driver, encode).keys == (first.key,)
    assert len(batches) == before + 1


@pytest.mark.parametrize("sizes", [(), (1, 4)])
def test_a_device_whose_steps_are_queued_waits_for_those_with_images(tmp_path, sizes):
    model = save_llama(tmp_path)
    queued, runner, _ = device_driver(tmp_path, sizes=sizes)
    runner.runner.media = MediaRows(Lookup(model.get_input_embeddings().weight.detach()), torch.device("cpu"))
    want = queued.generate(0, TOKENS, 6)

    assert len(work(queued, EncodeWork(epoch=1, begin=content().media, num_slices=3)).keys) == 2

    assert queued.generate(1, content().ids(), 6, (7, 7), content=content()) == want
    assert queued.generate(2, TOKENS, 6) == want
