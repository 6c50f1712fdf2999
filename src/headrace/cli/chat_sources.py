"""Where the replies of the terminal chat come from: an Engine of this process (`EngineChat`), or a running server (`ServerChat`).

Messages and tools are those of OpenAI's chat completions, for both. Runs in the main thread.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, get_type_hints
from urllib.error import URLError

import msgspec
from msgspec import Meta

from headrace.api.chat_reply import ChatDelta, read_chunk
from headrace.api.http_client import FAULTS, HttpClient, Refusal, error_of, events
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ContextLengthError, HeadraceError, RequestError
from headrace.plain_types import plain_reason

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]

_CONNECT_TIMEOUT_S = 10.0
_READ_BYTES = 65536
_TELL_PROGRESS = ("headrace", "llamacpp")
"""What servers with `return_progress` call the owner of their models. Others might refuse the field."""

OTHER_NAMES = {"max_tokens": "max_new_tokens"}
"""Names of settings as OpenAI's API has them."""


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How replies are sampled; None = as the model or the server likes."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None

    def given(self) -> dict[str, float]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def with_value(self, name: str, value: object) -> "ChatSampling":
        """The same with another value, a number or its text; None = not set. Raises ConfigError that names what is wrong."""
        name = OTHER_NAMES.get(name, name)
        kinds = get_type_hints(ChatSampling, include_extras=True)
        if name not in kinds:
            raise ConfigError(f"there is no setting {name!r}; there are {', '.join(kinds)}")
        try:
            checked: Any = None if value is None else msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name} {value!r}: {plain_reason(error).replace(' or null', '')}") from None
        return dataclasses.replace(self, **{name: checked})


@dataclass(frozen=True, slots=True)
class Piece:
    """Newly arrived text. num_tokens: of the reply so far. is_reasoning: it is not part of the answer. is_cut: the limit of tokens ends the reply."""

    text: str
    num_tokens: int
    is_reasoning: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of the prompt the model has read, in tokens."""

    processed: int
    total: int


@dataclass(slots=True)
class ToolUse:
    """A complete tool call. arguments: JSON."""

    id: str
    name: str
    arguments: str


Part = Piece | Reading | ToolUse


class ChatSource(Protocol):
    """Where replies come from. sampling: of the next reply."""

    name: str
    sampling: ChatSampling

    def reply(self, messages: list[Message], json_schema: str | None, tools: Tools) -> Iterator[Part]:
        """How the prompt is read, then the next message of the assistant, piece by piece, its tool calls last; closing the iterator stops it. Raises
        HeadraceError.

        json_schema: what the message must match, as JSON; None = any text. tools: what the model may call.
        """
        ...


class EngineChat:
    """Replies of an Engine in this process; a context manager that owns it."""

    def __init__(self, server_args: ServerArgs, sampling: ChatSampling) -> None:
        """Load the tokenizer and its template first: a model that cannot chat is refused before its weights are read."""
        from headrace.api.engine import Engine
        from headrace.processes.model_files import ModelFiles

        self.name = server_args.served_name
        with closing(ModelFiles(server_args)) as files:
            if files.chat_template is None:
                raise ConfigError(f"{self.name} has no chat template; give one with --chat-template")
        self.sampling = sampling
        self._engine = Engine(**dataclasses.asdict(server_args))

    def __enter__(self) -> "EngineChat":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def reply(self, messages: list[Message], json_schema: str | None, tools: Tools) -> Iterator[Part]:
        options: dict[str, Any] = {"return_progress": True, **_as_options(self.sampling)}
        stream = self._engine.chat(messages, tools=tools or None, stream=True, json_schema=json_schema, **options)
        try:
            with closing(stream) as deltas:
                yield from _parts(deltas)
        except ContextLengthError as error:
            raise RequestError(f"{error.message} /clear starts again.") from None


class ServerChat:
    def __init__(self, url: str, sampling: ChatSampling, model: str | None = None, api_key: str | None = None) -> None:
        """Ask the server for its model when none is named. Raises ConfigError when it does not answer."""
        self._http = HttpClient(url, api_key)
        self.sampling = sampling
        self._tells_progress = False
        self.name = self._first_model() if model is None else self._asked_about(model)

    def reply(self, messages: list[Message], json_schema: str | None, tools: Tools) -> Iterator[Part]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": self._tells_progress or None,
            "tools": list(tools) or None,
            **_as_options(self.sampling),
        }
        if json_schema is not None:
            schema = {"name": "schema", "schema": json.loads(json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        payload = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        with self._open("/v1/chat/completions", payload) as response:
            yield from _parts(delta for chunk in _chunks(response) for delta in read_chunk(chunk))

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            try:
                listed = json.load(response)
            except FAULTS:
                listed = None
        match listed:
            case {"data": [{"id": str(name), **card}, *_]}:
                self._tells_progress = card.get("owned_by") in _TELL_PROGRESS
                return name
        raise ConfigError(f"{self._http.url}/v1/models names no model; give one")

    def _asked_about(self, model: str) -> str:
        """`model`, and whether its server tells progress: one that lists no models does not."""
        with contextlib.suppress(HeadraceError):
            self._first_model()
        return model

    def _open(self, path: str, payload: bytes | None = None) -> Any:
        try:
            return self._http.open(path, payload, timeout_s=None if payload else _CONNECT_TIMEOUT_S)
        except Refusal as refusal:
            raise RequestError(error_message(refusal.status, refusal.error)) from refusal
        except FAULTS as error:
            raise no_server(self._http.url, error) from error


def _as_options(sampling: ChatSampling) -> dict[str, Any]:
    given = sampling.given()
    return {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}


def _parts(deltas: Iterable[ChatDelta]) -> Iterator[Part]:
    """Tokens are counted by the deltas until the usage at the end says. Raises RequestError for a call without a name."""
    num_tokens = 0
    calls: dict[int, ToolUse] = {}
    for delta in deltas:
        if delta.progress is not None:
            yield Reading(delta.progress.processed, delta.progress.total)
        for text, is_reasoning in ((delta.reasoning, True), (delta.text, False)):
            if text:
                num_tokens += 1
                yield Piece(text, num_tokens, is_reasoning)
        if (call := delta.tool_call) is not None:
            if call.index not in calls:
                if not call.name:
                    raise RequestError("the reply has a piece of a tool call without a name")
                calls[call.index] = ToolUse(call.id or f"call_{call.index}", call.name, "")
            calls[call.index].arguments += call.arguments
        if delta.finish_reason == "length":
            yield Piece("", num_tokens, is_cut=True)
        if delta.usage is not None:
            yield Piece("", delta.usage.completion_tokens)
    yield from (calls[index] for index in sorted(calls))


def new_texts(items: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What each output of an Engine's cumulative stream adds to the one before."""
    seen = 0
    for item in items:
        text = item["text"]
        yield text[seen:]
        seen = max(seen, len(text))


def _chunks(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON chunks of an event stream. Raises RequestError for an error frame and when the stream breaks off."""
    try:
        for event in events(iter(partial(response.read1, _READ_BYTES), b"")):
            chunk = json.loads(event)
            if not isinstance(chunk, dict):
                raise RequestError(f"the reply was not understood: {event[:80]!r} is not a JSON object")
            if chunk.get("error"):
                raise RequestError(error_message(500, error_of(event)))
            yield chunk
    except (EOFError, *FAULTS) as error:
        raise RequestError(f"the reply was cut off: {error}") from error


def error_message(status: int, error: dict[str, Any]) -> str:
    """error: of the reply, see `Refusal`."""
    return str(error.get("message", f"the server answered with HTTP status {status}"))


def no_server(url: str, error: Exception) -> ConfigError:
    reason = error.reason if isinstance(error, URLError) else error
    return ConfigError(f"no server answers at {url}: {reason}")
