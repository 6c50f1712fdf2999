"""`truncation: auto`: a conversation that is too long loses its oldest messages.

Owns which messages go. Rendering and tokenizing run in a thread; the rest in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.errors import ContextLengthError
from headrace.server.chat.conversation import Conversation, Message
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import Asker, ServingContext


async def fitting(
    context: ServingContext, conversation: Conversation, max_output_tokens: int | None, asker: Asker
) -> Conversation:
    """The conversation without as many of its oldest messages as is needed to leave room for the output.

    The room is `max_output_tokens`, or an eighth of the context if it is not limited, and at most half of it. The system message at the
    beginning and the last message stay; if these alone do not fit, the conversation is returned with no others.
    """
    length = context.model.context_length
    most = length - min(max_output_tokens or length // 8, length // 2)

    async def fits(shorter: Conversation) -> bool:
        try:
            prompt = await context.in_text_thread(lambda: chat_prompt(context, shorter))
        except ContextLengthError:
            return False
        return len(await prompt.ids_with_media(context, asker)) <= most

    if await fits(conversation):
        return conversation
    # The fewest dropped messages that are enough: between `too_few`, which are not, and `enough`.
    too_few, enough = 0, max(0, _num_droppable(conversation.messages))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if await fits(_without(conversation, middle)):
            enough = middle
        else:
            too_few = middle
    return _without(conversation, enough)


def _num_kept_first(messages: Sequence[Message]) -> int:
    return 1 if messages[0]["role"] == "system" else 0


def _num_droppable(messages: Sequence[Message]) -> int:
    return len(messages) - _num_kept_first(messages) - 1


def _without(conversation: Conversation, count: int) -> Conversation:
    """Without the `count` oldest messages after the system message, and without results whose calls are gone."""
    messages = conversation.messages
    first = _num_kept_first(messages)
    rest = list(messages[first + count :])
    while count and len(rest) > 1 and rest[0]["role"] == "tool":
        rest.pop(0)
    return replace(conversation, messages=[*messages[:first], *rest])
