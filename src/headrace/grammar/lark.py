"""Pieces of the library's own language, lark: quoted strings, regular expressions and schemas, and what a user's lark may contain."""

import re
from collections.abc import Mapping

import msgspec
from llguidance import LLMatcher, regex_to_lark

from headrace.errors import RequestError
from headrace.grammar.json_schema import library_schema
from headrace.grammar.schema_patterns import byte_tokens
from headrace.grammar.schema_walk import decode_json, json_end
from headrace.grammar.vocabulary import parser_limits

ANY_TEXT = "/(?s:.*)/"

# What the scanner has to know of lark (docs/syntax.md of llguidance): strings, comments, regular expressions and special tokens hide what looks like
# a directive or an attribute.
_PIECES = re.compile(
    r"""(?P<hidden>"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>)"""
    r"""|(?P<json>%json)\s*"""
    r"""|(?P<attribute>(?<![\w-])(?:max_tokens|temperature|stop|stop_capture))\s*=""",
    re.VERBOSE,
)

# What names are among: strings and regular expressions with their flags; comments, names of alternatives and marks before rules, which mean nothing.
_NAMES = re.compile(
    r"""(?P<hidden>"(?:\\.|[^"\\\n])*"[a-z]*|/(?:\\.|[^/\\])+/[a-z]*)|(?P<dropped>//[^\n]*|\#[^\n]*|->\s*\w+|^[?!])"""
    r"""|%import\s+(?P<module>\w+)(?:\.(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\s*\((?P<several>[^)]*)\))|(?P<name>[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE,
)


def quoted(text: str) -> str:
    """A text as a lark string. `text` must be Unicode without lone surrogates."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text as a sequence of lark strings and special tokens: where it contains the text of a special token, that token is meant."""
    if not special_tokens:
        return quoted(text)
    parts = re.split(
        "(" + "|".join(re.escape(name) for name in sorted(special_tokens, key=len, reverse=True)) + ")", text
    )
    shown = [f"<[{special_tokens[part]}]>" if i % 2 else quoted(part) for i, part in enumerate(parts) if part]
    return " ".join(shown) or '""'


def regex(pattern: str) -> str:
    r"""A regular expression as a lark terminal; the library checks it when it builds the matcher.

    \d is an ASCII digit, as in most other engines; \w and \s are Unicode.
    """
    return f"/{regex_to_lark(pattern, 'd')}/" if pattern else '""'


def inline_schema(schema: object, field: str, closes_objects: bool = False) -> str:
    """A decoded JSON schema as a lark rule. closes_objects, errors: as of `library_schema`."""
    return "%json " + msgspec.json.encode(library_schema(schema, field, closes_objects)).decode()


def grammar(text: str) -> str:
    return msgspec.json.encode({"grammars": [{"lark_grammar": text}]}).decode()


def checked(text: str, field: str) -> str:
    """A user's lark, with its inline schemas as we take schemas.

    Attributes that need more than a mask are refused: `max_tokens` (the output could not be rolled back), `temperature`, and `stop` (tokens
    would have to be taken back; `suffix` and `lazy` need not). Special tokens (`<name>` or `<[id]>`) are allowed: they are part of the output
    as ids, and of its text only where special tokens are not skipped; a token that ends the model's texts ends the output wherever it stands.
    Raises RequestError for these attributes and for schemas that are refused. What is no lark the library refuses.
    """
    parts: list[str] = []
    at = 0
    while found := _PIECES.search(text, at):
        if found["attribute"]:
            raise RequestError(
                f"the attribute {found['attribute']!r} is not supported in a grammar; use `suffix` or `lazy` to end a rule"
                f" (line {text.count(chr(10), 0, found.start()) + 1})",
                field,
            )
        if not found["json"]:
            parts.append(text[at : found.end()])
            at = found.end()
            continue
        start = found.end()
        end = json_end(text, start)
        parts += [
            text[at : found.start()],
            inline_schema(decode_json(text[start:end], field, "a schema in the grammar"), field),
        ]
        at = end
    parts.append(text[at:])
    return "".join(parts)


def as_terminal(definition: str, prefix: str) -> tuple[str, str] | None:
    """A user's lark as terminals: the name of the one for `start`, and the definitions, whose names begin with `prefix`.

    None for what is no regular expression: rules that lead back to themselves, special tokens, schemas, attributes, ignored text.
    """

    def own(name: str) -> str:
        return f"{prefix}_{'TEXT' if name.isupper() else 'RULE'}_{name.upper()}"

    def write(found: re.Match[str]) -> str:
        if found["module"]:
            names = {found["one"]: found["alias"] or found["one"]} if found["one"] else {}
            names |= {name: name for name in re.findall(r"\w+", found["several"] or "")}
            return "\n".join(f"%import {found['module']}.{name} -> {own(alias)}" for name, alias in names.items())
        return own(found["name"]) if found["name"] else found["hidden"] or ""

    name, text = own("start"), _NAMES.sub(write, definition)
    tokens = byte_tokens()
    limits = parser_limits(tokens.vocab_size)
    matcher = LLMatcher(tokens, grammar(f"start: {name}\n{text}"), log_level=0, limits=limits)
    return None if "%ignore" in definition or matcher.is_error() else (name, text)
