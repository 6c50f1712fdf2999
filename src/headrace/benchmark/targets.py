"""What a workload is sent to: any OpenAI-compatible server over HTTP, or an Engine in this process.

Owns one request from the client's side: sending it, reading the stream, timing its chunks, and saying why it failed. Does not
decide what is sent when (serving.py). Runs in the event loop of the benchmark client.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import aiohttp
import msgspec

from headrace.api.http_client import DONE, EventParser
from headrace.benchmark.figures import RequestRecord
from headrace.benchmark.http_stream import post
from headrace.benchmark.workloads import Answer, TokenIds
from headrace.errors import ConfigError, HeadraceError
from headrace.plain_types import plain_reason

PromptForm = Literal["auto", "ids", "text", "chat"]
"""Of completions: token ids or text; chat: the text is the user's message of a chat completion. auto: ids if the server takes them, else text."""

_ERROR_CHARS = 200
_ENDED_EARLY = "the stream ended early"
# What of /server_info belongs beside a figure. A server's reply may hold more, and keys among it.
_INFO_FIELDS = (
    "version",
    "model_path",
    "served_model_name",
    "model_type",
    "dtype",
    "weight_dtype",
    "activations",
    "quantization",
    "kv_cache_dtype",
    "device",
    "attention_backend",
    "num_threads",
    "page_size",
    "max_total_tokens",
    "chunked_prefill_size",
    "max_running_requests",
    "disable_radix_cache",
    "disable_overlap_schedule",
)


class Target(Protocol):
    """Something that completes prompts and can be measured."""

    name: str

    async def complete(self, prompt: TokenIds, answer: Answer) -> RequestRecord:
        """Send one greedy request for such an answer. Failure is in the record, never raised."""
        ...

    async def flush(self) -> bool:
        """Empty the prefix cache; False when the target cannot."""
        ...

    async def describe(self) -> dict[str, Any]:
        """Model, precision and what else the target says of itself."""
        ...


class _Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True, gc=False):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """What the chunk adds to the output; of a chat, its reasoning too."""
        return (self.text or "") + (self.delta.reasoning_content or "") + (self.delta.content or "")


class _PromptDetails(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, frozen=True, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Embedding(msgspec.Struct, frozen=True, gc=False):
    embedding: str


class _Embeddings(msgspec.Struct, frozen=True, gc=False):
    data: list[_Embedding]
    usage: _Usage = _Usage()


class OpenAITarget:
    """A server that answers `POST /v1/completions`, or `/v1/chat/completions`, with a stream of events, or `/v1/embeddings`.

    decode: token ids -> text, for servers that take only text. headers: sent with every request (a key).
    Use `connect` to make one: it asks for the model's name and finds out whether prompts may be token ids.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        prompt_form: Literal["ids", "text", "chat"],
        decode: Callable[[TokenIds], str],
        extra_body: Mapping[str, Any],
    ) -> None:
        self.name = url
        self.model = model
        self.prompt_form = prompt_form
        self._session = session
        self._url = url
        self._decode = decode
        self._extra_body = extra_body
        self._decoder = msgspec.json.Decoder(_Chunk)

    @classmethod
    async def connect(
        cls,
        session: aiohttp.ClientSession,
        url: str,
        decode: Callable[[TokenIds], str],
        model: str | None = None,
        prompt_form: PromptForm = "auto",
        extra_body: Mapping[str, Any] | None = None,
        probe: Answer = Answer(1),
    ) -> "OpenAITarget":
        """Ask the server for its model and try one request, for the answer `probe`. Raises ConfigError when it cannot be reached or measured."""
        url = url.rstrip("/").removesuffix("/v1")
        target = cls(session, url, model or await _first_model(session, url), "ids", decode, extra_body or {})
        forms: tuple[Literal["ids", "text", "chat"], ...] = ("ids", "text") if prompt_form == "auto" else (prompt_form,)
        problems = []
        for form in forms:
            target.prompt_form = form
            record = await target.complete([1, 2, 3, 4], probe)
            if record.error is None:
                return target
            problems.append(f"prompt as {form}: {record.error}")
        path = "/v1/embeddings" if probe.is_embedding else target.path
        raise ConfigError(f"{url} does not answer {path}: {'; '.join(problems)}")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt_form == "chat" else "/v1/completions"

    async def complete(self, prompt: TokenIds, answer: Answer) -> RequestRecord:
        given = prompt if self.prompt_form == "ids" else self._decode(prompt)
        if answer.is_embedding:
            return await self.embed(given, len(prompt))
        return await self.complete_text(given, answer, len(prompt))

    async def embed(self, given: TokenIds | str, prompt_tokens: int) -> RequestRecord:
        """Ask for the embedding of a text or of token ids, in base64 as OpenAI's client does."""
        body = {"model": self.model, "input": given, "encoding_format": "base64", **self._extra_body}
        record = RequestRecord(start_s=time.perf_counter(), prompt_tokens=prompt_tokens)
        try:
            payload, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
            async with self._session.post(f"{self._url}/v1/embeddings", data=payload, headers=headers) as reply:
                content = await reply.read()
            record.end_s = time.perf_counter()
            if reply.status != 200:
                record.error = f"HTTP {reply.status}: {_shorten(content.decode(errors='replace'))}"
            else:
                said = msgspec.json.decode(content, type=_Embeddings)
                record.prompt_tokens, record.token_source = said.usage.prompt_tokens or prompt_tokens, "usage"
                if len(said.data) != 1 or not said.data[0].embedding:
                    record.error = "the reply has no embedding"
        except TimeoutError:
            record.error = "timed out"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"connection: {type(error).__name__}"
        except msgspec.DecodeError as error:
            record.error = f"bad reply: {plain_reason(error)}"
        record.end_s = record.end_s or time.perf_counter()
        return record

    async def complete_text(self, prompt: TokenIds | str, answer: Answer, prompt_tokens: int = 0) -> RequestRecord:
        """As `complete`, with the prompt as it goes over the wire. prompt_tokens: reported if the server does not say."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": answer.max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.prompt_form == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if not answer.ends:
            body["ignore_eos"] = True
        if answer.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": answer.schema, "strict": True},
            }
        body.update(self._extra_body)
        payload = msgspec.json.encode(body)
        record = RequestRecord(start_s=time.perf_counter(), prompt_tokens=prompt_tokens)
        session = self._session
        try:
            reply = await post(f"{self._url}{self.path}", payload, session.headers, session.timeout.total)
        except TimeoutError:
            record.error = "timed out"
        except OSError as error:
            record.error = f"connection: {type(error).__name__}"
        else:
            if reply.status == 200:
                self._read_stream(reply.pieces, record)
            else:
                record.error = f"HTTP {reply.status}: {_shorten(reply.body.decode(errors='replace'))}"
            if reply.error is not None and (record.error is None or record.error == _ENDED_EARLY):
                record.error = f"connection: {type(reply.error).__name__}"
        record.end_s = record.end_s or time.perf_counter()
        return record

    def _read_stream(self, pieces: Sequence[tuple[float, bytes]], record: RequestRecord) -> None:
        """Of a reply that has ended: until then the machine is the server's. (Others that end meanwhile are noted a little late.)"""
        parser = EventParser()
        texts: list[str] = []
        ended = False
        usage: _Usage | None = None
        record.end_s = pieces[-1][0] if pieces else time.perf_counter()
        for now_s, piece in pieces:
            for event in parser.feed(piece):
                if event == DONE:
                    ended = True
                    continue
                try:
                    chunk = self._decoder.decode(event)
                except msgspec.DecodeError as error:
                    record.error = f"bad chunk: {plain_reason(error)}"
                    return
                if chunk.error is not None:
                    record.error = f"in the stream: {_shorten(str(chunk.error))}"
                    return
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    ended = ended or choice.finish_reason is not None
                    if text := choice.new_text:
                        texts.append(text)
                        record.chunk_s.append(now_s)
        record.text = "".join(texts)
        record.output_tokens = len(texts)
        if usage is not None and usage.completion_tokens is not None:
            record.token_source = "usage"
            record.output_tokens = usage.completion_tokens
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            details = usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0
        if not ended:
            record.error = _ENDED_EARLY

    async def flush(self) -> bool:
        """`POST /flush_cache`, which Headrace and SGLang have."""
        try:
            async with self._session.post(f"{self._url}/flush_cache") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def describe(self) -> dict[str, Any]:
        """What /server_info says (Headrace and SGLang have it), and how prompts are sent."""
        info = await _get_json(self._session, f"{self._url}/server_info")
        return {"model": self.model, "prompt_form": self.prompt_form, **_shown(info)}


class EngineTarget:
    """An Engine of this process. What waits runs in a thread."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name = name
        self._engine = engine

    async def complete(self, prompt: TokenIds, answer: Answer) -> RequestRecord:
        """See Target. A chunk is one item of the stream that brought new tokens."""
        record = RequestRecord(start_s=time.perf_counter(), prompt_tokens=len(prompt), token_source="usage")
        try:
            if answer.is_embedding:
                await self._engine.async_encode(input_ids=prompt)
            else:
                await self._generate(prompt, answer, record)
        except HeadraceError as error:
            record.error = f"{type(error).__name__}: {_shorten(error.message)}"
        record.end_s = time.perf_counter()
        return record

    async def _generate(self, prompt: TokenIds, answer: Answer, record: RequestRecord) -> None:
        sampling_params: dict[str, Any] = {
            "temperature": 0.0,
            "max_new_tokens": answer.max_new_tokens,
            "ignore_eos": not answer.ends,
        }
        if answer.schema is not None:
            sampling_params["json_schema"] = json.dumps(answer.schema)
        stream = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling_params, stream=True)
        async for item in stream:
            meta = item["meta_info"]
            if meta["completion_tokens"] > record.output_tokens:
                record.chunk_s.append(time.perf_counter())
                record.output_tokens = meta["completion_tokens"]
            record.cached_tokens = meta.get("cached_tokens", 0)
            record.text = item["text"]
            reason = meta.get("finish_reason")
            if reason and reason["type"] == "abort":
                record.error = f"aborted: {reason.get('message')}"

    async def flush(self) -> bool:
        return bool(await asyncio.to_thread(self._engine.flush_cache))

    async def describe(self) -> dict[str, Any]:
        return _shown(await asyncio.to_thread(self._engine.get_server_info))


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    models = (await _get_json(session, f"{url}/v1/models")).get("data")
    match models:
        case [{"id": str(name)}, *_]:
            return name
    raise ConfigError(f"{url}/v1/models lists no model; is the server running? If it is, give the name with --model")


def _shown(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: info[key] for key in _INFO_FIELDS if isinstance(info.get(key), str | int | float | bool)}


async def _get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                return {}
            body = msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_CHARS else line[: _ERROR_CHARS - 1] + "…"
