"""Request bodies of Ollama's API: every field of it.

A field is honoured, accepted at the value that asks for nothing, or refused by name; `options.py`, `chat_request.py` and `generation.py` say which.
Fields and options that are not here are ignored and noted (`bodies.py`), also where `forbid_unknown_fields` stands.
Runs in the event loop that serves HTTP.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


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
