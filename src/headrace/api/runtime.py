"""A client that owns a server process: `Runtime(model_path=...).generate("...")` over HTTP.

Owns the mapping from calls to routes. Does not share code with the server: it uses the native HTTP API (`native_client`) like any client.
Its methods may be called from any thread.
"""

import json
import urllib.parse
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import msgspec

from headrace.api.chat_reply import ChatDelta, ChatReply, chat_fields, read_chunk, read_reply
from headrace.api.generate_request import PooledInputs
from headrace.api.media import media_json
from headrace.api.native_client import NativeClient
from headrace.api.operations import Operations
from headrace.api.options import (
    ChatOptions,
    EncodeOptions,
    EngineOptions,
    GenerateOptions,
    JsonSampling,
    Messages,
    SamplingOptions,
    Tools,
    option_values,
    options_text,
)
from headrace.api.scores import Route, Scores
from headrace.api.server_process import ServerProcess
from headrace.api.weight_operations import WeightOperations
from headrace.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    ExecutionError,
    NotFoundError,
    RequestError,
)
from headrace.frontend.weight_checks import TRUNCATE_SIZE
from headrace.messages.control import InternalState
from headrace.messages.operations import Operation
from headrace.messages.weights import (
    CancelUpdate,
    ContinueGeneration,
    DestroyGroup,
    InitGroup,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    WeightOperation,
    WeightOpReply,
)

OPERATION_PATHS: dict[type, str] = {
    PauseGeneration: "/pause_generation",
    ContinueGeneration: "/continue_generation",
    UpdateFromDisk: "/update_weights_from_disk",
    UpdateFromDistributed: "/update_weights_from_distributed",
    CancelUpdate: "/cancel_weight_update",
    InitGroup: "/init_weights_update_group",
    DestroyGroup: "/destroy_weights_update_group",
    SaveWeights: "/save_sharded_state",
    SetWeightVersion: "/update_weight_version",
    ReleaseMemory: "/release_memory_occupation",
    ResumeMemory: "/resume_memory_occupation",
}
"""Routes of operations whose fields are the body."""


class Runtime(Operations, WeightOperations, Scores):
    """A server process owned by this program. A context manager; `shutdown` is also called at exit, and the server ends if this process is killed.

    Profiles and caches: `Operations`. Weights, pausing and memory: `WeightOperations`.

    model: same as the option `model_path`. start_timeout_s: how long loading may take. options: as of an `Engine`; default for `port`: a free
    one. Raises ConfigError for unknown options, ExecutionError if the server does not become ready.
    """

    def __init__(
        self, model: str | None = None, /, *, start_timeout_s: float = 600.0, **options: Unpack[EngineOptions]
    ) -> None:
        server_args = option_values(model, {**options})
        if server_args.get("ray"):
            raise ConfigError(
                "ray: a Runtime owns one server; start `headrace serve --ray`, and use a client of its API"
            )
        self._server = ServerProcess(server_args)
        self.url = self._server.url
        self._http = NativeClient(self.url, self._server.key)
        try:
            self._server.wait_ready(start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    __init__.__doc__ = f"Start a server. Options:\n\n{options_text()}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    @overload
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: JsonSampling | Sequence[JsonSampling] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: Literal[True],
        **others: Unpack[GenerateOptions],
    ) -> Generator[dict[str, Any], None, None]: ...

    @overload
    def generate(
        self,
        prompt: str,
        sampling_params: SamplingOptions | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> dict[str, Any]: ...

    @overload
    def generate(
        self,
        prompt: list[str],
        sampling_params: JsonSampling | Sequence[JsonSampling] | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> list[dict[str, Any]]: ...

    @overload
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: JsonSampling | Sequence[JsonSampling] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: JsonSampling | Sequence[JsonSampling] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any:
        """Like `Engine.generate`: a dict, or a list of dicts; with `stream=True` an iterator of dicts."""
        body = _body(prompt, sampling_params, {"input_ids": input_ids, "stream": stream, **others})
        if stream:
            return self._http.stream("/generate", body)
        return self._http.fetch("/generate", body)

    def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: JsonSampling | Sequence[JsonSampling] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: Literal[True] = True,
        **others: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Any, None]:
        """Stream the reply: an async iterator of dicts."""
        body = _body(prompt, sampling_params, {"input_ids": input_ids, "stream": stream, **others})
        return self._http.astream("/generate", body)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatReply: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Generator[ChatDelta, None, None]: ...

    def chat(
        self, messages: Messages, *, tools: Tools | None = None, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatReply | Generator[ChatDelta, None, None]:
        """Like `Engine.chat`: a reply, or with `stream` an iterator of what is new."""
        body = json.dumps(chat_fields(messages, tools, stream, options)).encode()
        if stream:
            return self._chat_stream(body)
        return read_reply(self._http.fetch("/v1/chat/completions", body))

    def _chat_stream(self, body: bytes) -> Generator[ChatDelta, None, None]:
        with closing(self._http.stream("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                yield from read_chunk(chunk)

    async def async_chat(
        self, messages: Messages, *, tools: Tools | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatDelta, None]:
        """Stream the reply: an async iterator of what is new."""
        body = json.dumps(chat_fields(messages, tools, True, options)).encode()
        async with aclosing(self._http.astream("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                for delta in read_chunk(chunk):
                    yield delta

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Empty the prefix cache, waiting at most `timeout_s` seconds for requests to end. False if some still run."""
        wait = f"?timeout={timeout_s}" if timeout_s else ""
        try:
            with self._http.open(f"/flush_cache{wait}", b"") as reply:
                return bool(reply.status == 200)
        except (AuthError, NotFoundError):
            raise
        except RequestError:
            return False

    def open_session(
        self, capacity_of_str_len: int = 0, session_id: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session and return its id, for the `session_params` of `generate`. Raises RequestError, CapacityError."""
        given = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout": timeout_s}
        return str(self._http.ask("/open_session", **given))

    def close_session(self, session_id: str) -> None:
        """Close a session. Its running requests continue. Raises NotFoundError."""
        self._http.tell("/close_session", session_id=session_id)

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Like `Engine.load_lora_adapter`; the path is on the server's machine. Raises RequestError, CapacityError."""
        self._http.tell("/load_lora_adapter", lora_name=lora_name, lora_path=lora_path, pinned=pinned)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter, once the requests that use it have ended. Raises NotFoundError."""
        self._http.tell("/unload_lora_adapter", lora_name=lora_name)

    def lora_adapters(self) -> list[str]:
        """Names of all adapters."""
        return [card["id"] for card in self._http.get("/v1/models")["data"] if card["parent"] is not None]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the samples of `rid`, or all. Unknown rids are ignored."""
        if rid or abort_all:
            self._http.ask("/abort_request", rid=rid or None, abort_all=abort_all)

    def internal_state(self) -> InternalState:
        """Counters and pool accounting of all schedulers together."""
        return msgspec.convert(self._http.get("/internal_state"), InternalState)

    def get_loads(self) -> list[dict[str, Any]]:
        """Load of each replica: requests, tokens, throughput."""
        return list(self._http.get("/v1/loads")["loads"])

    def get_model_info(self) -> dict[str, Any]:
        """The served model: name, type, sizes."""
        return dict(self._http.get("/model_info"))

    def get_server_info(self) -> dict[str, Any]:
        """Options (keys masked), facts about the model, and the state of each replica."""
        return dict(self._http.get("/server_info"))

    def health(self, generate: bool = False) -> bool:
        """Whether the server is alive; with `generate`, whether it generates a token."""
        try:
            self._http.get("/health_generate" if generate else "/health")
        except (CapacityError, ExecutionError):
            return False
        return True

    def metrics(self) -> str:
        """The text of /metrics."""
        return self._http.text("/metrics")

    def tokenize(self, prompt: str | list[str], add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each of several. Raises RequestError."""
        found = self._http.ask("/tokenize", prompt=prompt, add_special_tokens=add_special_tokens)["tokens"]
        return list(found)

    def detokenize(self, tokens: list[int] | list[list[int]], skip_special_tokens: bool = True) -> str | list[str]:
        """The text of token ids, or of each of several lists of them. Raises RequestError."""
        found: str | list[str] = self._http.ask("/detokenize", tokens=tokens, skip_special_tokens=skip_special_tokens)[
            "text"
        ]
        return found

    def explain_request(self, rid: str) -> list[dict[str, Any]]:
        """Timelines of the samples of a recent request. Raises NotFoundError."""
        return list(self._http.get(f"/v1/requests/{urllib.parse.quote(rid, safe='')}")["data"])

    def latest_requests(self, limit: int = 100) -> list[dict[str, Any]]:
        """Like `Engine.latest_requests`, of the server's key. Raises RequestError."""
        return list(self._http.get(f"/v1/requests?limit={limit}")["data"])

    def get_weights_by_name(self, name: str, truncate_size: int = TRUNCATE_SIZE) -> list[Any]:
        """See `WeightOperations.get_weights_by_name`."""
        answer = self._http.operate(
            "/get_weights_by_name", json.dumps({"name": name, "truncate_size": truncate_size}).encode()
        )
        if isinstance(answer, dict):
            raise RequestError(answer["message"], "name")
        return list(answer)

    def check_weights(
        self,
        action: str = "checksum",
        *,
        allow_quant_error: bool = False,
        skip_tensor_list: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """See `WeightOperations.check_weights`."""
        names = None if skip_tensor_list is None else list(skip_tensor_list)
        asked = {"action": action, "allow_quant_error": allow_quant_error, "skip_tensor_list": names}
        return dict(self._http.operate("/weights_checker", json.dumps(asked).encode()))

    def post_process_weights(
        self, *, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> tuple[bool, str]:
        """See `WeightOperations.post_process_weights`."""
        asked = {
            "restore_weights_before_load": restore_weights_before_load,
            "post_process_quantization": post_process_quantization,
        }
        reply = self._http.operate("/post_process_weights", json.dumps(asked).encode())
        return reply["success"], reply["message"]

    def _ask(self, operation: Operation[Any, Any], request: msgspec.Struct) -> Any:
        assert operation.route is not None, operation.name
        fields = msgspec.to_builtins(request)
        if operation.route.method == "GET":
            given = {name: value for name, value in fields.items() if value is not None}
            return self._http.get(f"{operation.route.path}?{urllib.parse.urlencode(given)}")
        return self._http.ask(operation.route.path, **fields)

    def _operate(self, operation: WeightOperation) -> WeightOpReply:
        body = json.dumps(msgspec.structs.asdict(operation)).encode()
        return _operation_reply(self._http.operate(OPERATION_PATHS[type(operation)], body))

    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        asked = {"abort_all_requests": "true" if abort_all_requests else "false"}
        if bucketed:
            asked["load_format"] = "flattened_bucket"
        if weight_version is not None:
            asked["weight_version"] = weight_version
        path = f"/update_weights_from_tensor?{urllib.parse.urlencode(asked)}"
        return _operation_reply(self._http.operate(path, b"".join(parts), {"Content-Type": "application/octet-stream"}))

    def encode(
        self,
        prompt: PooledInputs | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **others: Unpack[EncodeOptions],
    ) -> Any:
        """Like `Engine.encode`: a dict, or a list of dicts."""
        given = {"text": prompt, "input_ids": input_ids, **others}
        return self._http.ask("/encode", **{name: value for name, value in given.items() if value is not None})

    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self._http.ask(route, **fields)
        return reply

    def shutdown(self) -> None:
        """Stop the server. Idempotent. Does nothing in the child of a fork, since the server belongs to the parent."""
        self._server.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._server.exit_code is not None else f"process {self.pid}"
        return f"<Runtime {self.url}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _body(prompt: object, sampling_params: object, others: dict[str, Any]) -> bytes:
    given = {"text": prompt, "sampling_params": sampling_params, **others}
    given = media_json(given)
    return json.dumps({name: value for name, value in given.items() if value is not None}).encode()


def _operation_reply(answer: Any) -> WeightOpReply:
    return WeightOpReply(0, answer["success"], answer["message"], answer["weight_version"])
