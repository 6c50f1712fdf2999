"""A scripted front end of embedding models, rerankers and classifiers, and servers around it.

What it makes of an input can be told from the input: see `vector_of`. Checks and shapes are those of the real one.
"""

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fake_frontend import FakeFrontend, Running, byte_tokenizer, running_server

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import CapacityError, ContextLengthError, RequestError
from headrace.frontend.sample_update import SampleTimes, SampleUpdate, SampleUsage
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EmbeddingReqInput
from headrace.text.tokenizers import Tokenizer

EMBEDDING = PoolingConfig(task="embed", pooling="mean", dimensions=4, normalize=True, matryoshka=True)
CROSS_ENCODER = PoolingConfig(
    task="classify", pooling="cls", dimensions=1, labels=("LABEL_0",), activation="sigmoid", is_pair=True
)
CLASSIFIER = PoolingConfig(
    task="classify", pooling="cls", dimensions=3, labels=("bad", "fair", "good"), activation="softmax"
)
REWARD = PoolingConfig(task="classify", pooling="last", dimensions=1, labels=("LABEL_0",))
MAX_TOKENS = 96
"""Of an input; each character is a token, and there are two special ones."""


def vector_of(first: str, second: str, dimensions: int) -> list[float]:
    """Length, vowels, spaces and a one, as many as there are dimensions. Of a pair: how many of its query's words the document has, less a half."""
    if second:
        words = first.split()
        return [sum(word in second.split() for word in words) - 0.5] * dimensions
    numbers = [len(first), sum(char in "aeiou" for char in first), first.count(" "), 1.0]
    return [float(number) for number in numbers[:dimensions]]


class PoolingFrontend(FakeFrontend):
    """Answers as the TokenizerManager of such a model does.

    room: inputs that fit in the queue; a call with more is refused. sizes: of the calls that were accepted. most_in_flight: calls at a time.
    fails: the finish reason of an input, by its text.
    """

    def __init__(self, pooling: PoolingConfig) -> None:
        self.pooling = pooling
        super().__init__(context_length=512)

    def reset(self) -> None:
        super().reset()
        self.encoded: list[EmbeddingReqInput] = []
        self.room = 10_000
        self.refusals = 0
        self.sizes: list[int] = []
        self.num_in_flight = self.most_in_flight = 0
        self.fails: dict[str, FinishReason] = {}
        self.before_answer: Callable[[EmbeddingReqInput], Any] = lambda obj: asyncio.sleep(0)

    async def encode_request(self, obj: EmbeddingReqInput, *, caller: Any = None) -> AsyncGenerator[SampleUpdate, None]:
        inputs, is_list = self._inputs(obj)
        if len(inputs) > self.room:
            self.refusals += 1
            raise CapacityError("the queue is full", retry_after_s=0.01)
        self.encoded.append(obj)
        self.callers.append(caller)
        self.room -= len(inputs)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        finished = False
        try:
            updates = [self._result(obj, index, one, is_list) for index, one in enumerate(inputs)]
            self.started.set()
            await self.before_answer(obj)
            failed = [update for update in updates if update.pooled is None]
            if len(failed) == len(updates):
                raise RequestError(failed[0].finish.message, "text")
            self.sizes.append(len(inputs))
            finished = True
        finally:
            self.num_in_flight -= 1
            self.room += len(inputs)
            if not finished:
                self.closed_early.set()
        for update in updates:
            yield update

    def _inputs(self, obj: EmbeddingReqInput) -> tuple[list[tuple[str, str]], bool]:
        """(text, second text or empty) of each input."""
        assert (obj.text is None) != (obj.input_ids is None)
        if obj.input_ids is not None:
            is_list = isinstance(obj.input_ids[0], list)
            rows: Any = obj.input_ids if is_list else [obj.input_ids]
            for ids in rows:
                if not ids or not all(0 <= token < self.tokenizer.vocab_size for token in ids):
                    raise RequestError("input_ids: an id is not in the vocabulary", "input_ids")
            return [(self.tokenizer.decode(ids, False), "") for ids in rows], is_list
        if isinstance(obj.text, str):
            return [(obj.text, "")], False
        assert obj.text is not None
        if obj.is_cross_encoder_request and all(isinstance(item, str) for item in obj.text):
            return [tuple(obj.text)], False  # type: ignore[list-item]
        return [(item, "") if isinstance(item, str) else (item[0], item[1]) for item in obj.text], True

    def _result(self, obj: EmbeddingReqInput, index: int, given: tuple[str, str], is_list: bool) -> SampleUpdate:
        text, second = given
        num_special = 0 if obj.input_ids is not None else 3 if second else 2
        num_tokens = len(text) + len(second) + num_special
        most = obj.truncate_prompt_tokens
        if most is not None:
            kept = min(num_tokens, MAX_TOKENS if most == -1 else most)
            cut = num_tokens - kept
            if cut and second:
                second = second[:-cut]
            elif cut:
                text = text[:-cut] if obj.truncation_side == "right" else text[cut:]
            num_tokens = kept
        if num_tokens > MAX_TOKENS:
            place = f"input {index}" if is_list else "the input"
            raise ContextLengthError("text", MAX_TOKENS, f"{place} has {num_tokens} tokens", "input")
        size = self.pooling.dimensions
        if obj.dimensions is not None and not 1 <= obj.dimensions <= size:
            raise RequestError(f"dimensions must be between 1 and {size}, got {obj.dimensions}", "dimensions")
        values = vector_of(text, second, obj.dimensions or size)
        finish = self.fails.get(text)
        return SampleUpdate(
            rid=obj.rid[index] if isinstance(obj.rid, list) else f"{obj.rid}/{index}" if is_list else str(obj.rid),
            index=index,
            is_listed=is_list,
            text="",
            ids=[],
            finish=finish or FinishReason("length", length=0),
            usage=SampleUsage(num_tokens, 0, 0),
            times=SampleTimes(0.25, None, 0.5),
            weight_version="default",
            num_retractions=0,
            pooled=None if finish is not None else struct.pack(f"<{len(values)}f", *values),
        )


QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What the template of Qwen3 makes of a system message and a user's."""


class JudgeFrontend(FakeFrontend):
    """A model that generates, in whose vocabulary yes and no are tokens."""

    def __init__(self) -> None:
        super().__init__(context_length=600)
        backend = byte_tokenizer("<|im_start|>", "<|im_end|>")._backend
        backend.add_tokens(["yes", "no"])
        self.tokenizer = Tokenizer(backend)


@contextmanager
def judge_server(**options: Any) -> Iterator[Running]:
    """A real server of such a model."""
    with running_server(frontend=JudgeFrontend(), **({"template": QWEN3} | options)) as server:
        yield server


@contextmanager
def pooling_server(pooling: PoolingConfig, **options: Any) -> Iterator[Running]:
    """A real server of such a model."""
    with running_server(frontend=PoolingFrontend(pooling), pooling=pooling, template=None, **options) as server:
        yield server
