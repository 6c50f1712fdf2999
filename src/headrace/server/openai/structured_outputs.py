"""What the output of an OpenAI route must match: `response_format`, and the names that vLLM, SGLang and llama.cpp's server use.

Owns these fields, and which of the runtime's own fields (`sampling/grammar_fields.py`) each of them means. The checks of the grammars
themselves are made there. Runs in the event loop that serves HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from headrace.errors import RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of, with_options
from headrace.messages.bodies import is_empty
from headrace.messages.grammar import GrammarKind
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, GrammarFields, Schema, check_only_one, json_value

_JSON_OBJECT: dict[str, object] = {"type": "object"}
_OF_TYPE: dict[str | None, tuple[str, ...]] = {
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": ("format", "structures", "triggers"),
}
"""Members that a `response_format` of a type may have."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`. name and description have no effect. The schema is always enforced; strict: a `oneOf` exactly, or not at all."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format`. `schema` is llama.cpp's place for a schema; the last three belong to structural tags, in either shape."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] | None = None
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None
    format: object | None = None
    structures: list[object] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. disable_fallback has no effect: there is one backend."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, object] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """The one field of a request that asks for a grammar.

    name: of the field, as the client wrote it. kind: the runtime's field that means the same. value: of that field. is_strict: see
    `JsonSchemaFormat`.
    """

    name: str
    kind: GrammarKind
    value: object
    is_strict: bool = False

    @property
    def fields(self) -> dict[str, object]:
        """The runtime's field."""
        is_loose = self.kind == "json_schema" and not self.is_strict
        return {self.kind: with_one_of_as_any_of(self.value) if is_loose else self.value}


class StructuredFields(GrammarFields, frozen=True, kw_only=True):
    """Every field that says what the output must match; at most one may ask for something.

    format: Ollama's, "json" or a schema. grammar: GBNF (llama.cpp). The names with `guided_` are those of older versions of vLLM.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    format: str | Schema | None = None
    grammar: str | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None

    def asked_grammar(self) -> AskedGrammar | None:
        """The grammar that is asked for; None = none. Raises RequestError, which names the client's fields."""
        given = [asked for asked in self._all_asked() if not is_empty(asked.value)]
        whitespace = self._whitespace()
        if not given:
            if whitespace is not None:
                raise _needs_schema(whitespace[0])
            return None
        check_only_one([asked.name for asked in given])
        return given[0] if whitespace is None else _with_whitespace(given[0], *whitespace)

    def _all_asked(self) -> Iterator[AskedGrammar]:
        """Every field that could ask, some with empty values. Raises RequestError."""
        for kind in GRAMMAR_KINDS:
            yield AskedGrammar(kind, kind, getattr(self, kind))
        yield AskedGrammar("format", "json_schema", ollamas_format(self.format))
        yield AskedGrammar("grammar", "ebnf", self.grammar)
        yield AskedGrammar("guided_json", "json_schema", self.guided_json)
        yield AskedGrammar("guided_regex", "regex", self.guided_regex)
        yield AskedGrammar("guided_choice", "choice", self.guided_choice)
        yield _gbnf_or_lark("guided_grammar", self.guided_grammar)
        yield AskedGrammar("guided_json_object", "json_schema", self.guided_json_object and _JSON_OBJECT)
        if self.structured_outputs is not None:
            yield from _asked_by_vllm(self.structured_outputs)
        if self.response_format is not None:
            yield _asked_by_format(self.response_format)

    def _whitespace(self) -> tuple[str, dict[str, object]] | None:
        """The field that says which whitespace JSON may have, and the same as options of a schema; None = not said."""
        options = self.structured_outputs or StructuredOutputs()
        if options.disable_any_whitespace:
            return "structured_outputs.disable_any_whitespace", {"whitespace_flexible": False}
        if options.whitespace_pattern:
            return "structured_outputs.whitespace_pattern", {"whitespace_pattern": options.whitespace_pattern}
        if self.guided_whitespace_pattern:
            return "guided_whitespace_pattern", {"whitespace_pattern": self.guided_whitespace_pattern}
        return None


def ollamas_format(given: str | Schema | None) -> object:
    """The schema that `format` means. Raises RequestError."""
    if isinstance(given, str) and given not in ("", "json"):
        raise RequestError(f'format must be "json" or a JSON schema (an object), got {given[:50]!r}', "format")
    return _JSON_OBJECT if given == "json" else given


def _asked_by_vllm(given: StructuredOutputs) -> Iterator[AskedGrammar]:
    if given.disable_additional_properties:
        field = "structured_outputs.disable_additional_properties"
        message = f"{field} is not supported: objects that list properties have no others; write additionalProperties: false for the rest"
        raise RequestError(message, field, "unsupported_parameter")
    yield AskedGrammar("structured_outputs.json", "json_schema", given.json)
    yield AskedGrammar("structured_outputs.regex", "regex", given.regex)
    yield AskedGrammar("structured_outputs.choice", "choice", given.choice)
    yield _gbnf_or_lark("structured_outputs.grammar", given.grammar)
    yield AskedGrammar("structured_outputs.json_object", "json_schema", given.json_object and _JSON_OBJECT)
    yield AskedGrammar("structured_outputs.structural_tag", "structural_tag", given.structural_tag)


def _gbnf_or_lark(name: str, grammar: str | None) -> AskedGrammar:
    """A grammar in one of the two languages, told apart by the sign of a rule of GBNF."""
    return AskedGrammar(name, "ebnf" if grammar and "::=" in grammar else "lark", grammar)


def _asked_by_format(given: ResponseFormat) -> AskedGrammar:
    """What `response_format` asks for; errors of its grammar name the whole field. Raises RequestError."""
    allowed = _OF_TYPE.get(given.type, ())
    for member in ("json_schema", "schema", "format", "structures", "triggers"):
        if member not in allowed and not is_empty(getattr(given, member)):
            field = f"response_format.{member}"
            if given.type is None:
                raise RequestError(f"{field}: response_format.type is missing", "response_format.type")
            raise RequestError(f"{field} does not belong to the type {given.type}", field)
    match given.type:
        case "json_object":
            return AskedGrammar("response_format", "json_schema", given.schema or _JSON_OBJECT)
        case "json_schema":
            is_strict = given.json_schema is not None and given.json_schema.strict is True
            return AskedGrammar("response_format", "json_schema", _schema_of(given), is_strict)
        case "structural_tag":
            tag = {name: getattr(given, name) for name in allowed if not is_empty(getattr(given, name))}
            # Even an incomplete one asks for something.
            return AskedGrammar("response_format", "structural_tag", {"type": "structural_tag", **tag})
        case _:
            return AskedGrammar("response_format", "json_schema", None)


def _schema_of(given: ResponseFormat) -> object:
    """The schema of the type `json_schema`. Raises RequestError when there is none or more than one."""
    own = None if given.json_schema is None else given.json_schema.schema
    if own is not None and given.schema is not None:
        message = "response_format.schema and response_format.json_schema.schema are both given: give one of them"
        raise RequestError(message, "response_format.schema")
    schema = given.schema if own is None else own
    if schema is None:
        field = "response_format.json_schema.schema"
        raise RequestError(f"{field} is missing", field, "missing_field")
    # An empty value means "not set" elsewhere; here it is a schema.
    return schema or msgspec.json.encode(schema).decode()


def _with_whitespace(asked: AskedGrammar, field: str, options: dict[str, object]) -> AskedGrammar:
    """The same with a schema that has these options, unless it has its own. Raises RequestError if it is no schema."""
    if asked.kind != "json_schema":
        raise _needs_schema(field)
    return replace(asked, value=with_options(json_value(asked.name, asked.value), options))


def _needs_schema(field: str) -> RequestError:
    return RequestError(f"{field} is for JSON only, and this request asks for no JSON schema", field)
