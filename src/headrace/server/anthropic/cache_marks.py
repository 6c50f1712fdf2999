"""Marks of `cache_control` as pins of the prompt (--anthropic-cache-control pin).

Where a mark lies in the prompt is found by rendering the request up to there: both prompts begin with the same tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from headrace.errors import RequestError
from headrace.frontend.pins import PinAsk
from headrace.messages.bodies import is_empty
from headrace.server.anthropic.protocol import InputMessage, MessagesRequest
from headrace.server.anthropic.request import conversation_of
from headrace.server.chat.conversation import refused
from headrace.server.chat.prompt import ChatPrompt, chat_prompt
from headrace.server.context import Asker, ServingContext

MOST_MARKS = 4


async def pins_of(
    context: ServingContext, asker: Asker, request: MessagesRequest, prompt: ChatPrompt
) -> tuple[PinAsk, ...]:
    """What the marks of a request ask to keep. prompt: the request's. Raises RequestError for a mark that is none and media that cannot be read."""
    found = await context.in_text_thread(lambda: _ends(context, request, prompt.ids))
    return tuple(
        [
            PinAsk(ttl_s, await prompt.num_tokens(context, asker, end) if prompt.media else end, is_hint=True)
            for end, ttl_s in found.items()
        ]
    )


def _ends(context: ServingContext, request: MessagesRequest, ids: Sequence[int]) -> dict[int, float]:
    """With how many ids of its prompt a marked part of a request ends, and for how many seconds it shall be kept."""
    marks = list(_marks(request))
    if len(marks) > MOST_MARKS:
        raise refused("cache_control", f"marks {len(marks)} blocks; at most {MOST_MARKS} may be marked")
    found: dict[int, float] = {}
    for part, ttl_s in marks:
        if end := len(ids) if part is request else _common(context, part, ids):
            found[end] = max(ttl_s, found.get(end, 0.0))
    return found


def _marks(request: MessagesRequest) -> Iterator[tuple[MessagesRequest, float]]:
    """The request up to each mark, and the seconds that it names."""
    other = [InputMessage(role="user", content="-")]
    times = [_ttl_s(f"tools[{number}]", tool.cache_control) for number, tool in enumerate(request.tools or ())]
    if any(times):
        yield msgspec.structs.replace(request, system=None, messages=other), max(times)
    system = request.system if isinstance(request.system, list) else []
    for number, block in enumerate(system):
        if ttl_s := _ttl_s(f"system[{number}]", block.cache_control):
            yield msgspec.structs.replace(request, system=system[: number + 1], messages=other), ttl_s
    for number, message in enumerate(request.messages):
        blocks = message.content if isinstance(message.content, list) else []
        for place, given in enumerate(blocks):
            if ttl_s := _ttl_s(f"messages[{number}].content[{place}]", given.get("cache_control")):
                cut = msgspec.structs.replace(message, content=blocks[: place + 1])
                is_last = number == len(request.messages) - 1 and place == len(blocks) - 1
                part = msgspec.structs.replace(request, messages=[*request.messages[:number], cut])
                yield request if is_last else part, ttl_s
    if ttl_s := _ttl_s("", request.cache_control):
        yield request, ttl_s


def _ttl_s(where: str, mark: object) -> float:
    """0.0 = there is none."""
    match mark:
        case {"type": "ephemeral", **others} if others in ({}, {"ttl": None}, {"ttl": "5m"}):
            return 300.0
        case {"type": "ephemeral", "ttl": "1h", **others} if not others:
            return 3600.0
        case _ if is_empty(mark):
            return 0.0
    name = f"{where}.cache_control" if where else "cache_control"
    raise refused(name, 'must be {"type": "ephemeral"}, with ttl "5m" or "1h"')


def _common(context: ServingContext, part: MessagesRequest, ids: Sequence[int]) -> int:
    """With how many tokens both prompts begin; 0 if the part is no conversation by itself."""
    try:
        conversation, _ = conversation_of(part, context.model.context_length)
        theirs = chat_prompt(context, conversation).ids
    except RequestError:
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, theirs, strict=False)))
