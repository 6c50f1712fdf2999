"""Request bodies of Ollama's API: every field of it, how they are read, and the options as sampling parameters.

A field is honoured, accepted at the value that asks for nothing, or refused by name; `chat_request.py` and `generation.py` say which, too.
Fields and options that are not here are ignored, as Ollama does it, and noted in the reply, also where `forbid_unknown_fields` stands.
Runs in the event loop that serves HTTP.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta

from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.config.server_args import LATEST
from headrace.errors import RequestError
from headrace.messages.bodies import Place, asks_for_nothing, place_of
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import unsupported
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, Headers
from headrace.server.notes import HeaderNotes


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`options`: those of sampling, then those of loading a model."""

    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0})] = None
    top_k: int | None = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    typical_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    repeat_last_n: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    repeat_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    presence_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    frequency_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    num_predict: Annotated[int | None, Meta(extra_json_schema={"minimum": -2})] = None
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_gqa: int | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


class OllamaGeneration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both chat and generate.

    model: with or without `:latest`; "" means the served model. stream: None = true. format: "json" or a JSON schema. think: whether the model shall
    reason, or how much: low, medium, high. keep_alive: seconds, or a duration such as "5m"; the model is always loaded.
    """

    model: str = ""
    stream: bool | None = None
    format: str | dict[str, object] | None = None
    keep_alive: str | float | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 20})] = None


class OllamaFunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the assistant. arguments: an object. index: its number, without effect."""

    name: str
    arguments: object | None = None
    index: int | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """An element of `tool_calls`."""

    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Fields that are not listed are labels of the client's own, and accepted without effect.

    content: a text, or parts of text as OpenAI has them. tool_name, tool_call_id: which call a message of the role tool answers; without either it
    answers the first call that has no result yet.
    """

    role: str
    content: str | list[object] | None = None
    thinking: str | None = None
    images: list[object] | None = None
    audios: object | None = None
    videos: object | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaChatRequest(OllamaGeneration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/chat. Without messages, it asks whether the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, object]] | None = None


class OllamaGenerateRequest(OllamaGeneration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/generate. Without a prompt, it asks whether the model is loaded. raw: the prompt is not put into the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    context: list[int] | None = None
    images: list[object] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/embed. truncate: None = true, longer inputs are cut. dimensions: 0 = the model's. options: those of sampling have no effect."""

    model: str = ""
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/embeddings."""

    model: str = ""
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaShowRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/show. name: the older name of `model`. verbose: accepted, there is nothing more to say."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /api/pull. stream: None = true. insecure: accepted, because nothing is downloaded."""

    model: str = ""
    name: str = ""
    insecure: bool | None = None
    stream: bool | None = None


T = TypeVar("T")

MAX_NAME = 100
"""Most characters of a name that is noted."""

HeadersOfNotes = Callable[[Sequence[str]], Headers]
"""The headers of a reply with further notes."""


async def read_body(noted: HeaderNotes, exchange: Exchange, kind: type[T]) -> tuple[T, HeadersOfNotes]:
    """The body, and what makes the headers of the reply, which note its unknown fields and options. Raises the errors of `read_json`."""
    unknown: list[str] = []

    def without_unknown(body: object) -> object:
        return _known(body, place_of(cast(Hashable, kind)), "", unknown)

    body = await exchange.read_json(kind, any_content_type=True, prepare=without_unknown)
    return body, lambda more: noted.headers([*unknown, *more])


def _known(body: object, place: Place, path: str, unknown: list[str]) -> object:
    """`body` without unknown fields, whose names are added to `unknown`, nor those of closed objects in its fields."""
    if not isinstance(body, dict) or place.fields is None:
        return body
    kept = {}
    for name, value in body.items():
        inner = place.fields.get(name)
        if inner is not None:
            kept[name] = _known(value, inner, f"{path}{name}.", unknown) if inner.is_closed else value
        elif not asks_for_nothing(name, value):
            unknown.append(path + name[:MAX_NAME])
    return kept


TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
"""Ollama's defaults, for requests that name no value and models that bring none."""

_PENALTIES = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_REPEAT_LAST_N = 64
"""Ollama's default. It means all tokens here, and so do larger numbers."""
_DURATION = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+)")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "vocab_only": (None, False),
    "embedding_only": (None, False),
    "rope_frequency_base": (None, 0.0),
    "rope_frequency_scale": (None, 0.0, 1.0),
}
"""Options that are not supported, with the values that ask for nothing. mirostat_tau and mirostat_eta mean nothing without mirostat."""


def full_name(name: str) -> str:
    """The name as Ollama writes names, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def sampling_params(
    options: OllamaOptions, defaults: SamplingDefaults, json_schema: dict[str, object] | None
) -> SamplingParams:
    """The sampling parameters of a request. defaults: of the model. json_schema: what the output must match.

    Options about loading a model (num_gpu, num_thread, use_mmap ...) have no effect: it is loaded already. Neither has num_keep: nothing is ever
    dropped from the context. Raises RequestError that names the option.
    """
    check_options(options)
    penalised = options.repeat_last_n != 0
    return SamplingParams(
        max_new_tokens=_limit(options.num_predict),
        stop=options.stop,
        seed=options.seed,
        temperature=_first(options.temperature, defaults.temperature, TEMPERATURE),
        top_k=int(_first(options.top_k, defaults.top_k, TOP_K)),
        top_p=_first(options.top_p, defaults.top_p, TOP_P),
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repeat_penalty if penalised else 1.0,
        presence_penalty=(options.presence_penalty or 0.0) if penalised else 0.0,
        frequency_penalty=(options.frequency_penalty or 0.0) if penalised else 0.0,
        json_schema=json_schema,
    )


def option_notes(options: OllamaOptions | None, context: ServingContext) -> list[str]:
    """The options that get another value, for the reply's header: see `server/notes.py`."""
    length, asked = context.model.context_length, options.num_ctx if options is not None else None
    return [f"options.num_ctx={length}"] if asked is not None and asked > length else []


def check_options(options: OllamaOptions) -> None:
    """Raises RequestError for an option that is not supported."""
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in neutral:
            raise unsupported(f"options.{name}", f"options.{name} is not supported")
    if all(getattr(options, name) in (None, neutral) for name, neutral in _PENALTIES.items()):
        return
    if options.penalize_newline is False:
        message = "options.penalize_newline false is not supported: newlines are penalised like any other text"
        raise unsupported("options.penalize_newline", message)
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_last_n < _REPEAT_LAST_N:
        message = (
            f"options.repeat_last_n must be -1 (all tokens), 0 (no penalty), or at least {_REPEAT_LAST_N}: "
            "penalties count all tokens, not the last ones"
        )
        raise unsupported("options.repeat_last_n", message)


def check_keep_alive(keep_alive: str | float | None) -> None:
    """Raises RequestError for what is no duration."""
    if isinstance(keep_alive, str) and keep_alive and not _DURATION.fullmatch(keep_alive):
        message = f'keep_alive must be a number of seconds or a duration such as "5m", got {keep_alive[:50]!r}'
        raise RequestError(message, "keep_alive")


def _limit(num_predict: int | None) -> int | None:
    """The most output tokens; None = as many as fit: 0 and -1 mean no limit, -2 a full context."""
    if num_predict is None or -2 <= num_predict <= 0:
        return None
    if num_predict < 0:
        raise RequestError(f"options.num_predict must be at least -2, got {num_predict}", "options.num_predict")
    return num_predict


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
