"""One request with up to thousands of inputs, as calls of the front end with a chunk of the inputs each.

Two chunks are in flight at a time: the engine has work while the next chunk is prepared, the requests of others come between, and the memory in
the queue does not grow with the request. Each chunk is a call of its own, so it needs room in the queue; one that finds none is halved, and
waits. Runs in the event loop that serves HTTP.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from headrace.errors import CapacityError, ContextLengthError, RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import CallInput, EmbeddingReqInput
from headrace.server.context import Asker, ServingContext
from headrace.server.pooling.protocol import pooling_of, renamed

MAX_NUMBERS = 1 << 24
"""Most numbers in a reply: 64 MiB of float32."""

CHUNK_INPUTS = 128
CHUNK_SIZE = 1 << 14
"""A chunk has at most so many inputs, and ends with the one that reaches so many characters: a few steps, for which others may have to wait."""

ID_SIZE = 4
"""A token id counts as so many characters, the average of English text."""

CHUNKS_IN_FLIGHT = 2

PATIENCE_S = 60.0
"""How long a chunk waits for room in the queue, once an earlier one has found it."""

_NUMBERED = re.compile(r"\binput (\d+)\b")
_PER_INPUT = ("text", "input_ids", "rid", "extra_key", "cache_salt", "lora_path")

MakeCall = Callable[[int, int], Awaitable[CallInput]]
"""The call for the inputs `start` .. `stop` - 1."""


def check_num_inputs(context: ServingContext, param: str, count: int) -> None:
    """Raises RequestError for none and for too many."""
    if not count:
        raise RequestError(f"{param} is empty", param)
    if count > context.args.max_inputs:
        raise RequestError(
            f"{param}: at most {context.args.max_inputs} inputs in one request (--max-inputs), got {count}", param
        )


def check_num_numbers(context: ServingContext, call: EmbeddingReqInput, param: str | None = None) -> None:
    """Raises RequestError when the reply would hold too many numbers. param: what the client calls the inputs; None = as we do."""
    pooling = pooling_of(context.model)
    dimensions = max(1, min(call.dimensions or pooling.dimensions, pooling.dimensions))
    param = param or ("text" if call.text is not None else "input_ids")
    count = len(embedding_sizes(context, call))
    if count * dimensions > MAX_NUMBERS:
        most = MAX_NUMBERS // dimensions
        message = f"{param}: {count} vectors of {dimensions} numbers are too many for one reply; at most {most}"
        raise RequestError(message, param)


async def answered(asker: Asker, sizes: Sequence[int], make: MakeCall, partial: bool = False) -> list[SampleUpdate]:
    """The results of all inputs in order.

    sizes: characters of each input, see `ID_SIZE`. partial: inputs may fail; else the first failure is raised. Raises the errors of the front end, in
    which inputs are numbered as in the request; a refusal because the queue is full if the first input finds no room, or a later one none for
    PATIENCE_S. Being cancelled aborts what is in flight.
    """
    asker.forget_body()
    tasks: deque[asyncio.Task[list[SampleUpdate]]] = deque()
    results: list[SampleUpdate] = []

    async def take() -> None:
        chunk = await tasks.popleft()
        for update in chunk if not partial else ():
            update.raise_failure()
            if update.pooled is None and update.finish is not None and update.finish.type == "abort":
                raise RequestError("the request was aborted")
        results.extend(chunk)

    try:
        for start, stop in _bounds(sizes, _most_at_once(asker.context)):
            tasks.append(asyncio.create_task(_answer(asker, make, start, stop, 0.0 if start == 0 else PATIENCE_S)))
            if len(tasks) == CHUNKS_IN_FLIGHT:
                await take()
        while tasks:
            await take()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return results


async def results_of(asker: Asker, call: EmbeddingReqInput, partial: bool = False) -> list[SampleUpdate]:
    """The results of all inputs of a call, see `answered`."""
    call = _of_bounded_length(asker.context, call)
    return await answered(asker, embedding_sizes(asker.context, call), slices_of(call), partial)


async def embedded(asker: Asker, param: str, call: EmbeddingReqInput) -> list[SampleUpdate]:
    """The results of all inputs of texts, as vectors. param: what the client calls them, also in the errors, which are those of `answered`."""
    try:
        asker.context.check_tokenizer(param)
        check_num_numbers(asker.context, call, param)
        return await results_of(asker, call)
    except RequestError as error:
        raise renamed(error, param) from None


def _most_at_once(context: ServingContext) -> int:
    """Most inputs of a chunk: the front end refuses a call that an idle server could not queue, and both chunks shall fit."""
    args = context.args
    queued = context.model.ready.max_running_requests * args.num_replicas + args.max_queued_requests
    return max(1, min(CHUNK_INPUTS, args.max_batch_prompts, queued // CHUNKS_IN_FLIGHT))


def _bounds(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    start = size = 0
    for index, one in enumerate(sizes):
        size += one
        if index + 1 - start >= most or size >= CHUNK_SIZE or index + 1 == len(sizes):
            yield start, index + 1
            start, size = index + 1, 0


async def _answer(asker: Asker, make: MakeCall, start: int, stop: int, patience_s: float) -> list[SampleUpdate]:
    """The results of these inputs. patience_s: how long a single input waits for room. Raises the errors of the front end."""
    waited_s = 0.0
    while True:
        try:
            return await _answer_once(asker, make, start, stop)
        except CapacityError as error:
            if stop - start > 1:
                break
            pause_s = max(0.05, error.retry_after_s)
            if waited_s + pause_s > patience_s or asker.context.status.draining:
                raise
            waited_s += pause_s
            await asyncio.sleep(pause_s)
    middle = (start + stop) // 2
    # What has been computed is not thrown away: from here on the rest waits.
    first = await _answer(asker, make, start, middle, patience_s)
    return first + await _answer(asker, make, middle, stop, PATIENCE_S)


async def _answer_once(asker: Asker, make: MakeCall, start: int, stop: int) -> list[SampleUpdate]:
    frontend = asker.context.frontend
    try:
        call = await make(start, stop)
        if isinstance(call, EmbeddingReqInput):
            updates = frontend.encode_request(call, caller=asker.caller)
        else:
            updates = frontend.generate_request(call, caller=asker.caller)
        async with aclosing(updates):
            return [update async for update in updates]
    except RequestError as error:
        error.message = _NUMBERED.sub(lambda found: f"input {int(found[1]) + start}", error.message)
        raise


def _inputs(call: EmbeddingReqInput) -> tuple[str, list[Any], bool]:
    """The field of the inputs, these, and whether the call has a list of them: a list of ids is one input, and so is a pair."""
    if call.text is not None:
        is_pair = call.is_cross_encoder_request and all(isinstance(item, str) for item in call.text)
        is_list = isinstance(call.text, list) and not is_pair
        return "text", list(call.text) if is_list else [call.text], is_list
    is_list = not call.input_ids or isinstance(call.input_ids[0], list)
    return "input_ids", list(call.input_ids or ()) if is_list else [call.input_ids], is_list


def embedding_sizes(context: ServingContext, call: EmbeddingReqInput) -> list[int]:
    """The characters of each input of a call. Raises RequestError for lists of other lengths beside them."""
    name, inputs, is_list = _inputs(call)
    if is_list:
        check_num_inputs(context, name, len(inputs))
        for field in _PER_INPUT[2:]:
            value = getattr(call, field)
            if isinstance(value, list) and len(value) != len(inputs):
                counts = f"the number of items ({len(value)}) must equal the number of inputs ({len(inputs)})"
                raise RequestError(f"{field}: {counts}", field)
    return [_size(item) for item in inputs]


def _of_bounded_length(context: ServingContext, call: EmbeddingReqInput) -> EmbeddingReqInput:
    """The call with texts of at most `max_text_chars` characters, more than fit in the context: if it lets them be cut. Raises RequestError if not.

    So no text is tokenized only to be refused, or for its first part alone.
    """
    most = context.max_text_chars
    if call.text is None or max(embedding_sizes(context, call)) <= most:
        return call

    def bounded(text: str | list[str], place: int | None) -> Any:
        if isinstance(text, list):
            return [bounded(part, place) for part in text]
        if len(text) <= most:
            return text
        if call.truncate_prompt_tokens is None:
            shown = "the input" if place is None else f"input {place}"
            asked = f"{shown} has {len(text)} characters, and that many tokens hold at most {most}"
            raise ContextLengthError("text", context.model.context_length, asked, "input")
        return text[:most] if call.truncation_side == "right" else text[-most:]

    _, texts, is_list = _inputs(call)
    texts = [bounded(text, place if is_list else None) for place, text in enumerate(texts)]
    return msgspec.structs.replace(call, text=texts if is_list else texts[0])


def _size(item: str | int | list[Any]) -> int:
    """Characters of a text or of a pair of texts; for ids as many as they may stand for."""
    if isinstance(item, int):
        return ID_SIZE
    return (
        sum(len(part) if isinstance(part, str) else ID_SIZE for part in item) if isinstance(item, list) else len(item)
    )


def slices_of(call: EmbeddingReqInput) -> MakeCall:
    """Makes the calls for a part of the inputs of a call."""
    count = len(_inputs(call)[1])

    async def part(start: int, stop: int) -> CallInput:
        if stop - start == count:
            return call
        values = {name: getattr(call, name) for name in _PER_INPUT}
        if isinstance(call.rid, str):
            values["rid"] = [f"{call.rid}/{index}" for index in range(count)]
        parts: dict[str, Any] = {name: value[start:stop] for name, value in values.items() if isinstance(value, list)}
        return msgspec.structs.replace(call, **parts)

    return part
