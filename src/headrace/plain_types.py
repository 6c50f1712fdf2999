"""What msgspec says of a wrong value, in words of users: "expected a string or null, got an integer". Pure functions; any process."""

import re

AT_FIELD = re.compile(r" - at `(?:key in )?\$?\.?(.*?)`$", re.DOTALL)
"""The place that ends a message of msgspec."""

_TYPES = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_MISSING = re.compile(r"Object missing required field (`.*?`)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field (`.*?`)", re.DOTALL)

_WORDS = {
    "str": "a string",
    "bytes": "a base64 string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def plain_reason(error: Exception) -> str:
    """An error of msgspec: where, if it says so, and what is wrong."""
    text = str(error)
    where = found[1] if (found := AT_FIELD.search(text)) else ""
    reason = _UNKNOWN.sub(r"unknown field \1", _MISSING.sub(r"the field \1 is missing", AT_FIELD.sub("", text)))
    if reason[1:2].islower():
        reason = reason[0].lower() + reason[1:]
    return f"{where}: {plain_types(reason)}" if where else plain_types(reason)


def plain_types(text: str) -> str:
    """msgspec's names of types in words: "expected `str | null`, got `int`" -> "expected a string or null, got an integer"."""
    return _TYPES.sub(lambda match: _in_words(match[1].split(" | ")) or match[0], text)


def _in_words(types: list[str]) -> str:
    """The types, joined by "or"; empty when one of them has no word."""
    if not all(name in _WORDS for name in types):
        return ""
    if "float" in types and "int" in types:
        types = [name for name in types if name != "int"]
    words = [_WORDS[name] for name in types]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
