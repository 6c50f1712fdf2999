"""Tokenizes texts without blocking the event loop.

Owns the threads that tokenize, in which tenants take turns (`headrace.turns`). Does not own the tokenizer. Used by the tokenizer manager, from its
event loop only.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import Context
from typing import Literal, TypeVar

from headrace.errors import ContextLengthError, RequestError
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PromptContent
from headrace.text.tokenizers import Tokenizer
from headrace.turns import Turns, asking

S = TypeVar("S", str, str | tuple[str, str])

INLINE_CHARACTERS = 1024
"""A single text up to this length is tokenized in the event loop: that is faster than waking a thread."""

LONG_CHARACTERS = 16 * 1024
"""Longer texts take turns with other work, and shorter ones are tokenized together, at most so many characters at a time."""

BATCH_CHARACTERS = 1 << 20
"""Texts of a list are tokenized in batches of at most this many characters: the library temporarily needs a few hundred bytes per token."""

CUT_CHARACTERS = 256
"""Of a text that is to be cut, so many characters for each token that is left are looked at; hardly a text has tokens that long."""

USUAL_CHARACTERS = 8
"""Most characters per token in nearly all texts. A text with more per token of the context is first counted in pieces."""


def refuse_too_long(tokenizer: Tokenizer, text: str, context_length: int, param: str) -> None:
    """Raises ContextLengthError for a text that is far too long, without tokenizing all of it: time and memory depend on the context's length.

    The text is tokenized in pieces, which changes tokens at the cuts, so only twice as many tokens as fit are certainly too many.
    """
    if len(text) <= max(LONG_CHARACTERS, USUAL_CHARACTERS * context_length):
        return
    most = 2 * context_length
    num_tokens = 0
    for at in range(0, len(text), LONG_CHARACTERS):
        num_tokens += len(tokenizer.encode_batch([text[at : at + LONG_CHARACTERS]], False, False)[0])
        if num_tokens > most:
            raise ContextLengthError(param, context_length, f"your messages resulted in more than {most} tokens")


class AsyncDynamicBatchTokenizer:
    """Tokenizes in batches: texts that arrive while a batch is being tokenized form the next batches, in each of which tenants take turns.

    Long texts never have both threads. Cancelling a waiter does not disturb the others.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int, cuts: bool = False) -> None:
        """context_length: in tokens; a text far beyond it is refused without tokenizing all of it, or with `cuts` only its beginning is tokenized."""
        self._cuts = cuts
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._turns = Turns(2, "tokenize")
        self._queue: dict[str, deque[_Waiting]] = {}
        self._running: asyncio.Task[None] | None = None

    async def encode(self, texts: str | Sequence[str] | Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of each text, with the special tokens the model begins with. Raises RequestError."""
        if isinstance(texts, str):
            return [await self._encode_one(texts)]
        if texts and all(not isinstance(item, str) and len(item) == 2 for item in texts):
            raise RequestError("pairs of texts are supported for cross-encoders only", "text")
        batch = [text for text in texts if isinstance(text, str)]
        if not batch or len(batch) < len(texts):
            raise RequestError("a prompt is a string, a list of strings, or a list of pairs of strings", "text")
        if len(batch) == 1:
            return [await self._encode_one(batch[0])]
        return await self._encode_in_turn(batch)

    async def encode_whole(
        self, texts: Sequence[str | tuple[str, str]], most_tokens: int | None, side: Literal["right", "left"]
    ) -> list[PromptContent]:
        """What each text or pair of texts contains, with special tokens around it, cut as `Tokenizer.encode_whole` says. Raises RequestError."""
        num_characters = sum(map(_num_characters, texts))
        if num_characters <= INLINE_CHARACTERS:
            return self._encode_whole(texts, most_tokens, side)
        return await self._turns.run(lambda: self._encode_whole(texts, most_tokens, side), num_characters)

    async def encode_words(self, words: Sequence[str], allow_special: bool = False) -> list[list[int]]:
        """Token ids of each word, and nothing around it. allow_special: the texts of special tokens mean these tokens."""
        return await self._turns.run(
            lambda: self._tokenizer.encode_batch(words, False, allow_special), sum(map(len, words))
        )

    def close(self) -> None:
        """Stop the threads; waiting texts are given up. Idempotent."""
        if self._running is not None:
            self._running.cancel()
        self._turns.close()

    async def _encode_one(self, text: str) -> list[int]:
        if len(text) > LONG_CHARACTERS:
            return (await self._encode_in_turn([text]))[0]
        if len(text) <= INLINE_CHARACTERS and self._running is None:
            return self._encode([text])[0]
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._queue.setdefault(asking().tenant, deque()).append((text, future))
        if self._running is None:
            # Batches are nobody's: a context of their own has no tenant.
            self._running = asyncio.get_running_loop().create_task(self._run_batches(), context=Context())
        return await future

    def _next_batch(self) -> "list[_Waiting]":
        """Texts whose waiters are still there, tenants in turn, one text each."""
        batch: list[_Waiting] = []
        num_characters = 0
        while self._queue:
            tenant, own = next(iter(self._queue.items()))
            text, future = own[0]
            if batch and num_characters + len(text) > LONG_CHARACTERS:
                break
            own.popleft()
            if not future.done():
                batch.append((text, future))
                num_characters += len(text)
            del self._queue[tenant]
            if own:
                self._queue[tenant] = own
        return batch

    async def _run_batches(self) -> None:
        batch: list[_Waiting] = []
        try:
            while batch := self._next_batch():
                try:
                    ids = await self._encode_in_turn([text for text, _ in batch], is_small=True)
                except Exception as error:
                    # It is not known which text is at fault, so each is tried alone, and each waiter gets an answer.
                    await self._one_by_one(batch, error)
                    continue
                for (_, future), item in zip(batch, ids, strict=True):
                    if not future.done():
                        future.set_result(item)
        finally:
            self._running = None
            for _, future in (*batch, *(waiting for own in self._queue.values() for waiting in own)):
                future.cancel()
            self._queue = {}

    async def _one_by_one(self, batch: "list[_Waiting]", error: Exception) -> None:
        for text, future in batch:
            if future.done():
                continue
            if len(batch) == 1:
                future.set_exception(error)
                continue
            try:
                future.set_result((await self._encode_in_turn([text], is_small=True))[0])
            except Exception as own_error:
                future.set_exception(own_error)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # A raw prompt is written by the developer, so special tokens in it count, as in transformers and other servers.
        # User messages of a chat take another way, where they never count (`Tokenizer.encode_rendered`).
        if self._cuts:
            most = max(LONG_CHARACTERS, USUAL_CHARACTERS * self._context_length)
            texts = [text[:most] for text in texts]
        for text in texts:
            refuse_too_long(self._tokenizer, text, self._context_length, "text")
        return [ids for batch in _batches(texts) for ids in self._tokenizer.encode_batch(batch, True, True)]

    def _encode_whole(
        self, texts: Sequence[str | tuple[str, str]], most_tokens: int | None, side: Literal["right", "left"]
    ) -> list[PromptContent]:
        contents = []
        for batch in _batches(texts):
            shortened = [self._shortened(text, most_tokens, side) for text in batch]
            for ids, types in self._tokenizer.encode_whole(shortened, most_tokens, side):
                contents.append(PromptContent(pack_int32(ids), token_types=bytes(types) if any(types) else b""))
        return contents

    def _shortened(
        self, text: str | tuple[str, str], most_tokens: int | None, side: Literal["right", "left"]
    ) -> str | tuple[str, str]:
        """A text that is far too long: without the end that will be cut anyway, or refused with a ContextLengthError. Work depends on the context."""
        parts = (text,) if isinstance(text, str) else text
        if most_tokens is None:
            for part in parts:
                refuse_too_long(self._tokenizer, part, self._context_length, "text")
            return text
        most = max(LONG_CHARACTERS, CUT_CHARACTERS * most_tokens)
        if all(len(part) <= most for part in parts):
            return text
        first, *second = (part[:most] if side == "right" else part[-most:] for part in parts)
        return (first, second[0]) if second else first

    async def _encode_in_turn(self, texts: list[str], is_small: bool = False) -> list[list[int]]:
        return await self._turns.run(lambda: self._encode(texts), sum(map(len, texts)), is_small)


_Waiting = tuple[str, "asyncio.Future[list[int]]"]


def _num_characters(text: str | tuple[str, str]) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def _batches(texts: Sequence[S]) -> Iterator[Sequence[S]]:
    """The texts in order, in batches of at most BATCH_CHARACTERS characters; a longer text is a batch of its own."""
    start = num_characters = 0
    for end, text in enumerate(texts):
        length = _num_characters(text)
        if num_characters + length > BATCH_CHARACTERS and end > start:
            yield texts[start:end]
            start, num_characters = end, 0
        num_characters += length
    yield texts[start:]
