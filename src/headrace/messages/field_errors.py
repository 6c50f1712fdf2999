"""What is wrong with a body or with arguments: msgspec's message as an error that names the field in the client's words.

Pure functions; any process.
"""

import difflib
import re
from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.messages.allowed_values import allowed_values, field_names
from headrace.plain_types import AT_FIELD, plain_types

_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`", re.DOTALL)
_WRONG_VALUE = re.compile(r"invalid enum value (.*)", re.DOTALL)

_FRACTION = re.compile(r"(`(?=[^`]*\bint\b)(?![^`]*\bfloat\b)[^`]*`), got `float`")
"""Where an integer is taken, `with_whole_numbers` has left only floats that are none."""

_LIMITS = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
    "n_predict",
)
"""What APIs call the most tokens of an output."""


def field_error(text: str, kind: object) -> RequestError:
    """The RequestError for `text`, msgspec's message about a value that is no `kind`; `param` is the field as the client wrote it."""
    path = found[1] if (found := AT_FIELD.search(text)) else ""
    reason = AT_FIELD.sub("", text)
    if field := _UNKNOWN_FIELD.search(reason):
        name = _join(path, field[1])
        near = _nearest(field[1], field_names(kind, path))
        meant = f"; did you mean {_join(path, near)!r}?" if near else ""
        return RequestError(f"unknown field {_shorten(name)!r}{meant}", _shorten(name), "unknown_field")
    if field := _MISSING_FIELD.search(reason):
        name = _join(path, field[1])
        return RequestError(f"missing field {name!r}", name, "missing_field")
    reason = reason[:1].lower() + reason[1:]
    if (value := _WRONG_VALUE.fullmatch(reason)) and (allowed := allowed_values(kind, path)):
        reason = f"{_shorten(value[1])} is not one of {', '.join(map(repr, allowed))}"
    else:
        reason = plain_types(_FRACTION.sub(r"\1, got a number with a fraction", reason))
    where = _shorten(path)
    return RequestError(f"{where}: {reason}" if where else f"the body is not as expected: {reason}", where or None)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The one of `names`, paths of fields, that is most likely meant by `name`."""
    if len(name) > 100:
        return None
    by_last = {path.rpartition(".")[2]: path for path in reversed(names)}
    same = _LIMITS if name in _LIMITS else (name,)
    near = [other for other in same if other in by_last] or difflib.get_close_matches(name, by_last, 1, 0.75)
    return by_last[near[0]] if near else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shorten(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "..."
