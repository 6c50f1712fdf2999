"""Fields that several bodies of OpenAI's routes have: sampling and routing (`SharedFields`), and what the output must match (`StructuredFields`), by
every name that OpenAI, vLLM, SGLang and llama.cpp's server give it; and which of the runtime's own fields each means. Bounds in `extra_json_schema`
are for openapi.json; they are checked elsewhere, with better messages. Runs in the event loop that serves HTTP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of, with_options
from headrace.messages.bodies import is_empty
from headrace.messages.grammar import GrammarKind
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, GrammarFields, Schema, check_only_one, json_value
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import refused, unsupported

MAX_LOGPROBS = 20
"""Most alternatives per token on the OpenAI routes, the same as OpenAI's."""

MAX_TEMPERATURE = 2.0
"""Of OpenAI's API; `/generate` has no such limit."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
AskedEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "default"]

# Optional numbers, by their bounds.
FromMinus2 = Annotated[int | None, Meta(extra_json_schema={"minimum": -2})]
FromMinus1 = Annotated[int | None, Meta(extra_json_schema={"minimum": -1})]
From0 = Annotated[int | None, Meta(extra_json_schema={"minimum": 0})]
From1 = Annotated[int | None, Meta(extra_json_schema={"minimum": 1})]
NumLogprobs = Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS})]
Share = Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
Penalty = Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
RepetitionPenalty = Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})]

_SAMPLED = frozenset(SamplingParams.__struct_fields__) - {*GRAMMAR_KINDS, "n", "thinking_budget"}
"""Fields that mean the same in requests and in `SamplingParams`."""

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
        is_loose = self.kind == "json_schema" and not self.is_strict
        return {self.kind: with_one_of_as_any_of(self.value) if is_loose else self.value}


class SharedFields(GrammarFields, frozen=True, kw_only=True):
    """Fields of every route that generates; None = not set.

    model: "" and "default" mean the served model. repeat_penalty: Ollama's name of repetition_penalty. format: Ollama's, "json" or a schema.
    """

    model: str = ""
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: FromMinus1 = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 2})] = None
    top_p: Share = None
    top_k: FromMinus1 = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    typical_p: Share = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: RepetitionPenalty = None
    repeat_penalty: RepetitionPenalty = None
    ignore_eos: bool | None = None
    format: str | Schema | None = None
    think: bool | ReasoningEffort | None = None
    user: str | None = None
    lora_path: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    routed_dp_rank: From0 = None
    data_parallel_rank: From0 = None
    # Of routers, see docs/disaggregation.md.
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    disagg_prefill_dp_rank: From0 = None
    # Ollama's and llama.cpp's; noted.
    options: object | None = None
    num_ctx: object | None = None
    num_keep: object | None = None
    num_batch: object | None = None
    num_gpu: object | None = None
    num_thread: object | None = None
    main_gpu: object | None = None
    low_vram: object | None = None
    numa: object | None = None
    use_mmap: object | None = None
    use_mlock: object | None = None
    keep_alive: object | None = None
    timings_per_token: object | None = None
    request_id: object | None = None
    id_slot: object | None = None
    service_tier: str | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are given, apart from the grammars."""
        named = ((name, getattr(self, name)) for name in self.__struct_fields__ if name in _SAMPLED)
        given = {name: value for name, value in named if value is not None}
        if self.repeat_penalty is not None:
            given.setdefault("repetition_penalty", self.repeat_penalty)
        return given

    def call_fields(self) -> dict[str, Any]:
        """The fields of `GenerateReqInput` beside its prompt and how it is sampled."""
        return {
            "stream": bool(self.stream),
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "lora_path": self.lora_path,
            "routed_dp_rank": self.routed_dp_rank,
            "data_parallel_rank": self.data_parallel_rank,
            "bootstrap_host": self.bootstrap_host,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": self.bootstrap_room,
            "disagg_prefill_dp_rank": self.disagg_prefill_dp_rank,
        }

    def check_sampling(self) -> None:
        """Raises RequestError for what only these routes refuse, and for two names with different values."""
        if self.temperature is not None and self.temperature > MAX_TEMPERATURE:
            raise refused("temperature", f"must be between 0 and {MAX_TEMPERATURE:g}, got {self.temperature}")
        check_same({"repeat_penalty": self.repeat_penalty, "repetition_penalty": self.repetition_penalty})


def check_same(given: Mapping[str, object]) -> None:
    """Raises RequestError for several names of one field with different values. given: the values by name, None = not given."""
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        first, *_, last = said
        raise refused(first, f"and {last} differ: give one of them")


def check_num_logprobs(field: str, count: int | None) -> None:
    """Raises RequestError for more alternatives than there can be."""
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise refused(field, f"must be between 0 and {MAX_LOGPROBS}, got {count}")


class StructuredFields(SharedFields, frozen=True, kw_only=True):
    """Every field that says what the output must match; at most one may ask for something.

    grammar: GBNF (llama.cpp). The names with `guided_` are those of older versions of vLLM.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
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
        check_only_one([asked.name for asked in given])
        asked = given[0] if given else None
        if (whitespace := self._whitespace()) is None:
            return asked
        field, options = whitespace
        if asked is None or asked.kind != "json_schema":
            raise refused(field, "is for JSON only, and this request asks for no JSON schema")
        return replace(asked, value=with_options(json_value(asked.name, asked.value), options))

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
    if isinstance(given, str) and given not in ("", "json"):
        raise refused("format", f'must be "json" or a JSON schema (an object), got {given[:50]!r}')
    return _JSON_OBJECT if given == "json" else given


def _asked_by_vllm(given: StructuredOutputs) -> Iterator[AskedGrammar]:
    if given.disable_additional_properties:
        raise unsupported(
            "structured_outputs.disable_additional_properties",
            "is not supported: objects that list properties have no others; write additionalProperties: false for the rest",
        )
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
            raise refused(field, f"does not belong to the type {given.type}")
    match given.type:
        case "json_object":
            return AskedGrammar("response_format", "json_schema", given.schema or _JSON_OBJECT)
        case "json_schema":
            is_strict = given.json_schema is not None and given.json_schema.strict is True
            own = given.json_schema.schema if given.json_schema is not None else None
            field = "response_format.json_schema.schema"
            if own is not None and given.schema is not None:
                raise refused("response_format.schema", f"and {field} are both given: give one of them")
            schema = required_schema(field, given.schema if own is None else own)
            return AskedGrammar("response_format", "json_schema", schema, is_strict)
        case "structural_tag":
            tag = {name: getattr(given, name) for name in allowed if not is_empty(getattr(given, name))}
            # Even an incomplete one asks for something.
            return AskedGrammar("response_format", "structural_tag", {"type": "structural_tag", **tag})
        case _:
            return AskedGrammar("response_format", "json_schema", None)


def required_schema(field: str, schema: Schema | None) -> object:
    """The schema of a format that needs one. An empty value means "not set" elsewhere; here it is a schema. Raises RequestError."""
    if schema is None:
        raise refused(field, "is missing", "missing_field")
    return schema or msgspec.json.encode(schema).decode()
