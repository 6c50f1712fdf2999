"""Strings of JSON schemas: how they are written, regular expressions as the library takes them, and whether a string is valid.

Owns the differences between ECMA-262 and the library's regular expressions, and which control characters a string may have.
"""

import re
from functools import cache

import msgspec
from llguidance import LLMatcher, LLTokenizer

from headrace.grammar.schema_walk import Json
from headrace.grammar.vocabulary import parser_limits

ESCAPES = 'nrbtf\\"'
"""What may follow a backslash in a string. Without `u`, a property has only one name: the library compares names as they are written, so the further
property "\\u0061" would not be the property "a". Every character but control characters can be written without it."""

UNWRITABLE = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
"""The control characters that have no escape among these."""

_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")

_PIECES = re.compile(
    r"\[\^\]|\[\]|\[\^-?|\[|\]|[&~]"
    r"|(?P<character>\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\[xu]\{0*(?P<braced>[0-9a-fA-F]{1,6})\}|\\(?P<v>v)|[\x00-\x1f\x7f])"
    r"|\\P(?P<others>\{\^?\w+\}|\w)|\\p(?P<category>\{C\w*\}|C)"
    r"|(?P<escape>\\.)",
    re.DOTALL,
)
"""What is written differently for the library: classes of characters, and what can stand for all control characters."""

_LAST_COUNT = re.compile(r"(?<!\\)\{(\d+),\d*\}\Z")
"""How often the last part of a regular expression may come."""


def library_pattern(pattern: str) -> str:
    """A regular expression of a schema as the library takes it.

    No class in it matches U+0001, unless it has quotes and backslashes too: the library allows an escaped quote and an escaped backslash wherever
    a class has all control characters, even if the class excludes them. A class without one control character is read exactly, and no string has
    that one (`ESCAPES`). A character that no string has matches nothing by itself, because the library would leave it out. Within a class `[`, `&`
    and `~` are themselves, and the classes `[]` and `[^]` are nothing and anything, as in ECMA-262. `asked_pattern` is the way back.
    """
    in_class = False

    def write(found: re.Match[str]) -> str:
        nonlocal in_class
        piece = found[0]
        if found["character"]:
            begins_range = in_class and pattern[found.end() : found.end() + 1] == "-"
            ends_range = in_class and pattern[found.start() - 1] == "-"
            return _character(found, begins_range, ends_range)
        if found["others"]:
            return rf"[^\x{{1}}\p{found['others']}]"
        if found["category"]:
            return rf"[\p{found['category']}&&[^\x{{1}}]]"
        if found["escape"]:
            return piece
        if in_class:
            in_class = "]" not in piece
            return piece if piece == "]" else f"\\{piece}"
        in_class = piece in ("[", "[^", "[^-")
        if piece in ("[]", "[^]"):
            return r"[^\s\S]" if piece == "[]" else r"[\s\S]"
        return piece.replace("[^-", r"[^\-").replace("[^", r"[^\x{1}")

    # What is found anywhere need not go on: the library would count how far it does.
    return _PIECES.sub(write, _LAST_COUNT.sub(r"{\1}", pattern))


def _character(found: re.Match[str], begins_range: bool, ends_range: bool) -> str:
    """A character that is written as its number, or is a control character."""
    digits = found["x"] or found["u"] or found["braced"] or ("b" if found["v"] else f"{ord(found[0][0]):x}")
    code = int(digits, 16)
    if begins_range and code < 2:
        return r"\x{2}"
    if begins_range or ends_range or not re.fullmatch(UNWRITABLE, chr(min(code, 0x10FFFF))):
        return found[0]
    return r"[^\s\S]"


def asked_pattern(pattern: str) -> str:
    """What `library_pattern` was given, but for rare classes; for messages."""
    return pattern.replace(r"[^\x{1}\-", "[^-").replace(r"[^\x{1}", "[^")


def is_valid_string(text: str, schema: dict[str, Json]) -> bool | None:
    """Whether a string is as `pattern`, `format` and the lengths of a schema say, its formats being known ones; None = they are not supported."""
    said = {keyword: schema[keyword] for keyword in _OF_STRINGS if keyword in schema}
    if not said or re.search(UNWRITABLE, text):
        return True if not said else None
    if isinstance(said.get("pattern"), str):
        said["pattern"] = library_pattern(said["pattern"])
    options = {"json_allowed_escapes": ESCAPES}
    grammar = {"grammars": [{"json_schema": {"type": "string", **said, "x-guidance": options}}]}
    tokens = byte_tokens()
    matcher = LLMatcher(
        tokens, msgspec.json.encode(grammar).decode(), log_level=0, limits=parser_limits(tokens.vocab_size)
    )
    written = list(msgspec.json.encode(text))
    num_taken = matcher.try_consume_tokens(written)
    return None if matcher.is_error() else num_taken == len(written) and matcher.is_accepting()


@cache
def byte_tokens() -> LLTokenizer:
    return LLTokenizer("byte")
