"""A Jinja sandbox for untrusted chat templates: they see only their variables, and their time and memory are limited.

Owns the sandbox and its limits. Does not know messages (`chat_templates.py`). Rendering is plain computation of up to some seconds: callers
run it off the event loop.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.text.marked_text import Marked, Marks

MAX_RENDERED_CHARS: Final = 16_000_000
_MAX_REPEAT: Final = 1_000_000  # of one string or list multiplication, and of a width in a format

# What a template can raise on messages it was not written for.
FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class LimitReached(jinja2.TemplateError):
    """A render ran too long or grew too large."""


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
        self.globals["strftime_now"] = _strftime_now

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
        """Raise LimitReached past the deadline."""
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


_code_cache: dict[str, Any] = {}


def _code(source: str) -> Any:
    """The Python code of a template, kept for the few templates a process uses."""
    code = _code_cache.get(source)
    if code is None:
        if len(_code_cache) >= 16:
            _code_cache.pop(next(iter(_code_cache)))
        code = _code_cache[source] = Sandbox().compile(source)
    return code


def _raise_exception(message: str) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


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
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = "".join(
            char if char.isascii() or (marks and char in marks.back) else json.dumps(char)[1:-1] for char in text
        )
    return text if marks is None else Marked(text, marks)
