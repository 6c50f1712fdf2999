"""Chat messages rendered to a prompt by the model's own template.

Owns the sandbox that templates run in, its limits, and the marking of what users wrote, so that the text of a special token
in a message is never read as that token. Does not tokenize (`tokenizers.py`) and does not check roles or tool schemas (the
server's handlers). Rendering is plain computation of up to a second: callers run it off the event loop.

Marking. Every special token begins and ends with one of a few characters (`<`, `>`, `[` ...). When the messages hold such
characters, the template is rendered a second time with each of them replaced by a private-use character, one for one. In
that text a special token written by the template has its own edges, and one that came from a message, whole or in part,
has a marked edge. The strings of the second render (`_Marked`) answer comparisons and searches as the originals would,
so that a template which looks into a message takes the same path, and trimming, splitting, slicing and changing case keep
the marks. If the two renders differ after the marks are undone and a message does hold a special token, the second is used:
safe before identical.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.checkpoint.regular_file import open_regular
from headrace.errors import ModelError, RequestError
from headrace.text.tokenizers import RenderedPrompt, Segment, SpecialTexts, Tokenizer, check_unicode

MAX_RENDERED_CHARS: Final = 16_000_000
MAX_RENDER_SECONDS: Final = 5.0
MAX_TEMPLATE_CHARS: Final = 1_000_000
_MAX_REPEAT: Final = 1_000_000  # of one string or list multiplication, and of a width in a format

# What a request must not set through chat_template_kwargs: the renderer's own arguments and those of
# transformers.apply_chat_template that mean something else than a template variable.
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

# What a template can raise on messages it was not written for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

Message = Mapping[str, Any]


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _LimitReached(jinja2.TemplateError):
    """A render ran too long or grew too large."""


class ChatTemplate:
    """One compiled template.

    source: the Jinja text. special_texts: of the tokenizer, to tell special tokens from text. variables: names the template
    may use for special tokens (`bos_token` ...). uses_tools: the template mentions `tools`. content_parts: the template
    itself goes through a list of content parts; when False, join text parts to one string before rendering.
    """

    def __init__(
        self,
        source: str,
        special_texts: SpecialTexts,
        variables: Mapping[str, str] | None = None,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compile. Raises ModelError for a template that is too long or no Jinja."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        self.source = source
        self._special_texts = special_texts
        self._variables = dict(variables or {})
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        try:
            tree = _Sandbox().parse(source)
            _Sandbox().compile(source)
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
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render a chat.

        continue_final_message: leave the last message open, so that the model goes on writing it; needs
        add_generation_prompt False. kwargs: more variables for the template, as a request's `chat_template_kwargs`.
        Raises RequestError when the template refuses the messages, fails on them or exceeds its limits, for reserved kwargs,
        and for text that is not Unicode.
        """
        if not messages:
            raise RequestError("messages is empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        taken = sorted((RESERVED_KWARGS | self._variables.keys()) & (kwargs or {}).keys())
        if taken:
            raise RequestError(f"chat_template_kwargs must not set {', '.join(taken)}", param="chat_template_kwargs")
        final = _final_text(messages) if continue_final_message else None
        values: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            **(kwargs or {}),
        }
        leaves = list(_strings(values))
        for leaf in leaves:
            check_unicode(leaf)
        deadline = time.monotonic() + self._max_seconds

        def run(values: dict[str, Any], marks: "_Marks | None") -> str:
            rendered = self._run(values | {"add_generation_prompt": add_generation_prompt}, marks, deadline)
            return rendered if final is None else _cut_after(rendered, marks.mark(final) if marks else final)

        text = run(values, None)
        edges = {char for leaf in leaves for char in self._special_texts.edges if char in leaf}
        if not edges or next(self._special_texts.find(text), None) is None:
            return _whole(text)
        marks = _Marks(edges, [text, *leaves])
        marked = run(cast(dict[str, Any], _mark_leaves(values, marks)), marks)
        plain = marks.unmark(marked)
        foreign = [span for span in self._special_texts.find(plain) if marks.any_in(marked, *span)]
        if foreign:
            return RenderedPrompt(plain, _segments(plain, foreign))
        if plain != text and self._count_specials(plain) != self._count_specials(text):
            return _whole(plain)
        return _whole(text)

    def _count_specials(self, text: str) -> int:
        return sum(1 for _ in self._special_texts.find(text))

    def _run(self, values: dict[str, Any], marks: "_Marks | None", deadline: float) -> str:
        environment = _Sandbox(deadline, marks)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        parts: list[str] = []
        num_chars = 0
        try:
            template = environment.template(self.source)
            for part in template.generate(**(self._variables | values)):
                parts.append(part)
                num_chars += len(part)
                if num_chars > self._max_chars:
                    raise _LimitReached(f"the rendered chat is longer than {self._max_chars} characters")
                environment.check_time()
        except _Refused as err:
            raise RequestError(f"the chat template refuses these messages: {err}", param="messages") from None
        except _LimitReached as err:
            raise RequestError(f"the chat template was stopped: {err}", param="messages") from None
        except jinja2.exceptions.SecurityError as err:
            raise RequestError("the chat template does something that is not allowed", param="messages") from err
        except _TEMPLATE_FAULTS as err:
            raise RequestError(
                "the chat template cannot be rendered with these messages; check their roles, fields and order",
                param="messages",
            ) from err
        return "".join(parts)


def chat_template_of(tokenizer: Tokenizer, override: str | None = None, has_tools: bool = False) -> ChatTemplate:
    """The template of a model, compiled: `override` (Jinja source) or the checkpoint's own.

    Raises RequestError when there is none, ModelError when it is no Jinja.
    """
    source = choose_template(tokenizer.chat_template, override, has_tools)
    return ChatTemplate(source, tokenizer.special_texts, tokenizer.named_tokens)


def choose_template(
    templates: Mapping[str, str], override: str | None = None, has_tools: bool = False, name: str | None = None
) -> str:
    """The Jinja source to use: `override` when given, else the one called `name`, else tool_use or default.

    templates: `Tokenizer.chat_template`. Raises RequestError when the model has no template.
    """
    if override is not None:
        return override
    if name is not None:
        if name not in templates:
            known = ", ".join(sorted(templates)) or "none"
            raise RequestError(f"this model has no chat template called {name!r}; it has: {known}")
        return templates[name]
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
    """The Jinja source behind `--chat-template`: the content of the file it names, or itself when it is a template.

    Raises ModelError for a file that is missing or cannot be read.
    """
    if any(mark in value for mark in ("{{", "{%", "\n")):
        return value
    try:
        with open_regular(Path(value)) as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError) as err:
        raise ModelError(f"chat template {value!r} is neither a template nor a file that can be read: {err}") from err


# --- the sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks what the assistant wrote for training: its body, as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with limits on time and on growth."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, deadline: float = float("inf"), marks: "_Marks | None" = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._deadline = deadline
        self.filters["tojson"] = lambda *args, **options: _tojson(marks, *args, **options)
        for name in ("center", "indent"):
            self.filters[name] = _bounded(self.filters[name])

    def template(self, source: str) -> jinja2.Template:
        """The compiled template, bound to this environment. The code object is compiled once per source."""
        return jinja2.Template.from_code(self, _code(source), self.make_globals(None))

    def check_time(self) -> None:
        """Raise _LimitReached past the deadline."""
        if time.monotonic() > self._deadline:
            raise _LimitReached("it takes too long")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template passes here."""
        self.check_time()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_widths(args)
            if getattr(obj, "__name__", "") in ("format", "format_map"):
                _check_format(owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make something large from little."""
        self.check_time()
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            if not all(isinstance(side, int | float) and abs(side) <= 1024 for side in (left, right)):
                raise _LimitReached("it raises large numbers to powers")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and isinstance(left, str | list | tuple) and len(left) > MAX_RENDERED_CHARS:
            raise _LimitReached(f"it builds text longer than {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)


_code_cache: dict[str, Any] = {}


def _code(source: str) -> Any:
    """The Python code of a template, kept for the few templates a process uses."""
    code = _code_cache.get(source)
    if code is None:
        if len(_code_cache) >= 16:
            _code_cache.pop(next(iter(_code_cache)))
        code = _code_cache[source] = _Sandbox().compile(source)
    return code


def _raise_exception(message: str) -> None:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > _MAX_REPEAT:
            raise _LimitReached(f"it repeats something to more than {_MAX_REPEAT} items")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise _LimitReached("it multiplies large numbers")


def _check_widths(args: Sequence[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > _MAX_REPEAT for arg in args):
        raise _LimitReached(f"it asks for text wider than {_MAX_REPEAT} characters")


def _check_format(pattern: str) -> None:
    if re.search(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*\d{6}", pattern):
        raise _LimitReached("it formats with a very large width")


def _bounded(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **options: Any) -> Any:
        _check_widths([*args, *options.values()])
        return original(value, *args, **options)

    return bounded


def _tojson(
    marks: "_Marks | None",
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers' filter. Marks survive `ensure_ascii`."""
    if isinstance(indent, int) and indent > 64:
        raise _LimitReached("it indents JSON by more than 64")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = "".join(
            char if char.isascii() or (marks and char in marks.back) else json.dumps(char)[1:-1] for char in text
        )
    return text if marks is None else _Marked(text, marks)


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop of the template runs over something called content."""
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


# --- marking


class _Marks:
    """One private-use character for each edge character, none of which the texts hold already."""

    def __init__(self, edges: set[str], texts: Sequence[str]) -> None:
        used: set[str] = set().union(*texts)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        self._forth: dict[int, str] = {}
        for edge in sorted(edges):
            mark = next(free, None)
            if mark is None:
                raise RequestError("the messages use up the private-use characters of Unicode", param="messages")
            self._forth[ord(edge)] = mark
        self.back = {mark: chr(edge) for edge, mark in self._forth.items()}
        self._back = {ord(mark): edge for mark, edge in self.back.items()}
        self._any = re.compile("[" + "".join(self.back) + "]")

    def mark(self, text: str) -> str:
        """Replace edge characters by their marks; marked text stays as it is."""
        return str.translate(text, self._forth)

    def unmark(self, text: str) -> str:
        """The opposite; the length is the same."""
        return str.translate(text, self._back)

    def any_in(self, text: str, start: int, end: int) -> bool:
        """Whether text[start:end] holds a mark."""
        return self._any.search(text, start, end) is not None


class _Marked(str):
    """A marked string that compares and searches as the text it stands for.

    Made of marked characters; arguments of its methods are marked first, and strings it returns are again of this class.
    """

    __slots__ = ("_marks",)
    _marks: _Marks

    def __new__(cls, marked: str, marks: _Marks) -> "_Marked":
        self = super().__new__(cls, marked)
        self._marks = marks
        return self

    def __str__(self) -> str:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self._marks.mark(self), self._marks.mark(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._marks.unmark(self))

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and str.__contains__(self, self._marks.mark(part))

    def __radd__(self, left: str) -> str:
        # Template text before user text: it must keep its edges, so it is not marked.
        return _Marked(str.__add__(left, self), self._marks)

    def __add__(self, right: str) -> str:
        return _Marked(str.__add__(self, right), self._marks)

    def __iter__(self) -> Iterator[str]:
        return (_Marked(char, self._marks) for char in str.__iter__(self))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        # What the template puts in is its own text.
        return _Marked(str.replace(self, self._marks.mark(old), new, count), self._marks)

    def join(self, parts: Any) -> str:
        return _Marked(str.join(self, parts), self._marks)


def _wrapped(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: _Marked, *args: Any, **options: Any) -> Any:
        marks = self._marks
        return _rewrap(method(self, *(_mark_argument(arg, marks) for arg in args), **options), marks)

    call.__name__ = name
    return call


def _mark_argument(arg: Any, marks: _Marks) -> Any:
    if isinstance(arg, str):
        return marks.mark(arg)
    return tuple(_mark_argument(item, marks) for item in arg) if isinstance(arg, tuple) else arg


def _rewrap(value: Any, marks: _Marks) -> Any:
    if isinstance(value, str):
        return _Marked(value, marks)
    if isinstance(value, list | tuple):
        return type(value)(_rewrap(item, marks) for item in value)
    return value


_SAME_ON_MARKED: Final = (
    *("__getitem__", "capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip", "swapcase", "title", "upper"),
)
for _name in _SAME_ON_MARKED:
    setattr(_Marked, _name, _wrapped(_name))


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mark_leaves(value: Any, marks: _Marks) -> Any:
    """The value with every string marked. Keys stay lookups of the template where they have no edge characters."""
    if isinstance(value, str):
        return _Marked(marks.mark(value), marks)
    if isinstance(value, Mapping):
        return {_mark_key(key, marks): _mark_leaves(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_leaves(item, marks) for item in value]
    return value


def _mark_key(key: Any, marks: _Marks) -> Any:
    if not isinstance(key, str):
        return key
    marked = marks.mark(key)
    return key if marked == key else _Marked(marked, marks)


# --- pieces of prompts


def _whole(text: str) -> RenderedPrompt:
    return RenderedPrompt(text, (Segment(text, template=True),))


def _segments(text: str, foreign: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Cut the spans that are no special tokens out of the text."""
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
    """The rendered chat up to the end of the final message's text, with its trailing blanks where the template kept them."""
    core = final.strip()
    at = rendered.rfind(core)
    if at < 0:
        raise RequestError(
            "the last message cannot be continued: the chat template changes its text", param="continue_final_message"
        )
    kept = final[final.index(core) :]
    return rendered[: at + len(kept if rendered.startswith(kept, at) else core)]


def with_joined_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages whose lists of text parts are joined to one string, for templates that take only strings.

    Raises RequestError for a part that is not text.
    """
    joined = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise RequestError("this model takes only text parts", param=f"messages[{number}].content")
                texts.append(part["text"])
            message = {**message, "content": "\n".join(texts)}
        joined.append(dict(message))
    return joined
