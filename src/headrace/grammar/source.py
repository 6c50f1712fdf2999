"""From what a request asks for to the text that llguidance takes, and from the library's errors to ours.

The library's text is `{"grammars": [...]}` with one JSON schema or one lark grammar. Everything here is text work, linear in the text.

The library says what it does not support in a schema, but not where. The place is found by walking the schema for the keyword and value that its
message names. A message that is not known here is passed on in its first line.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from llguidance import regex_to_lark

from headrace.errors import RequestError
from headrace.grammar import lark, structural_tag
from headrace.grammar.gbnf import GbnfError, gbnf_to_lark
from headrace.grammar.json_schema import library_schema
from headrace.grammar.schema_patterns import asked_pattern, library_pattern
from headrace.grammar.schema_walk import Json, decode_json, listed, subschemas
from headrace.messages.grammar import GrammarSpec

NO_TOKENS: Mapping[str, int] = {}

TOO_COMPLEX = (
    "the grammar is too complex: it needs more work or memory than one request may take; make it smaller or simpler"
)

MAX_CHARACTERS = 500
"""Of a refusal."""

_MAX_PLACES = 3


def library_text(spec: GrammarSpec, special_tokens: Mapping[str, int] = NO_TOKENS, closes_objects: bool = False) -> str:
    """What `llguidance.LLMatcher(tokenizer, text)` takes.

    special_tokens: text -> id, for the marks of structural tags that are special tokens of the model. closes_objects: in JSON schemas, also those of
    structural tags, but not in lark, see `closed_objects`; whatever is asked of a server is read so.
    Raises RequestError with `spec.field` and the reason; what only the library can see it refuses itself, see `explain`.
    """
    text, field = spec.text, spec.field
    if not text.strip():
        raise RequestError(f"{field} is empty", field)
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(f"{field} is not valid Unicode: lone surrogate at character {err.start}", field) from None
    match spec.kind:
        case "structural_tag":
            return lark.grammar(structural_tag.to_lark(text, field, special_tokens, closes_objects))
        case "json_schema":
            schema = library_schema(decode_json(text, field), field, closes_objects)
            return msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()
        case "regex":
            return lark.grammar(f"start: {lark.regex(text)}")
        case "lark":
            return lark.grammar(lark.checked(text, field))
        case "choice":
            return lark.grammar(_choice(decode_json(text, field, "the list of choices"), field))
        case "ebnf":
            try:
                return lark.grammar(gbnf_to_lark(text))
            except GbnfError as err:
                raise RequestError(f"the grammar is not GBNF (`root ::= ...`): {err}", field) from None


def _choice(choices: Json, field: str) -> str:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise RequestError(f"{field} must be a list of strings", field)
    if not choices or "" in choices:
        raise RequestError(f"{field} must have at least one string, and none that is empty", field)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(lark.quoted, dict.fromkeys(choices)))}"


def explain(spec: GrammarSpec, library_error: str) -> RequestError:
    """The refusal of a grammar that the library refused when the matcher was built, or at its first mask; at most `MAX_CHARACTERS` long.

    For a JSON schema the message names the keyword and its place wherever they can be known. An empty `library_error` says that the first mask is
    empty: nothing may be generated.
    """
    text = library_error.partition("<state>")[0].strip()
    found = next((make(match) for pattern, make in _KNOWN if (match := pattern.search(text))), None)
    if found is None:
        # The library's own words: of a regular expression's error the line that says what is wrong.
        lines = text.splitlines() or [""]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        found = _Reason(f"the grammar is not supported: {(errors or lines)[0][:300]}")
    places = list(_places(spec, found)) if spec.kind == "json_schema" else []
    more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
    at = f" (at {', '.join(place[:120] for place in places[:_MAX_PLACES])}{more})" if places else ""
    return RequestError(f"{found.message}{at}"[:MAX_CHARACTERS], spec.field)


class _Reason(NamedTuple):
    """message: what is wrong. keyword: where in the schema that `holds` is true of; None: it is about no schema."""

    message: str
    keyword: str = ""
    holds: Callable[[dict[str, Json]], bool] | None = None


def _places(spec: GrammarSpec, found: _Reason) -> Iterator[str]:
    if found.holds is None:
        return
    try:
        root = decode_json(spec.text, spec.field)
    except RequestError:
        return
    for place, schema in subschemas(root):
        if found.holds(schema):
            yield f"{place}/{found.keyword}" if found.keyword else place


# --- the library's messages


def _unsupported_keys(match: re.Match[str]) -> _Reason:
    keys: list[str] = msgspec.json.decode(match[1])
    names = " and ".join(f"`{key}`" for key in keys)
    word = "keyword" if len(keys) == 1 else "keywords"
    return _Reason(
        f"the JSON schema {word} {names} cannot be supported here",
        keys[0],
        lambda schema: all(key in schema for key in keys),
    )


def _pattern(match: re.Match[str]) -> _Reason:
    what = match["error"] or match["kind"]
    said = {
        "End": "`$` is supported only at the end",
        "Start": "`^` is supported only at the beginning",
        "WordUnicode": r"word boundaries (`\b`) are not supported",
        "WordAscii": r"word boundaries (`\b`) are not supported",
    }.get(what, what)
    pattern = asked_pattern((match["pattern"] or match["shown"] or "").strip())

    def holds(schema: dict[str, Json]) -> bool:
        by_name = schema.get("patternProperties")
        patterns = [schema.get("pattern"), *(by_name if isinstance(by_name, dict) else ())]
        return any(
            isinstance(own, str)
            and pattern in (own.strip(), asked_pattern(regex_to_lark(library_pattern(own), "dw")).strip())
            for own in patterns
        )

    return _Reason(f"the regular expression {pattern[:120]!r} is not supported: {said}", "", holds)


def _reference(match: re.Match[str]) -> _Reason:
    target = match[1]
    return _Reason(
        f"`$ref` to {target!r} cannot be followed: only places in the schema itself can, for example #/$defs/name",
        "$ref",
        lambda schema: schema.get("$ref") in (target, f"#{target}"),
    )


def _cycle(match: re.Match[str]) -> _Reason:
    target = match[1].rpartition("#")[2]
    return _Reason(
        "a `$ref` beside other keywords leads back to itself, which is not supported; give the referenced schema a place without other keywords",
        "$ref",
        lambda schema: (
            isinstance(schema.get("$ref"), str) and len(schema) > 1 and schema["$ref"].rpartition("#")[2] == target
        ),
    )


def _wrong_value(match: re.Match[str]) -> _Reason:
    keyword, value = match[2], match[3].strip()
    kind = {"positive integer": "an integer, 0 or more", "f64": "a number"}.get(match[1], f"a value of type {match[1]}")

    def holds(schema: dict[str, Json]) -> bool:
        return keyword in schema and msgspec.json.encode(schema[keyword]).decode()[:80].startswith(value[:80])

    return _Reason(f"`{keyword}` must be {kind}, got {value[:80]}", keyword, holds)


def _wrong_shape(match: re.Match[str]) -> _Reason:
    keyword, wanted = match[1], match[2].partition(", got")[0]
    kinds = {"an array": list, "an object": dict, "a string": str, "a string or array of strings": str | list}
    kind = kinds.get(wanted, object)
    return _Reason(
        f"`{keyword}` must be {wanted}",
        keyword,
        lambda schema: keyword in schema and not isinstance(schema[keyword], kind),
    )


def _not_satisfiable(match: re.Match[str]) -> _Reason:
    message = f"the JSON schema allows nothing: {match[1][:200]}"
    required = re.search(r"required property '(.*)' is unsatisfiable", match[1])
    if required is None:
        return _Reason(message)
    return _Reason(message, "required", lambda schema: required[1] in listed(schema.get("required")))


def _bounds(match: re.Match[str]) -> _Reason:
    keywords = ("maximum", "exclusiveMaximum") if match[1] == "None" else ("minimum", "exclusiveMinimum")

    def holds(schema: dict[str, Json]) -> bool:
        values = [schema.get(keyword) for keyword in keywords]
        return any(isinstance(value, int | float) and abs(value) > 2**53 for value in values)

    return _Reason(f"`{keywords[0]}` is supported only up to 64 bits", "", holds)


def _keyword(keyword: str, message: str) -> Callable[[re.Match[str]], _Reason]:
    return lambda match: _Reason(message, keyword, lambda schema: keyword in schema)


def _plain(message: str) -> Callable[[re.Match[str]], _Reason]:
    return lambda match: _Reason(message)


_KNOWN: list[tuple[re.Pattern[str], Callable[[re.Match[str]], _Reason]]] = [
    (re.compile(pattern, re.DOTALL), make)
    for pattern, make in (
        (r"^$|^NoExtension", _plain("the grammar allows no output at all")),
        (r"Unimplemented keys: (\[.*?\])", _unsupported_keys),
        (
            r"oneOf constraints are not supported",
            lambda match: _Reason(
                "`oneOf` is supported only where no two options can be true at once, which could not be shown; use `anyOf`, or let it be"
                ' taken as `anyOf` with "x-guidance": {"coerce_one_of": true} in the schema',
                "oneOf",
                lambda schema: len(schema.get("oneOf", ())) > 1,
            ),
        ),
        (
            r"regex parse error:\n(?P<pattern>[^\n]*)\n.*?error: (?P<error>[^\n]*)"
            r"|lookarounds not supported yet; (?P<kind>\w+) in regex /(?P<shown>[^\n]*)/",
            _pattern,
        ),
        (
            r"patternProperty regexes (/.*/) and (/.*/) are",
            lambda match: _Reason(
                "`patternProperties` must exclude each other, which could not be shown for "
                f"{asked_pattern(match[1])} and {asked_pattern(match[2])}",
                "patternProperties",
                lambda schema: len(schema.get("patternProperties", ())) > 1,
            ),
        ),
        (
            r"min/maxProperties only supported",
            lambda match: _Reason(
                "`minProperties` and `maxProperties` are supported only where all of `properties` are required",
                "",
                lambda schema: "minProperties" in schema or "maxProperties" in schema,
            ),
        ),
        (r"Pointer '(.*?)' does not exist", _reference),
        (r"Resource '(.*?)' is not present", _reference),
        (r"Invalid URI reference '(.*?)': ", _reference),
        (r"Failed to generate regex for \w+ range: min=(\w+)", _bounds),
        (r"circular references with sibling keys are not supported: (\S+)", _cycle),
        (
            r"Invalid type: (.*)",
            lambda match: _Reason(
                f"`type` {match[1]!r} does not exist",
                "type",
                lambda schema: match[1] in (schema.get("type"), *listed(schema.get("type"))),
            ),
        ),
        (r"Expected (.*?) for '(\w+)'(?: item)?, got ([^\n]*)", _wrong_value),
        (r"(\$?\w+) must be (an? [^\n]*)", _wrong_shape),
        (r"Unsatisfiable schema: ([^\n]*)", _not_satisfiable),
        (r"invalid multiple of", _keyword("multipleOf", "`multipleOf` must be a number above 0")),
        (
            r"'multipleOf' has too many digits",
            _keyword("multipleOf", "`multipleOf` has more digits than are supported"),
        ),
        (
            r"(?i)schema too large|stack level|recursion limit",
            _plain("the JSON schema is too large or nested too deeply"),
        ),
        (
            r"(?i)too many|items; max is|fuel|limit|too large|too big|too complex",
            _plain(TOO_COMPLEX),
        ),
        (
            r"^(?:at )?(\d+)\((\d+)\): ([^\n]*?)(?: \(at |; following |\n|\Z)",
            lambda match: _Reason(
                f"the grammar is not valid in line {int(match[1])}, column {int(match[2])}: {match[3].strip()[:300]}"
            ),
        ),
    )
]
