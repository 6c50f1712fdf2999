"""Texts to token ids without holding up the event loop.

Owns the two threads that tokenize and decides which text goes where. Does not own the tokenizer. Used by the tokenizer
manager, from its event loop only.
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Protocol

from headrace.errors import CapacityError, ContextLengthError, RequestError

INLINE_CHARACTERS = 1024
"""A lone text up to this length is tokenized in the event loop: it takes less time than waking a thread."""

LONG_CHARACTERS = 16 * 1024
"""A longer text goes to a thread of its own kind, so that short ones do not wait behind it."""

BATCH_CHARACTERS = 1 << 20
"""Texts of a list are tokenized in batches of at most this many characters: the library needs some hundred bytes per token while it works."""

USUAL_CHARACTERS = 8
"""Characters of a token, at most, in nearly all texts: one that has more for every token of the context is counted in pieces first."""


class TextTokenizer(Protocol):
    """What the front end needs of a tokenizer; see `text.tokenizers.Tokenizer`."""

    @property
    def bos_id(self) -> int | None:
        """The token a text begins with, if there is one."""

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        """Token ids of each text."""

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids."""


def refuse_too_long(tokenizer: TextTokenizer, text: str, context_length: int, param: str) -> None:
    """Raises ContextLengthError for a text that is far too long, without tokenizing all of it: in time and memory of the context's length.

    Pieces have other tokens than the whole where they are cut, so only twice as many as fit are surely too many.
    """
    if len(text) <= max(LONG_CHARACTERS, USUAL_CHARACTERS * context_length):
        return
    most = 2 * context_length
    num_tokens = 0
    for at in range(0, len(text), LONG_CHARACTERS):
        num_tokens += len(tokenizer.encode_batch([text[at : at + LONG_CHARACTERS]], False, False)[0])
        if num_tokens > most:
            raise ContextLengthError(param, context_length, f"your messages resulted in more than {most} tokens")


class InputFormat(Enum):
    """What a tokenizer can be given."""

    SINGLE_STRING = auto()
    BATCH_STRINGS = auto()
    CROSS_ENCODER_PAIRS = auto()


def input_format(texts: str | Sequence[str] | Sequence[Sequence[str]]) -> InputFormat:
    """Which of the formats `texts` is: a string, a list of strings, or a list of [query, document] pairs."""
    if isinstance(texts, str):
        return InputFormat.SINGLE_STRING
    if texts and all(isinstance(item, str) for item in texts):
        return InputFormat.BATCH_STRINGS
    if texts and all(not isinstance(item, str) and len(item) == 2 for item in texts):
        return InputFormat.CROSS_ENCODER_PAIRS
    raise RequestError("a prompt is a string, a list of strings, or a list of pairs of strings", "text")


class AsyncDynamicBatchTokenizer:
    """Tokenizes what arrives while a batch is being tokenized as the next batch.

    Long texts have a thread to themselves. Cancelling a waiter does not disturb the others.
    """

    def __init__(self, tokenizer: TextTokenizer, context_length: int) -> None:
        """context_length: in tokens; a text far beyond it is refused without tokenizing all of it."""
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._short = ThreadPoolExecutor(1, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")
        self._queue: list[tuple[str, asyncio.Future[list[int]]]] = []
        self._running: asyncio.Task[None] | None = None

    async def encode(self, texts: str | Sequence[str] | Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of each text, with the special tokens the model begins with. Raises RequestError."""
        match input_format(texts):
            case InputFormat.CROSS_ENCODER_PAIRS:
                raise RequestError("pairs of texts (cross-encoders) are not supported yet", "text")
            case InputFormat.SINGLE_STRING:
                assert isinstance(texts, str)
                return [await self._encode_one(texts)]
            case InputFormat.BATCH_STRINGS:
                batch = [text for text in texts if isinstance(text, str)]
                if len(batch) == 1:
                    return [await self._encode_one(batch[0])]
                long = sum(map(len, batch)) > LONG_CHARACTERS
                return await self._in_thread(self._long if long else self._short, batch)

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word, as it stands within a text."""
        return await asyncio.get_running_loop().run_in_executor(
            self._short, self._tokenizer.encode_batch, words, False, False
        )

    def close(self) -> None:
        """Stop the threads; texts that wait are given up. Idempotent."""
        if self._running is not None:
            self._running.cancel()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def _encode_one(self, text: str) -> list[int]:
        if len(text) > LONG_CHARACTERS:
            return (await self._in_thread(self._long, [text]))[0]
        if len(text) <= INLINE_CHARACTERS and self._running is None:
            return self._encode([text])[0]
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._queue.append((text, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run_batches())
        return await future

    async def _run_batches(self) -> None:
        """Empty the queue, batch after batch."""
        batch: list[tuple[str, asyncio.Future[list[int]]]] = []
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                try:
                    ids = await self._in_thread(self._short, [text for text, _ in batch])
                except Exception as error:
                    # Which of the texts is at fault is not known here: each is tried alone, and each waiter is answered.
                    await self._one_by_one(batch, error)
                    continue
                for (_, future), item in zip(batch, ids, strict=True):
                    if not future.done():
                        future.set_result(item)
        finally:
            self._running = None
            for _, future in batch + self._queue:
                future.cancel()
            self._queue = []

    async def _one_by_one(self, batch: list[tuple[str, "asyncio.Future[list[int]]"]], error: Exception) -> None:
        for text, future in batch:
            if future.done():
                continue
            if len(batch) == 1:
                future.set_exception(error)
                continue
            try:
                future.set_result((await self._in_thread(self._short, [text]))[0])
            except Exception as own_error:
                future.set_exception(own_error)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # A raw prompt is the developer's own text: special tokens written in it are meant, as with transformers and the peers.
        # What users say in a chat goes another way, where they never are (`Tokenizer.encode_rendered`).
        for text in texts:
            refuse_too_long(self._tokenizer, text, self._context_length, "text")
        return [ids for batch in _batches(texts) for ids in self._tokenizer.encode_batch(batch, True, True)]

    async def _in_thread(self, pool: ThreadPoolExecutor, texts: list[str]) -> list[list[int]]:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._encode, texts)
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise CapacityError("the server is stopping") from error
            raise


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, in batches of at most BATCH_CHARACTERS characters; a longer text is a batch of its own."""
    start = num_characters = 0
    for end, text in enumerate(texts):
        if num_characters + len(text) > BATCH_CHARACTERS and end > start:
            yield texts[start:end]
            start, num_characters = end, 0
        num_characters += len(text)
    yield texts[start:]
