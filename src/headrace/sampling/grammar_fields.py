"""The fields by which a request says what its output must match, and the `GrammarSpec` made of them.

Owns the six fields, that at most one of them is used, and how each becomes text. Whether the text is a grammar that can be followed is
found out when it is compiled (`headrace.grammar`). No torch; any process.
"""

from typing import Self

import msgspec

from headrace.errors import RequestError
from headrace.messages.bodies import is_empty
from headrace.messages.grammar import GrammarKind, GrammarSpec

MAX_GRAMMAR_BYTES = 1 << 20
"""Most bytes of a grammar's text, as UTF-8."""

GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "lark", "choice", "structural_tag")
"""The fields of `GrammarFields`, each called as the kind of grammar that it holds."""

Schema = dict[str, object] | bool
"""A JSON schema. `true` allows every JSON value, `false` none."""


class GrammarFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match; at most one of the fields is set. None, false, and an empty string, list or object mean not set.

    json_schema: a schema, or its JSON; `true` and the text `{}` allow every JSON value. The order of `properties` is that of the output.
    regex: matches the whole output. ebnf: GBNF, with a rule `root`. lark: with a rule `start`. choice: the output is one of these strings.
    structural_tag: free text with constrained parts, as an object or its JSON: either `structures` and `triggers`, or `format`.
    grammar_after: the text of one token, such as `</think>`: the output is free up to that token, and must match from there on.
    """

    json_schema: str | Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, object] | None = None
    grammar_after: str | None = None

    def grammar_spec(self) -> GrammarSpec | None:
        """The grammar that is asked for; None = none.

        Takes milliseconds for large schemas: call it once for all samples. Raises RequestError, which names the field, for two grammars, for
        JSON that is none, and for more than MAX_GRAMMAR_BYTES.
        """
        asked = [kind for kind in GRAMMAR_KINDS if not is_empty(getattr(self, kind))]
        if not asked:
            if self.grammar_after:
                raise RequestError("grammar_after needs a grammar, for example json_schema", "grammar_after")
            return None
        check_only_one(asked)
        kind = asked[0]
        text = self._text_of(kind)
        _check_size(kind, text)
        return GrammarSpec(kind, text, kind)

    def with_json_as_text(self) -> Self:
        """The same with objects written as JSON: a message can hold text of any nesting, with numbers of any size. Raises RequestError."""
        given: tuple[GrammarKind, ...] = ("json_schema", "structural_tag")
        objects = [kind for kind in given if isinstance(getattr(self, kind), dict) and getattr(self, kind)]
        return msgspec.structs.replace(self, **{kind: _as_json(kind, getattr(self, kind)) for kind in objects})

    def _text_of(self, kind: GrammarKind) -> str:
        match kind:
            case "json_schema":
                schema = json_value(kind, self.json_schema)
                if not isinstance(schema, dict | bool):
                    raise RequestError(f"{kind} must be a JSON object or a boolean, got {_kind_of(schema)}", kind)
                return _as_json(kind, schema)
            case "structural_tag":
                tag = json_value(kind, self.structural_tag)
                if not isinstance(tag, dict):
                    raise RequestError(f"{kind} must be a JSON object, got {_kind_of(tag)}", kind)
                return _as_json(kind, _checked_tag(tag))
            case "choice":
                assert self.choice is not None, "it is asked for"
                if not all(self.choice):
                    raise RequestError("choice: a string is empty; every string must have at least one character", kind)
                return _as_json(kind, self.choice)
            case _:
                text: str = getattr(self, kind)
                return text


def check_only_one(names: list[GrammarKind] | list[str]) -> None:
    """Raises RequestError unless there is one name. names: of the fields that ask for a grammar."""
    if len(names) > 1:
        raise RequestError(f"{names[0]} and {names[1]} both constrain the output: give one of them", names[1])


def json_value(field: str, given: object) -> object:
    """The value of `field`, decoded if it is a text. The order of fields in objects is kept. Raises RequestError."""
    if not isinstance(given, str):
        return given
    _check_size(field, given)
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"{field} is not valid JSON: {_json_fault(error)}", field) from None
    except RecursionError:
        raise _too_deep(field) from None


def _as_json(field: str, value: object) -> str:
    """`value` as JSON without spaces, the same text for the same value. Raises RequestError for what JSON cannot hold."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise _too_deep(field) from None
    except UnicodeError:
        raise _no_unicode(field) from None
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        # Only a Python program can give such a value.
        raise RequestError(f"{field} cannot be written as JSON: {error}", field) from None


def _checked_tag(tag: dict[str, object]) -> dict[str, object]:
    """A structural tag in one of its two shapes, the older one without a type. Raises RequestError for any other."""
    if tag.get("type") not in (None, "structural_tag"):
        raise RequestError('structural_tag: its type must be "structural_tag"', "structural_tag")
    rest = {name: value for name, value in tag.items() if name != "type"}
    if not is_empty(tag.get("format")):
        return {"type": "structural_tag", **rest}
    if is_empty(tag.get("structures")) or is_empty(tag.get("triggers")):
        raise RequestError("structural_tag must have either format, or structures and triggers", "structural_tag")
    return rest


def _check_size(field: str, text: str) -> None:
    """Raises RequestError for a text that is too long or no valid Unicode."""
    try:
        num_bytes = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise _no_unicode(field) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{field} has {num_bytes} bytes; a grammar may have at most {MAX_GRAMMAR_BYTES}", field)


def _json_fault(error: Exception) -> str:
    """What is wrong, and at which byte if that is known, from msgspec's message."""
    reason = str(error).removeprefix("JSON is malformed: ").partition(" - at ")[0]
    return "it ends too early" if "truncated" in reason else reason[:1].lower() + reason[1:]


def _too_deep(field: str) -> RequestError:
    return RequestError(f"{field} is nested too deeply", field)


def _no_unicode(field: str) -> RequestError:
    return RequestError(f"{field} is not valid Unicode: it contains a lone surrogate", field)


def _kind_of(value: object) -> str:
    """What JSON calls the type of a value."""
    numbers = dict.fromkeys((int, float), "a number")
    return {type(None): "null", bool: "a boolean", str: "a string", list: "a list", **numbers}.get(
        type(value), "an object"
    )
