"""Renders chat messages to a prompt with the model's chat template.

Owns the choice of the template, its variables, which parts of the prompt come from it, and the children in which templates are rendered that nobody
has read (`TemplateChildren`). Does not tokenize (`tokenizers/`) and does not check roles or tool schemas (the server's handlers). Rendering takes up
to a second: callers run it off the event loop.

If messages contain the first or last character of special tokens, the template is rendered a second time over marked text
(`template_sandbox.Marks`). If the two results differ after the marks are removed and a message does contain a special token, the second one is used:
safety comes before identity.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from headrace.checkpoint.files import open_regular
from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool
from headrace.errors import ModelError, RequestError
from headrace.log import get_logger
from headrace.text.template_child import (
    ANSWERS,
    Answer,
    Inspect,
    Render,
    Setup,
    packed,
)
from headrace.text.template_sandbox import (
    MAX_RENDER_SECONDS,
    MAX_RENDERED_CHARS,
    Marks,
    RenderTask,
    TemplateFacts,
    TemplateStoppedError,
    facts_of,
    render,
    strings_of,
)
from headrace.text.tokenizers import RenderedPrompt, Segment, TextFinder, Tokenizer, check_unicode

MAX_TEMPLATE_CHARS: Final = 1_000_000

KNOWN_TEMPLATES: Final = frozenset({
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # SmolLM2
    "af9c0233881b083b52ff773580215222b5440ac3d0beeeca99b76329b048f8db",  # Qwen 2
    "55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a",  # Qwen 2.5, also Coder
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",  # Qwen 3
    "eae48a3307931acb10a6fce475a36b711709672ea79ee1a9bc52f083d8b0a2af",  # Qwen 3 Coder
    "93c0e9aa3629bbd77e68dbc0f5621f6e6b23aa8d74b932595cdb8d64684526d7",  # Llama 3.1, 3.3
    "d82792f95932f1c9cef5c4bd992f171225e3bf8c7b609b4557c9e1ec96be819f",  # Llama 3.2
    "dd2675619a64a449cdcdd2b93e605a0a50764cee41e344f244752bc93643936c",  # DeepSeek R1 distilled into Llama
    "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6",  # Gemma 2
    "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90",  # Phi 3.5
    "268b6082ceb7176dc6ed80557a2f7837f9f0339592fbee677d405a553af15f88",  # Phi 3
    "e7deee034838db2bfc7487788a3013d8a307ab69f72f3c54a85f06fd76007d4e",  # Mistral Nemo
})  # fmt: skip
"""SHA-256 of templates without the newline at their end, as Jinja reads them."""

logger = get_logger(__name__)

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


class TemplateChildren(ChildPool[Answer]):
    """Renders templates in children, as `template_sandbox` does here: the same text, and the same errors.

    limit_s: processor time for one render, beyond what the sandbox stops by itself. memory_bytes: memory for one, beyond the child's own.
    """

    def __init__(
        self,
        limit_s: float = MAX_RENDER_SECONDS + 1,
        memory_bytes: int = 512 * MIB,
        program: Sequence[str] = (sys.executable, "-m", "headrace.text.template_child"),
    ) -> None:
        # As many as threads that render, so that none waits long for another; most renders end long before a child has started.
        super().__init__(
            "render chat templates",
            program,
            Setup(memory_bytes),
            ANSWERS,
            num_children=3,
            limit_s=limit_s,
            max_left_bytes=64 * MIB,
            start_after_s=0.05,
        )

    def facts_of(self, source: str) -> TemplateFacts:
        """As the sandbox's. Raises CapacityError or ExecutionError, too, if it could not be tried."""
        try:
            said = self._said(Inspect(source))
        except ValueError:
            raise ModelError("the chat template is not Unicode") from None
        except TemplateStoppedError as error:
            raise ModelError(f"compiling the chat template was stopped: {error.reason}") from None
        if said.facts is None:
            raise ModelError(said.text)
        return said.facts

    def render(self, task: RenderTask) -> str:
        """As the sandbox's. Raises CapacityError or ExecutionError, too, if it could not be tried."""
        try:
            variables = packed(task.own, task.values)
        except (TypeError, ValueError):
            raise RequestError("chat_template_kwargs must be JSON", param="chat_template_kwargs") from None
        marks = None if task.marks is None else task.marks.back
        said = self._said(Render(task.source, variables, marks, task.max_seconds, task.max_chars))
        if said.kind == "failed":
            raise RequestError(said.text, param="messages")
        return said.text

    def _said(self, question: Inspect | Render) -> Answer:
        try:
            said = self.ask(question)
        except ChildLateError:
            raise TemplateStoppedError("it takes too long") from None
        except ChildLostError:
            raise TemplateStoppedError("it takes too much memory") from None
        if said.kind == "stopped":
            raise TemplateStoppedError(said.text)
        return said


class ChatTemplate:
    """One compiled template.

    source: the Jinja text. special_texts: of the tokenizer, to tell special tokens from text. variables: names the template may use for special
    tokens (`bos_token` ...). children: where it is rendered; None = in this process. uses_tools: the template mentions `tools`. content_parts: the
    template itself handles a list of content parts; if False, join text parts to one string before rendering. Of a template that shows nothing but
    lists (those of many vision models), strings are rendered as lists of one part.
    """

    def __init__(
        self,
        source: str,
        special_texts: TextFinder,
        variables: Mapping[str, str] | None = None,
        children: TemplateChildren | None = None,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compile. Raises ModelError for a template that is too long or is not valid Jinja, and as `TemplateChildren` does."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        self.source = source
        self._special_texts = special_texts
        self._variables = dict(variables or {})
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        self._render = render if children is None else children.render
        self.uses_tools, self.content_parts = (facts_of if children is None else children.facts_of)(source)

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

        def run(marks: Marks | None) -> str:
            rendered = self._run(values, add_generation_prompt, marks)
            return rendered if final is None else _cut_after(rendered, marks.mark(final) if marks else final)

        return self._safe(run, leaves)

    def turn_end(self) -> str:
        """The special token with which it ends an assistant's turn, right after its text; empty if there is none."""
        chat = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _REPLY}]
        try:
            text = self.render(chat, add_generation_prompt=False).text
        except RequestError as error:
            logger.warning("the token with which a turn ends in chats is not known: %s", error.message)
            return ""
        replies = list(re.finditer(re.escape(_REPLY), text, re.IGNORECASE))
        rest = text[replies[-1].end() :] if replies else ""
        start, end = next(self._special_texts.find(rest), (0, 0))
        return "" if rest[:start].strip() else rest[start:end]

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the text of a user is shown if it is a part in a list, and not if it is a string."""

        def shows(content: object) -> bool:
            values = {"messages": [{"role": "user", "content": content}]}
            try:
                return _PROBE in self._run(values, False, None).lower()
            except RequestError:
                return False

        return self.content_parts and not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _safe(self, run: Callable[[Marks | None], str], leaves: Sequence[str]) -> RenderedPrompt:
        """The prompt that `run` renders from values whose strings are `leaves`; from marked strings if they could contain special tokens."""
        text = run(None)
        edges = {char for leaf in leaves for char in self._special_texts.edges if char in leaf}
        if not edges or next(self._special_texts.find(text), None) is None:
            return _whole(text)
        marks = Marks.beside(edges, [text, *leaves])
        marked = run(marks)
        plain = marks.unmark(marked)
        foreign = [span for span in self._special_texts.find(plain) if marks.any_in(marked, *span)]
        if foreign:
            return RenderedPrompt(plain, _segments(plain, foreign))
        if plain != text and self._count_specials(plain) != self._count_specials(text):
            return _whole(plain)
        return _whole(text)

    def _count_specials(self, text: str) -> int:
        return sum(1 for _ in self._special_texts.find(text))

    def _run(self, values: Mapping[str, Any], add_generation_prompt: bool, marks: Marks | None) -> str:
        own = self._variables | {"add_generation_prompt": add_generation_prompt}
        return self._render(RenderTask(self.source, own, values, marks, self._max_seconds, self._max_chars))


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return message
    return {**message, "content": [{"type": "text", "text": "" if content is None else content}]}


def chat_template_of(
    tokenizer: Tokenizer,
    override: str | None = None,
    has_tools: bool = False,
    children: TemplateChildren | None = None,
) -> ChatTemplate:
    """The template of a model, compiled: `override` (Jinja source) or the checkpoint's own. One that is not known is only rendered in `children`, if
    there are any.

    Raises RequestError if there is none, ModelError if it is not valid Jinja, and as `TemplateChildren` does.
    """
    source = choose_template(tokenizer.chat_template, override, has_tools)
    apart = None if is_known(source) else children
    return ChatTemplate(source, tokenizer.special_texts, tokenizer.named_tokens, apart)


def is_known(source: str) -> bool:
    """Whether a template is one of those that were read: their time and memory grow as the messages do."""
    return hashlib.sha256(source.removesuffix("\n").encode(errors="replace")).hexdigest() in KNOWN_TEMPLATES


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
