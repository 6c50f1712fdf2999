"""From what a request asks for to the text that llguidance takes, and from the library's errors to ours.

The library's text is `{"grammars": [...]}` with one JSON schema or one lark grammar. Everything here is text work, linear in the text.
"""

from collections.abc import Callable, Mapping

import msgspec

from headrace.errors import RequestError
from headrace.grammar import lark, refusals, structural_tag
from headrace.grammar.gbnf import GbnfError, gbnf_to_lark
from headrace.grammar.json_schema import library_schema
from headrace.grammar.schema_walk import decode_json
from headrace.messages.grammar import GrammarKind, GrammarSpec

NO_TOKENS: Mapping[str, int] = {}


def library_text(spec: GrammarSpec, special_tokens: Mapping[str, int] = NO_TOKENS, closes_objects: bool = False) -> str:
    """What `llguidance.LLMatcher(tokenizer, text)` takes.

    special_tokens: text -> id, for the marks of structural tags that are special tokens of the model. closes_objects: in JSON schemas, also those of
    structural tags, but not in lark, see `closed_objects`; whatever is asked of a server is read so.
    Raises RequestError with `spec.field` and the reason; what only the library can see it refuses itself, see `explain`.
    """
    if not spec.text.strip():
        raise RequestError(f"{spec.field} is empty", spec.field)
    try:
        spec.text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{spec.field} is not valid Unicode: lone surrogate at character {err.start}", spec.field
        ) from None
    if spec.kind == "structural_tag":
        return lark.grammar(structural_tag.to_lark(spec.text, spec.field, special_tokens, closes_objects))
    if spec.kind == "json_schema":
        return _json_schema(spec.text, spec.field, closes_objects)
    return _TEXTS[spec.kind](spec.text, spec.field)


def explain(spec: GrammarSpec, library_error: str) -> RequestError:
    """The refusal of a grammar that the library refused: when the matcher was built, or at its first mask.

    For a JSON schema the message names the keyword and its place wherever they can be known. An empty `library_error` says that the first mask is
    empty: nothing may be generated.
    """
    return RequestError(refusals.reason(spec, library_error), spec.field)


def _json_schema(text: str, field: str, closes_objects: bool) -> str:
    schema = library_schema(decode_json(text, field), field, closes_objects)
    return msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()


def _regex(text: str, field: str) -> str:
    return lark.grammar(f"start: {lark.regex(text)}")


def _lark(text: str, field: str) -> str:
    return lark.grammar(lark.checked(text, field))


def _choice(text: str, field: str) -> str:
    choices = decode_json(text, field, "the list of choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise RequestError(f"{field} must be a list of strings", field)
    if not choices or "" in choices:
        raise RequestError(f"{field} must have at least one string, and none that is empty", field)
    return lark.grammar(f"start: CHOICE\nCHOICE: {' | '.join(map(lark.quoted, dict.fromkeys(choices)))}")


def _ebnf(text: str, field: str) -> str:
    try:
        return lark.grammar(gbnf_to_lark(text))
    except GbnfError as err:
        raise RequestError(f"the grammar is not GBNF (`root ::= ...`): {err}", field) from None


_TEXTS: dict[GrammarKind, Callable[[str, str], str]] = {
    "regex": _regex,
    "lark": _lark,
    "choice": _choice,
    "ebnf": _ebnf,
}
