"""Texts are tokenized in batches, off the loop, and a bad one harms nobody."""

import asyncio
import threading

import pytest
from frontend_fakes import ByteTokenizer, turns

from headrace.errors import ContextLengthError, RequestError
from headrace.text.batch_tokenizer import (
    BATCH_CHARACTERS,
    INLINE_CHARACTERS,
    LONG_CHARACTERS,
    AsyncDynamicBatchTokenizer,
)
from headrace.turns import work_for

CONTEXT = 1 << 20


class HeldTokenizer(ByteTokenizer):
    """Waits in its thread until released."""

    def __init__(self):
        super().__init__()
        self.released.clear()
        self.started = threading.Event()
        self.threads = []

    def encode_batch(self, texts, add_special_tokens=True, allow_special=False):
        self.threads.append(threading.current_thread())
        self.started.set()
        result = super().encode_batch(texts, add_special_tokens, allow_special)
        if any("bad" in text for text in texts):
            raise RequestError("bad text")
        return result


@pytest.fixture
def held():
    tokenizer = HeldTokenizer()
    batcher = AsyncDynamicBatchTokenizer(tokenizer, CONTEXT)
    yield tokenizer, batcher
    tokenizer.released.set()
    batcher.close()


def medium(name):
    return name * (INLINE_CHARACTERS // len(name) + 1)


async def test_formats():
    batcher = AsyncDynamicBatchTokenizer(ByteTokenizer(), CONTEXT)

    assert await batcher.encode("a") == await batcher.encode(["a"]) == [[97]]
    assert await batcher.encode(["a", "b"]) == [[97], [98]]
    with pytest.raises(RequestError, match="pairs of texts are supported for cross-encoders only"):
        await batcher.encode([["query", "document"]])
    for other in ([], [["a", "b", "c"]], ["a", ["b", "c"]]):
        with pytest.raises(RequestError, match="a prompt is a string, a list of strings"):
            await batcher.encode(other)
    batcher.close()


async def test_what_arrives_while_a_batch_runs_is_the_next_batch(held):
    tokenizer, batcher = held
    texts = [medium(name) for name in "abcd"]
    first = asyncio.create_task(batcher.encode(texts[0]))
    await turns()
    rest = [asyncio.create_task(batcher.encode(text)) for text in texts[1:]]
    await turns()
    tokenizer.released.set()

    results = [await task for task in (first, *rest)]

    assert results == [[list(text.encode())] for text in texts]
    assert tokenizer.batches == [[texts[0]], texts[1:]]


async def test_short_texts_do_not_wait_behind_a_long_one(held):
    tokenizer, batcher = held
    long = asyncio.create_task(batcher.encode("x" * (LONG_CHARACTERS + 1)))
    assert await asyncio.to_thread(tokenizer.started.wait, 20)
    assert tokenizer.threads[0] is not threading.current_thread()
    tokenizer.released.set()

    assert await batcher.encode("short") == [list(b"short")]
    await long


async def test_the_texts_of_one_do_not_keep_those_of_another_from_the_next_batch(held):
    tokenizer, batcher = held

    async def encode(tenant, text):
        work_for(tenant)
        return await batcher.encode(text)

    first = asyncio.create_task(encode("a", medium("first")))
    await turns()
    many = [asyncio.create_task(encode("a", "x" * (LONG_CHARACTERS // 4))) for _ in range(20)]
    other = asyncio.create_task(encode("b", "Hi"))
    await turns()
    tokenizer.released.set()
    await asyncio.gather(first, other, *many)

    assert "Hi" in tokenizer.batches[1]
    assert [len(batch) for batch in tokenizer.batches] == [1, 4, 4, 4, 4, 4, 1]


async def test_a_bad_text_fails_its_own_waiter_only(held):
    tokenizer, batcher = held
    first = asyncio.create_task(batcher.encode(medium("a")))
    await turns()
    bad, good = (asyncio.create_task(batcher.encode(medium(name))) for name in ("bad", "good"))
    await turns()
    tokenizer.released.set()

    await first
    with pytest.raises(RequestError, match="bad text"):
        await bad
    assert await good == [list(medium("good").encode())]


async def test_a_cancelled_waiter_does_not_disturb_the_others(held):
    tokenizer, batcher = held
    first = asyncio.create_task(batcher.encode(medium("a")))
    await turns()
    given_up, other = (asyncio.create_task(batcher.encode(medium(name))) for name in "bc")
    await turns()
    given_up.cancel()
    tokenizer.released.set()

    await first
    assert await other == [list(medium("c").encode())]


async def test_an_unexpected_error_reaches_every_waiter(held):
    tokenizer, batcher = held

    def broken(texts, *_):
        assert tokenizer.released.wait(20)
        raise ValueError("broken")

    tokenizer.encode_batch = broken
    tasks = [asyncio.create_task(batcher.encode(medium(name))) for name in "abc"]
    await turns()
    tokenizer.released.set()

    for task in tasks:
        with pytest.raises(ValueError, match="broken"):
            await task


@pytest.mark.parametrize("as_list", [False, True])
async def test_a_text_far_beyond_the_context_is_refused_without_tokenizing_all_of_it(as_list):
    tokenizer, context = ByteTokenizer(), 3 * LONG_CHARACTERS
    batcher = AsyncDynamicBatchTokenizer(tokenizer, context)
    text = "a" * (100 * context)

    with pytest.raises(ContextLengthError, match=f"more than {2 * context} tokens"):
        await batcher.encode([text, "b"] if as_list else text)

    assert sum(len(each) for texts in tokenizer.batches for each in texts) <= 2 * context + LONG_CHARACTERS
    batcher.close()


async def test_a_long_text_with_few_tokens_is_tokenized_whole():
    class Spaces(ByteTokenizer):
        """A run of spaces is one token."""

        def encode_batch(self, texts, add_special_tokens=True, allow_special=False):
            return super().encode_batch([" " if text.isspace() else text for text in texts])

    batcher = AsyncDynamicBatchTokenizer(Spaces(), 64)

    assert await batcher.encode(" " * (20 * LONG_CHARACTERS)) == [[32]]
    batcher.close()


async def test_a_list_is_tokenized_a_bounded_part_at_a_time():
    tokenizer = ByteTokenizer()
    batcher = AsyncDynamicBatchTokenizer(tokenizer, CONTEXT)
    texts = [
        "abc" * 1000,
        "d" * BATCH_CHARACTERS,
        "e",
        "f" * (BATCH_CHARACTERS // 2),
        "g" * (BATCH_CHARACTERS // 2),
        "h",
    ]

    assert [len(ids) for ids in await batcher.encode(texts)] == list(map(len, texts))
    assert [sum(map(len, batch)) for batch in tokenizer.batches] == [
        3000, BATCH_CHARACTERS, 1 + BATCH_CHARACTERS // 2, 1 + BATCH_CHARACTERS // 2
    ]  # fmt: skip
    batcher.close()
