"""Renders chat messages to a prompt with the model's chat template.

Owns the choice of the template, its variables, and which parts of the prompt come from it. Does not tokenize (`tokenizers/`) and does not
check roles or tool schemas (the server's handlers). Rendering is plain computation of up to a second: callers run it off the event loop.

If messages contain the first or last character of special tokens, the template is rendered a second time over marked text
(`template_sandbox.Marks`). If the two results differ after the marks are removed and a message does contain a special token, the second one is used:
safety comes before identity.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import jinja2
import jinja2.exceptions
import jinja2.nodes

from headrace.checkpoint.files import open_regular
from headrace.errors import ModelError, RequestError
from headrace.text.template_sandbox import (
    FAULTS,
    MAX_RENDERED_CHARS,
    LimitReached,
    Marks,
    Refused,
    Sandbox,
    mark_leaves,
    strings_of,
)
from headrace.text.tokenizers import RenderedPrompt, Segment, TextFinder, Tokenizer, check_unicode

MAX_RENDER_SECONDS: Final = 5.0
MAX_TEMPLATE_CHARS: Final = 1_000_000

# Names that chat_template_kwargs must not set: the renderer's own arguments, and those arguments of
# transformers.apply_chat_template that are not template variables.
RESERVED_KWARGS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

Message = Mapping[str, Any]

_PROBE = "is this shown?"
_REPLY = "where does this end?"


class ChatTemplate:
    """One compiled template.

    source: the Jinja text. special_texts: of the tokenizer, to tell special tokens from text. variables: names the template
    may use for special tokens (`bos_token` ...). uses_tools: the template mentions `tools`. content_parts: the template
    itself handles a list of content parts; if False, join text parts to one string before rendering. Of a template that shows nothing but
    lists (those of many vision models), strings are rendered as lists of one part.
    """

    def __init__(
        self,
        source: str,
        special_texts: TextFinder,
        variables: Mapping[str, str] | None = None,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compile. Raises ModelError for a template that is too long or is not valid Jinja."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        self.source = source
        self._special_texts = special_texts
        self._variables = dict(variables or {})
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        try:
            tree = Sandbox().parse(source)
            Sandbox().compile(source)
        except (jinja2.TemplateError, RecursionError) as err:
            line = f" at line {err.lineno}" if isinstance(err, jinja2.TemplateSyntaxError) else ""
            raise ModelError(f"the chat template is not valid Jinja{line}: {err}") from err
        names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
        self.uses_tools = "tools" in names
        self.content_parts = _loops_over_content(tree)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render a chat.

        continue_final_message: leave the last message open, so that the model continues it; needs
        add_generation_prompt False. kwargs: more variables for the template, as a request's `chat_template_kwargs`.
        Raises RequestError when the template refuses the messages, fails on them or exceeds its limits, for reserved kwargs,
        and for text that is not Unicode.
        """
        if not messages:
            raise RequestError("messages is empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        if self._needs_parts:
            messages = list(map(_as_parts, messages))
        taken = sorted((RESERVED_KWARGS | self._variables.keys()) & (kwargs or {}).keys())
        if taken:
            raise RequestError(f"chat_template_kwargs must not set {', '.join(taken)}", param="chat_template_kwargs")
        final = _final_text(messages) if continue_final_message else None
        values: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            **(kwargs or {}),
        }
        leaves = list(strings_of(values))
        for leaf in leaves:
            check_unicode(leaf)
        deadline = time.monotonic() + self._max_seconds

        def run(values: dict[str, Any], marks: Marks | None) -> str:
            rendered = self._run(values | {"add_generation_prompt": add_generation_prompt}, marks, deadline)
            return rendered if final is None else _cut_after(rendered, marks.mark(final) if marks else final)

        return self._safe(run, values, leaves)

    def turn_end(self) -> str:
        """The special token with which it ends an assistant's turn, right after its text; empty if there is none."""
        chat = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _REPLY}]
        try:
            text = self.render(chat, add_generation_prompt=False).text
        except RequestError:
            return ""
        replies = list(re.finditer(re.escape(_REPLY), text, re.IGNORECASE))
        rest = text[replies[-1].end() :] if replies else ""
        start, end = next(self._special_texts.find(rest), (0, 0))
        return "" if rest[:start].strip() else rest[start:end]

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the text of a user is shown if it is a part in a list, and not if it is a string."""

        def shows(content: object) -> bool:
            values = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
            try:
                return _PROBE in self._run(values, None, time.monotonic() + self._max_seconds).lower()
            except RequestError:
                return False

        return self.content_parts and not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _safe(
        self, run: Callable[[dict[str, Any], Marks | None], str], values: dict[str, Any], leaves: Sequence[str]
    ) -> RenderedPrompt:
        """The prompt that `run` renders from `values`, whose strings are `leaves`; from marked strings if they could contain special tokens."""
        text = run(values, None)
        edges = {char for leaf in leaves for char in self._special_texts.edges if char in leaf}
        if not edges or next(self._special_texts.find(text), None) is None:
            return _whole(text)
        marks = Marks(edges, [text, *leaves])
        marked = run(cast(dict[str, Any], mark_leaves(values, marks)), marks)
        plain = marks.unmark(marked)
        foreign = [span for span in self._special_texts.find(plain) if marks.any_in(marked, *span)]
        if foreign:
            return RenderedPrompt(plain, _segments(plain, foreign))
        if plain != text and self._count_specials(plain) != self._count_specials(text):
            return _whole(plain)
        return _whole(text)

    def _count_specials(self, text: str) -> int:
        return sum(1 for _ in self._special_texts.find(text))

    def _run(self, values: dict[str, Any], marks: Marks | None, deadline: float) -> str:
        try:
            return Sandbox(deadline, marks).render(self.source, self._variables | values, self._max_chars)
        except Refused as err:
            raise RequestError(f"the chat template refuses these messages: {err}", param="messages") from None
        except LimitReached as err:
            raise RequestError(f"the chat template was stopped: {err}", param="messages") from None
        except jinja2.exceptions.SecurityError as err:
            raise RequestError("the chat template uses a feature that is not allowed", param="messages") from err
        except FAULTS as err:
            raise RequestError(
                "the chat template cannot be rendered with these messages; check their roles, fields and order",
                param="messages",
            ) from err


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return message
    return {**message, "content": [{"type": "text", "text": "" if content is None else content}]}


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    for loop in tree.find_all(jinja2.nodes.For):
        target = loop.iter
        while isinstance(target, jinja2.nodes.Filter) and target.node is not None:
            target = target.node
        match target:
            case jinja2.nodes.Name(name="content") | jinja2.nodes.Getattr(attr="content"):
                return True
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                return True
            case _:
                continue
    return False


def chat_template_of(tokenizer: Tokenizer, override: str | None = None, has_tools: bool = False) -> ChatTemplate:
    """The template of a model, compiled: `override` (Jinja source) or the checkpoint's own.

    Raises RequestError if there is none, ModelError if it is not valid Jinja.
    """
    source = choose_template(tokenizer.chat_template, override, has_tools)
    return ChatTemplate(source, tokenizer.special_texts, tokenizer.named_tokens)


def choose_template(templates: Mapping[str, str], override: str | None = None, has_tools: bool = False) -> str:
    """The Jinja source to use: `override` if given, else the one for tools or the default.

    templates: `Tokenizer.chat_template`. Raises RequestError when the model has no template.
    """
    if override is not None:
        return override
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise RequestError(
        "this model has no chat template; start the server with --chat-template, or use /v1/completions with a prompt"
    )


def read_template_argument(value: str) -> str:
    """The Jinja source for `--chat-template`: the content of the file that it names, or the template itself.

    Raises ModelError for a file that is missing or cannot be read.
    """
    if any(mark in value for mark in ("{{", "{%", "\n")):
        return value
    try:
        with open_regular(Path(value)) as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError) as err:
        raise ModelError(f"chat template {value!r} is neither a template nor a file that can be read: {err}") from err


def _whole(text: str) -> RenderedPrompt:
    return RenderedPrompt(text, (Segment(text, template=True),))


def _segments(text: str, foreign: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Split the text into segments; the spans in `foreign` must not be read as special tokens."""
    segments = []
    at = 0
    for start, end in foreign:
        segments += [Segment(text[at:start], template=True), Segment(text[start:end], template=False)]
        at = end
    segments.append(Segment(text[at:], template=True))
    return tuple(segment for segment in segments if segment.text)


def _final_text(messages: Sequence[Message]) -> str:
    """The text of the last message, which `continue_final_message` leaves open."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = texts[-1] if texts else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError("continue_final_message needs a last message with text", param="continue_final_message")
    return content


def _cut_after(rendered: str, final: str) -> str:
    """The rendered chat up to the end of the final message's text, including trailing blanks if the template kept them."""
    core = final.strip()
    at = rendered.rfind(core)
    if at < 0:
        raise RequestError(
            "the last message cannot be continued: the chat template changes its text", param="continue_final_message"
        )
    kept = final[final.index(core) :]
    return rendered[: at + len(kept if rendered.startswith(kept, at) else core)]
