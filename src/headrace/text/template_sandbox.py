"""A Jinja sandbox for untrusted chat templates: they see only their variables, and their time and memory are limited, as far as Python can see them.

Owns the sandbox and its limits, and marks on text from users, so that the text of a special token in a message is never read as that token. Does not
know messages (`chat_templates.py`), nor in which process it is (`template_child.py`). Rendering is plain computation of up to some seconds: callers
run it off the event loop.

Every special token begins and ends with one of a few characters (`<`, `>`, `[` ...), its edges. `Marks` replaces each of them by a
private-use character, one for one. In marked text a special token written by the template has its own edges, and one that came from a
message, whole or in part, has a marked edge. Strings of the class `Marked` compare and search like the originals, so that a
template which looks into a message takes the same path, and trimming, splitting, slicing and changing case keep the marks.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.errors import ModelError, RequestError


class Marks:
    """One private-use character for each edge character. back: the edge of each mark."""

    def __init__(self, back: Mapping[str, str]) -> None:
        self.back = dict(back)
        self._forth = {ord(edge): mark for mark, edge in back.items()}
        self._back = {ord(mark): edge for mark, edge in back.items()}
        self._any = re.compile("[" + "".join(back) + "]")

    @classmethod
    def beside(cls, edges: set[str], texts: Sequence[str]) -> Self:
        """Marks none of which occurs in the texts. Raises RequestError if there are none."""
        used: set[str] = set().union(*texts)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        back = dict(zip(free, sorted(edges), strict=False))
        if len(back) < len(edges):
            raise RequestError("the messages use up the private-use characters of Unicode", param="messages")
        return cls(back)

    def mark(self, text: str) -> str:
        """Replace edge characters by their marks; marked text does not change."""
        return str.translate(text, self._forth)

    def unmark(self, text: str) -> str:
        """The inverse of `mark`; the length stays the same."""
        return str.translate(text, self._back)

    def any_in(self, text: str, start: int, end: int) -> bool:
        return self._any.search(text, start, end) is not None


class Marked(str):
    """A marked string that compares and searches like the original text.

    Made of marked characters; arguments of its methods are marked first, and strings it returns are again of this class.
    """

    __slots__ = ("_marks",)
    _marks: Marks

    def __new__(cls, marked: str, marks: Marks) -> "Marked":
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
        # Template text is prepended: it must keep its edges, so it is not marked.
        return Marked(str.__add__(left, self), self._marks)

    def __add__(self, right: str) -> str:
        return Marked(str.__add__(self, right), self._marks)

    def __iter__(self) -> Iterator[str]:
        return (Marked(char, self._marks) for char in str.__iter__(self))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        # Text that the template inserts is its own.
        return Marked(str.replace(self, self._marks.mark(old), new, count), self._marks)

    def join(self, parts: Any) -> str:
        return Marked(str.join(self, parts), self._marks)


def _wrapped(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Marked, *args: Any, **options: Any) -> Any:
        marks = self._marks
        return _rewrap(method(self, *(_mark_argument(arg, marks) for arg in args), **options), marks)

    call.__name__ = name
    return call


def _mark_argument(arg: Any, marks: Marks) -> Any:
    if isinstance(arg, str):
        return marks.mark(arg)
    return tuple(_mark_argument(item, marks) for item in arg) if isinstance(arg, tuple) else arg


def _rewrap(value: Any, marks: Marks) -> Any:
    if isinstance(value, str):
        return Marked(value, marks)
    if isinstance(value, list | tuple):
        return type(value)(_rewrap(item, marks) for item in value)
    return value


_SAME_ON_MARKED: Final = (
    *("__getitem__", "capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip", "swapcase", "title", "upper"),
)
for _name in _SAME_ON_MARKED:
    setattr(Marked, _name, _wrapped(_name))


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)


def mark_leaves(value: Any, marks: Marks) -> Any:
    """The value with every string marked. Keys stay lookups of the template where they have no edge characters."""
    if isinstance(value, str):
        return Marked(marks.mark(value), marks)
    if isinstance(value, Mapping):
        return {
            mark_leaves(key, marks) if isinstance(key, str) and marks.mark(key) != key else key: mark_leaves(
                item, marks
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mark_leaves(item, marks) for item in value]
    return value


MAX_RENDER_SECONDS: Final = 5.0
MAX_RENDERED_CHARS: Final = 16_000_000
MAX_REFUSAL_CHARS: Final = 10_000
_MAX_REPEAT: Final = 1_000_000  # of one string or list multiplication, and of a width in a format

# What a template can raise on messages it was not written for.
FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class LimitReached(jinja2.TemplateError):
    """A render ran too long or grew too large."""


class TemplateStoppedError(RequestError):
    """What a render costs is more than its limits, so another one will hardly do better."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template was stopped: {reason}", param="messages")
        self.reason = reason


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks what the assistant wrote for training: its body, as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with limits on time and on growth.

    deadline: by time.monotonic. marks: those in the strings that the template is given.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, deadline: float = float("inf"), marks: Marks | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._deadline = deadline
        self.filters["tojson"] = lambda *args, **options: _tojson(marks, *args, **options)
        for name in ("center", "indent"):
            self.filters[name] = _bounded(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def render(self, source: str, values: Mapping[str, Any], max_chars: int = MAX_RENDERED_CHARS) -> str:
        """What the template `source` makes of `values`.

        Raises LimitReached, Refused when the template does, jinja2's SecurityError, and else one of FAULTS.
        """
        # The code object is compiled once per source.
        template = jinja2.Template.from_code(self, _code(source), self.make_globals(None))
        parts: list[str] = []
        num_chars = 0
        for part in template.generate(**values):
            parts.append(part)
            num_chars += len(part)
            if num_chars > max_chars:
                raise LimitReached(f"the rendered chat is longer than {max_chars} characters")
            self.check_time()
        return "".join(parts)

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise LimitReached("it takes too long")

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
                raise LimitReached("it raises large numbers to powers")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and isinstance(left, str | list | tuple) and len(left) > MAX_RENDERED_CHARS:
            raise LimitReached(f"it builds text longer than {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)


class TemplateFacts(NamedTuple):
    """What the source of a template says. See `ChatTemplate`."""

    uses_tools: bool
    content_parts: bool


def facts_of(source: str) -> TemplateFacts:
    """Parses and compiles a template. Raises ModelError if it is not valid Jinja."""
    try:
        tree = Sandbox().parse(source)
        _code(source)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as err:
        line = f" at line {err.lineno}" if isinstance(err, jinja2.TemplateSyntaxError) else ""
        raise ModelError(f"the chat template is not valid Jinja{line}: {err}") from err
    except MemoryError:
        raise ModelError("compiling the chat template takes too much memory") from None
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    return TemplateFacts("tools" in names, _loops_over_content(tree))


class RenderTask(NamedTuple):
    """What a template is to be rendered with: the server's own variables, and those of a request, in which strings are marked if there are marks."""

    source: str
    own: Mapping[str, Any]
    values: Mapping[str, Any]
    marks: Marks | None
    max_seconds: float
    max_chars: int


def render(task: RenderTask) -> str:
    """Raises RequestError when the template refuses its variables or fails on them, TemplateStoppedError when it exceeds its limits."""
    try:
        given = task.values if task.marks is None else mark_leaves(task.values, task.marks)
        sandbox = Sandbox(time.monotonic() + task.max_seconds, task.marks)
        return sandbox.render(task.source, {**task.own, **given}, task.max_chars)
    except Refused as err:
        raise RequestError(f"the chat template refuses these messages: {err}", param="messages") from None
    except LimitReached as err:
        raise TemplateStoppedError(str(err)) from None
    except MemoryError:
        raise TemplateStoppedError("it takes too much memory") from None
    except jinja2.exceptions.SecurityError as err:
        raise RequestError("the chat template uses a feature that is not allowed", param="messages") from err
    except FAULTS as err:
        raise RequestError(
            "the chat template cannot be rendered with these messages; check their roles, fields and order",
            param="messages",
        ) from err


@lru_cache(maxsize=16)
def _code(source: str) -> Any:
    """The Python code of a template, kept for the few templates a process uses."""
    return Sandbox().compile(source)


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


def _raise_exception(message: str) -> None:
    raise Refused(str(message)[:MAX_REFUSAL_CHARS])


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > _MAX_REPEAT:
            raise LimitReached(f"it repeats something to more than {_MAX_REPEAT} items")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
        raise LimitReached("it multiplies large numbers")


def _check_widths(args: Sequence[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > _MAX_REPEAT for arg in args):
        raise LimitReached(f"it asks for text wider than {_MAX_REPEAT} characters")


def _check_format(pattern: str) -> None:
    if re.search(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*\d{6}", pattern):
        raise LimitReached("it formats with a very large width")


def _bounded(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **options: Any) -> Any:
        _check_widths([*args, *options.values()])
        return original(value, *args, **options)

    return bounded


def _joined(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    num_chars = 0
    for piece in pieces:
        parts.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise LimitReached(f"it builds text longer than {MAX_RENDERED_CHARS} characters")
    return "".join(parts)


def _tojson(
    marks: Marks | None,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers' filter. Marks survive `ensure_ascii`."""
    if isinstance(indent, int) and indent > 64:
        raise LimitReached("it indents JSON by more than 64")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    # With an indent, what is nested deeply becomes many times as long.
    text = encoder.encode(value) if indent is None else _joined(encoder.iterencode(value))
    if ensure_ascii:
        text = "".join(
            char if char.isascii() or (marks and char in marks.back) else json.dumps(char)[1:-1] for char in text
        )
    return text if marks is None else Marked(text, marks)
