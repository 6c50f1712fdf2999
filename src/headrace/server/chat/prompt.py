"""Renders and tokenizes a conversation. Owns how messages, their media and tools are given to the model's chat template, also to one that knows no
tools, or takes text only. Plain computation, in a thread.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from headrace.errors import RequestError
from headrace.media_kinds import NO_REFS, MediaKind, MediaRefs
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import (
    ROLES,
    Conversation,
    Message,
    Tool,
    calls_of,
    is_unasked,
    unsupported,
    with_arguments_as_text,
)
from headrace.server.chat.parts import media_kind, text_part
from headrace.server.context import Asker, ServingContext
from headrace.text.batch_tokenizer import refuse_too_long
from headrace.text.chat_templates import RESERVED_KWARGS, ChatTemplate
from headrace.text.template_sandbox import TemplateStoppedError
from headrace.text.tokenizers import RenderedPrompt, Segment

_PRIVATE_USE = range(0x100000, 0x10FFFE)

TAIL_CHARS = 64
"""Characters of a prompt's end that say whether its reasoning is open."""

_THINKING = ("enable_thinking", "thinking")
"""Names under which templates are told whether to think."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """ids: of the rendered conversation. text: what was rendered. marks: of the ids, those that mean something to the model's output format.
    media: an item for each of its media tokens."""

    ids: list[int]
    text: str
    marks: tuple[int, ...] = ()
    media: MediaRefs = NO_REFS

    @property
    def tail(self) -> str:
        return self.text[-TAIL_CHARS:]

    async def ids_with_media(self, context: ServingContext, asker: Asker) -> list[int]:
        """The tokens that the model reads: those of media in place of their tokens. asker: whose media they are. Raises RequestError."""
        if not self.media:
            return self.ids
        try:
            return await context.frontend.ids_with_media(list(self.ids), self.media, asker.caller)
        except RequestError as error:
            raise media_renamed(error) from None

    async def num_tokens(self, context: ServingContext, asker: Asker, end: int) -> int:
        """How many tokens the model reads of the first `end` ids. Raises as `ids_with_media` does."""
        ids = self.ids[:end]
        tokens = {
            kind: context.model.tokenizer.token_to_id(text) for kind, text in context.model.media_support.tokens.items()
        }
        counts = {kind: sum(id_ == token for id_ in ids) for kind, token in tokens.items()}
        media = MediaRefs.by_kind(ref for kind, count in counts.items() for ref in self.media.of(kind)[:count])
        return len(await replace(self, ids=ids, media=media).ids_with_media(context, asker))


def chat_prompt(context: ServingContext, conversation: Conversation) -> ChatPrompt:
    """The prompt of a conversation. Raises RequestError, also when the model has no chat template."""
    model = context.model
    template = (model.tool_template if conversation.tools else None) or model.chat_template
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions, or start with --chat-template")
    tools = [tool.definition for tool in conversation.tools]
    context.check_text_length("messages", sum(map(len, _texts([*conversation.messages, *tools]))))
    kwargs = _template_kwargs(template, conversation)

    def encoded(messages: Sequence[Message], keep_parts: bool, marks: MediaMarks | None) -> ChatPrompt:
        shown_tools = tools
        if not keep_parts:
            messages = [
                message | {"content": "\n".join(str(part["text"]) for part in content)}
                if isinstance(content := message.get("content"), list)
                else message
                for message in messages
            ]
        if (tools or any(map(calls_of, messages))) and not template.uses_tools:
            messages, shown_tools = _written_out(messages, conversation.tools), []

        def render(messages: Sequence[Message]) -> RenderedPrompt:
            return template.render(
                messages,
                tools=shown_tools,
                add_generation_prompt=conversation.opens_reply and not conversation.continues_last,
                continue_final_message=conversation.continues_last,
                kwargs=kwargs,
            )

        rendered = _first_rendered(render, messages)
        if marks is not None:
            rendered = marks.replaced(rendered)
        context.check_text_length("messages", len(rendered.text))
        refuse_too_long(model.tokenizer, rendered.text, model.context_length, "messages")
        return ChatPrompt(model.tokenizer.encode_rendered(rendered), rendered.text)

    contents = [content for message in conversation.messages if isinstance(content := message.get("content"), list)]
    media = MediaRefs.by_kind(part[kind] for content in contents for part in content if (kind := media_kind(part)))
    if not media:
        return encoded(conversation.messages, template.content_parts, None)
    return replace(_with_media(context, conversation.messages, media, template, encoded), media=media)


_Encoded = Callable[[Sequence[Message], bool, "MediaMarks | None"], ChatPrompt]
"""Renders messages, as parts or as texts, and tokenizes what comes out."""


def _with_media(
    context: ServingContext, messages: Sequence[Message], media: MediaRefs, template: ChatTemplate, encoded: _Encoded
) -> ChatPrompt:
    """The prompt of messages with media: as the template writes them, or, of a template that does not, with a token in their place. Raises
    RequestError."""
    context.check_media(media)
    kinds = [kind for kind in MediaKind if media.of(kind)]
    tokens = {kind: context.model.media_support.tokens[kind] for kind in kinds}

    def missing(prompt: ChatPrompt) -> tuple[MediaKind, int] | None:
        """A kind of which the prompt has not as many tokens as there are items, and how many it has."""
        for kind, token in tokens.items():
            token_id = context.model.tokenizer.token_to_id(token)
            assert token_id is not None, token
            found = prompt.ids.count(token_id)
            if found != len(media.of(kind)):
                return kind, found
        return None

    if template.content_parts:
        prompt = encoded(_replaced(messages, lambda kind: {"type": kind.value}), True, None)
        if missing(prompt) is None:
            return prompt
    marks = MediaMarks.beside(messages, tokens)
    prompt = encoded(marks.as_text(messages), False, marks)
    if (lost := missing(prompt)) is not None:
        kind, found = lost
        raise RequestError(
            f"the chat template leaves {found} of the {len(media.of(kind))} {kind.many}: it does not show all messages",
            "messages",
        )
    return prompt


def _replaced(messages: Sequence[Message], shown: Callable[[MediaKind], Message]) -> list[Message]:
    """The messages with other parts in place of media."""

    def of_message(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(media_kind, content)):
            return message
        return message | {"content": [shown(kind) if (kind := media_kind(part)) else part for part in content]}

    return [of_message(message) for message in messages]


@dataclass(frozen=True, slots=True)
class MediaMarks:
    """Characters that occur in no text, in place of media. tokens: of each kind the character, and the text of the token that stands for an item."""

    tokens: Mapping[MediaKind, tuple[str, str]]

    @classmethod
    def beside(cls, messages: Sequence[Message], tokens: Mapping[MediaKind, str]) -> "MediaMarks":
        """Marks that are not in these messages. Raises RequestError if they use all characters that could be one."""
        used = set().union(*map(set, _texts([*messages])))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        marks = list(islice(free, len(tokens)))
        if len(marks) < len(tokens):
            raise RequestError("the messages use up the private-use characters of Unicode", "messages")
        return cls({kind: (mark, token) for mark, (kind, token) in zip(marks, tokens.items(), strict=True)})

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with parts of text in place of media."""
        return _replaced(messages, lambda kind: text_part(self.tokens[kind][0]))

    def replaced(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """A prompt with the tokens in place of the marks, as if the template had written them."""
        tokens = dict(self.tokens.values())
        pattern = re.compile(f"([{''.join(tokens)}])")
        segments: list[Segment] = []
        for segment in rendered.segments:
            for text in filter(None, pattern.split(segment.text)):
                is_mark = text in tokens
                segments.append(Segment(tokens[text] if is_mark else text, is_mark or segment.template))
        return RenderedPrompt("".join(segment.text for segment in segments), tuple(segments))


def media_renamed(error: RequestError) -> RequestError:
    """An error of the engine about `image_data` and so on, as one about the media of messages; any other as it is."""
    kind = next((kind for kind in MediaKind if error.param == kind.field), None)
    if kind is not None:
        one, error.param = kind.one, "messages"
        error.message = re.sub(
            rf"^{kind.field}\[(\d+)\]", lambda found: f"{one} {int(found[1]) + 1} of the messages", error.message
        )
        error.message = re.sub(rf"^{kind.field}\b", "messages", error.message)
    return error


def _first_rendered(
    render: Callable[[Sequence[Message]], RenderedPrompt], messages: Sequence[Message]
) -> RenderedPrompt:
    """Render the messages, in the first of several forms that the template takes. Raises the RequestError of the first."""
    forms: list[Sequence[Message]] = [messages]
    if any(map(calls_of, messages)):
        # Most templates write the arguments of a call as JSON; some expect them to be JSON already.
        forms.append(with_arguments_as_text(messages))
    if any(message["role"] == "system" for message in messages[1:]):
        # Some templates take a system message only at the beginning; coding agents send others later.
        forms += [_late_system_as_user(form) for form in forms]
    if any(is_unasked(messages)) or any(message["role"] not in ROLES or _says_nothing(message) for message in messages):
        # Some templates refuse, or leave out, roles that they do not know, results without a call, and replies that say nothing.
        forms += [_plainer(form) for form in forms]
    error: RequestError | None = None
    for form in forms:
        try:
            rendered = render(form)
            _check_own_roles(form, rendered.text)
            return rendered
        except TemplateStoppedError:
            raise
        except RequestError as exc:
            error = exc if error is None else error
    assert error is not None, "there is a form"
    raise error


def _check_own_roles(messages: Sequence[Message], text: str) -> None:
    """Raises RequestError if the prompt's text leaves out a message of a role of the client's own."""
    at = 0
    for message in messages:
        if message["role"] in ROLES:
            continue
        for part in _parts(message.get("content")):
            at = text.find(str(part.get("text", "")).strip(), at)
            if at < 0:
                raise RequestError(
                    f"the chat template does not show the role {str(message['role'])[:50]!r}", "messages"
                )


def _late_system_as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with the text of later system messages as the user's."""
    later = [message | {"role": "user"} if message["role"] == "system" else message for message in messages[1:]]
    return _joined_users([messages[0], *later])


def _says_nothing(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("content") and not calls_of(message)


def _plainer(messages: Sequence[Message]) -> list[Message]:
    """The messages of roles of the client's own, and the results whose call is not there, as the user's, and a blank for each reply of nothing."""
    turned = [
        _call_written_out(message) if unasked else message
        for message, unasked in zip(messages, is_unasked(messages), strict=True)
    ]
    turned = [message | {"content": " "} if _says_nothing(message) else message for message in turned]
    return _joined_users([message if message["role"] in ROLES else message | {"role": "user"} for message in turned])


def _joined_users(messages: Sequence[Message]) -> list[Message]:
    """What the user says in messages that follow each other, in one."""
    shown: list[Message] = []
    for message in messages:
        if shown and shown[-1]["role"] == message["role"] == "user":
            first, second = shown[-1].get("content"), message.get("content")
            both_texts = isinstance(first, str) and isinstance(second, str)
            joined = f"{first}\n\n{second}" if both_texts else [*_parts(first), *_parts(second)]
            shown[-1] = shown[-1] | {"content": joined}
        else:
            shown.append(message)
    return shown


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [text_part(str(content or ""))]


def _template_kwargs(template: ChatTemplate, conversation: Conversation) -> dict[str, object]:
    known = RESERVED_KWARGS | _words(template.source)
    kwargs = {
        name: value for name, value in conversation.template_kwargs.items() if name in known or not is_empty(value)
    }
    # Reserved names are refused with their own message when the template is rendered.
    if unknown := kwargs.keys() - known:
        shown = sorted(unknown)[0][:100]
        raise unsupported("chat_template_kwargs", f": this model's chat template does not use {shown!r}")
    thinks = conversation.thinking
    if thinks is None and conversation.effort is not None:
        thinks = conversation.effort != "none"
    # If the template uses none of these names they have no effect, as on SGLang and vLLM.
    asked = {"reasoning_effort": conversation.effort, **dict.fromkeys(_THINKING, thinks)}
    return {name: value for name, value in asked.items() if value is not None and name in known} | kwargs


@functools.lru_cache(maxsize=8)
def _words(source: str) -> frozenset[str]:
    """All words in the source of a template that look like names."""
    return frozenset(re.findall(r"\w+", source))


def _texts(values: list[Any]) -> Iterator[str]:
    """All texts in messages and tools, without the keys. values: is used up."""
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _written_out(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages with tools, calls and results as text, for a template that knows none of them.

    The text is that of Hermes models, which most others follow: NousResearch/Hermes-Function-Calling.
    """
    shown = [_call_written_out(message) for message in messages]
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    about = (
        "You may call one or more functions to assist with the user query. Here are the available functions:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call return a JSON object with the name and the arguments of the function within <tool_call></tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    if shown and shown[0]["role"] == "system" and isinstance(shown[0].get("content"), str):
        return [shown[0] | {"content": f"{shown[0]['content']}\n\n{about}"}, *shown[1:]]
    return [{"role": "system", "content": about}, *shown]


def _call_written_out(message: Message) -> Message:
    content = message.get("content")
    if message["role"] == "tool":
        if isinstance(content, list):
            begin, end = map(text_part, ("<tool_response>\n", "\n</tool_response>"))
            return {"role": "user", "content": [begin, *content, end]}
        return {"role": "user", "content": f"<tool_response>\n{content or ''}\n</tool_response>"}
    calls = calls_of(message)
    if not calls:
        return message
    written = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
    )
    parts = _parts(content) if content else []
    if any(map(media_kind, parts)):
        return {"role": message["role"], "content": [*parts, text_part(f"\n{written}")]}
    return {"role": message["role"], "content": "\n".join([*(str(part["text"]) for part in parts), written])}
