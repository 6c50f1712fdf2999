"""A client that owns a server process: `Runtime(model_path=...).generate("...")` over HTTP.

Owns the child process, its port and the waiting until it is ready. Does not share code with the server: it uses the native HTTP API like any
client. Its methods may be called from any thread.
"""

import atexit
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from headrace.api.weight_operations import WeightOperations
from headrace.config.server_args import ServerArgs
from headrace.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    ExecutionError,
    HeadraceError,
    NotFoundError,
    RequestError,
)
from headrace.frontend.runtime_settings import LogLevel
from headrace.frontend.weight_checks import TRUNCATE_SIZE
from headrace.messages.control import InternalState
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
from headrace.processes import lifeline

FIRST_PORT, LAST_PORT = 10000, 40000
READY_POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 16 << 20
"""Longest line of a stream that aiohttp may buffer: chunks carry the whole text so far."""
ENDED_EARLY = "the server's answer ended before it was complete"
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
"""Where an operation's fields are the body."""
_KEY_VARIABLES = {"api_key": "HEADRACE_API_KEY", "admin_api_key": "HEADRACE_ADMIN_API_KEY"}


class Runtime(WeightOperations):
    """A server process of our own. A context manager; `shutdown` is also called at exit, and the server ends when we are killed.

    Weights, pausing and memory: `WeightOperations`.

    start_timeout_s: how long loading may take. server_args: fields of `ServerArgs`; without `port` a free one is taken.
    Raises ConfigError for unknown options, ExecutionError when the server does not become ready.
    """

    def __init__(self, start_timeout_s: float = 600.0, **server_args: Any) -> None:
        host = server_args.setdefault("host", "127.0.0.1")
        port = server_args.setdefault("port", 0) or free_port(host)
        server_args["port"] = port
        self.url = f"http://{host}:{port}"
        environment = {**os.environ}
        for name, variable in _KEY_VARIABLES.items():
            # A key meant for another server would lock us out of this one.
            environment.pop(variable, None)
            if server_args.get(name) is not None:
                # Not on the command line, which every user of the machine can read.
                environment[variable] = server_args[name]
        key = server_args.get("admin_api_key") or server_args.get("api_key")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        command = [sys.executable, "-m", "headrace.cli", "serve", *command_line(server_args)]
        their_end, self._lifeline_fd = os.pipe()
        environment[lifeline.VARIABLE] = f"{their_end}:{os.getpid()}"
        try:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(their_end,))
        except BaseException:
            os.close(self._lifeline_fd)
            raise
        finally:
            os.close(their_end)
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._pid = os.getpid()
        atexit.register(self.shutdown)
        try:
            self._wait_ready(start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def generate(self, prompt: str | list[str] | None = None, sampling_params: Any = None, **others: Any) -> Any:
        """As `Engine.generate`: a dict, or a list of dicts; with `stream=True` an iterator of dicts."""
        body = _body(prompt, sampling_params, others)
        if others.get("stream"):
            return self._iterate(body)
        with self._open("/generate", body) as reply, _faults_mapped():
            return json.load(reply)

    async def async_generate(
        self, prompt: str | list[str] | None = None, sampling_params: Any = None, **others: Any
    ) -> AsyncGenerator[Any, None]:
        """Stream the answer: an async iterator of dicts."""
        body = _body(prompt, sampling_params, {**others, "stream": True})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        with _faults_mapped():
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers, read_bufsize=MAX_LINE_BYTES) as session,
                session.post(f"{self.url}/generate", data=body) as reply,
            ):
                if reply.status != 200:
                    raise _error(reply.status, await reply.read(), reply.headers.get("Retry-After"))
                async for line in reply.content:
                    if _is_done(line):
                        return
                    if (item := _event(line)) is not None:
                        yield item
        raise ExecutionError(ENDED_EARLY)

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Empty the prefix cache, waiting at most `timeout_s` seconds for requests to end. False when it cannot be now."""
        wait = f"?timeout={timeout_s}" if timeout_s else ""
        try:
            with self._open(f"/flush_cache{wait}", b"") as reply:
                return bool(reply.status == 200)
        except (AuthError, NotFoundError):
            raise
        except RequestError:
            return False

    def open_session(
        self, capacity_of_str_len: int = 0, session_id: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session; its id, for the `session_params` of `generate`. Raises RequestError, CapacityError."""
        given = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id, "timeout": timeout_s}
        with self._open("/open_session", json.dumps(given).encode()) as reply, _faults_mapped():
            return str(json.load(reply))

    def close_session(self, session_id: str) -> None:
        """Forget a session. Its running requests go on. Raises NotFoundError."""
        with self._open("/close_session", json.dumps({"session_id": session_id}).encode()) as reply, _faults_mapped():
            reply.read()

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """As `Engine.load_lora_adapter`; the path is one of the server's machine. Raises RequestError, CapacityError."""
        given = {"lora_name": lora_name, "lora_path": lora_path, "pinned": pinned}
        with self._open("/load_lora_adapter", json.dumps(given).encode()) as reply, _faults_mapped():
            reply.read()

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forget an adapter, once the requests that use it have ended. Raises NotFoundError."""
        given = {"lora_name": lora_name}
        with self._open("/unload_lora_adapter", json.dumps(given).encode()) as reply, _faults_mapped():
            reply.read()

    def lora_adapters(self) -> list[str]:
        """Names of the adapters that there are."""
        return [card["id"] for card in self._get("/v1/models")["data"] if card["parent"] is not None]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the samples of `rid`, or all. An unknown rid is harmless."""
        if rid or abort_all:
            self._ask("/abort_request", rid=rid or None, abort_all=abort_all)

    def internal_state(self) -> InternalState:
        """Counters and pool accounting of the schedulers, together."""
        return msgspec.convert(self._get("/internal_state"), InternalState)

    def get_loads(self) -> list[dict[str, Any]]:
        """Load of each replica: requests, tokens, throughput."""
        return list(self._get("/v1/loads")["loads"])

    def get_model_info(self) -> dict[str, Any]:
        """The served model: name, kind, sizes."""
        return dict(self._get("/model_info"))

    def get_server_info(self) -> dict[str, Any]:
        """Options (keys masked), what the scheduler said of the model, and the state of each replica."""
        return dict(self._get("/server_info"))

    def health(self, generate: bool = False) -> bool:
        """Whether the server lives; with `generate`, whether it makes a token."""
        try:
            self._get("/health_generate" if generate else "/health")
        except (CapacityError, ExecutionError):
            return False
        return True

    def metrics(self) -> str:
        """What /metrics shows."""
        with self._open("/metrics") as reply, _faults_mapped():
            return str(reply.read().decode())

    def tokenize(self, prompt: str | list[str], add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each of several. Raises RequestError."""
        found = self._ask("/tokenize", prompt=prompt, add_special_tokens=add_special_tokens)["tokens"]
        return list(found)

    def detokenize(self, tokens: list[int] | list[list[int]], skip_special_tokens: bool = True) -> str | list[str]:
        """The text of token ids, or of each of several lists of them. Raises RequestError."""
        found: str | list[str] = self._ask("/detokenize", tokens=tokens, skip_special_tokens=skip_special_tokens)[
            "text"
        ]
        return found

    def explain_request(self, rid: str) -> list[dict[str, Any]]:
        """What happened to the samples of one of the last requests. Raises NotFoundError."""
        return list(self._get(f"/v1/requests/{urllib.parse.quote(rid, safe='')}")["data"])

    def dump_requests(self) -> str:
        """Write what the last requests were to `dump_requests_dir`; the file's name. Raises RequestError, ExecutionError."""
        return str(self._ask("/dump_requests")["file"])

    def start_profile(
        self, output_name: str = "", num_steps: int = 0, activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU",)
    ) -> str:
        """As `Engine.start_profile`. Raises RequestError."""
        asked = {"output_dir": output_name or None, "num_steps": num_steps or None, "activities": activities}
        return str(self._ask("/start_profile", **asked)["message"])

    def stop_profile(self) -> str:
        """Write what was recorded; a line with the file's name. Raises RequestError."""
        return str(self._ask("/stop_profile")["message"])

    def start_expert_distribution_record(self) -> None:
        """Count the tokens that each layer of a mixture sends to each expert, from zero. Raises RequestError."""
        self._ask("/start_expert_distribution_record")

    def stop_expert_distribution_record(self) -> None:
        """Count no more; what there is can still be told. Raises RequestError."""
        self._ask("/stop_expert_distribution_record")

    def dump_expert_distribution_record(self) -> dict[str, Any]:
        """Under `layers` the tokens that each expert got, and what else the route replies. Counts begin again at zero. Raises RequestError."""
        return dict(self._ask("/dump_expert_distribution_record"))

    def configure_logging(
        self, level: LogLevel | None = None, log_requests: bool | None = None, log_requests_level: int | None = None
    ) -> dict[str, Any]:
        """Change what is logged, in every process; None = as it is. What now holds. Raises RequestError."""
        asked = {"level": level, "log_requests": log_requests, "log_requests_level": log_requests_level}
        now = self._ask("/configure_logging", **asked)
        return {name: now[name] for name in asked}

    def freeze_gc(self) -> None:
        """Leave what lives now out of garbage collection, in every process."""
        self._ask("/freeze_gc")

    def set_internal_state(self, **limits: float) -> dict[str, Any]:
        """Change limits (fields of `LimitChanges`) in every replica; what now holds. Raises RequestError."""
        return dict(self._ask("/set_internal_state", server_args=limits)["server_args"])

    def get_weights_by_name(self, name: str, truncate_size: int = TRUNCATE_SIZE) -> list[Any]:
        """See `WeightOperations.get_weights_by_name`."""
        answer = self._post("/get_weights_by_name", json.dumps({"name": name, "truncate_size": truncate_size}).encode())
        if isinstance(answer, dict):
            raise RequestError(answer["message"], "name")
        return list(answer)

    def _operate(self, operation: WeightOperation) -> WeightOpReply:
        body = json.dumps(msgspec.structs.asdict(operation)).encode()
        return _operation_reply(self._post(OPERATION_PATHS[type(operation)], body))

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
        return _operation_reply(self._post(path, b"".join(parts), {"Content-Type": "application/octet-stream"}))

    def _post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Any:
        """The answer to an operation, also when it says that it failed. Raises what `_error` makes of any other refusal."""
        request = urllib.request.Request(self.url + path, data=body, headers={**self._headers, **(headers or {})})
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
                if error.code == 400 and text.startswith(b'{"success"'):
                    return json.loads(text)
                raise _error(error.code, text, error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ExecutionError(f"the server cannot be reached: {error}") from error

    def encode(self, *_args: object, **_kwargs: object) -> Any:
        """Embeddings. Raises RequestError."""
        raise RequestError("encode is not supported yet: embedding models cannot be served")

    def score(self, *_args: object, **_kwargs: object) -> Any:
        """Scores of labels. Raises RequestError."""
        raise RequestError("score is not supported yet")

    def rerank(self, *_args: object, **_kwargs: object) -> Any:
        """Order of documents. Raises RequestError."""
        raise RequestError("rerank is not supported yet: cross-encoders cannot be served")

    def shutdown(self) -> None:
        """End the server: gently, then by force. Idempotent. In the child of a fork it does nothing: the server is the parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            atexit.unregister(self.shutdown)
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._lifeline_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _wait_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            code = self._process.poll()
            if code is not None:
                raise ExecutionError(f"the server exited during start-up (exit code {code}); see its log")
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=2.0) as reply:
                    if reply.status == 200:
                        return
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass  # nobody listens yet
            time.sleep(READY_POLL_S)
        raise ExecutionError(f"the server was not ready within {timeout_s:g} s")

    def _get(self, path: str) -> Any:
        with self._open(path) as reply, _faults_mapped():
            return json.load(reply)

    def _ask(self, path: str, **fields: object) -> Any:
        """The answer to a control request."""
        with self._open(path, json.dumps(fields).encode()) as reply, _faults_mapped():
            return json.load(reply)

    def _open(self, path: str, body: bytes | None = None) -> Any:
        """The reply to a POST, or without a body to a GET. Raises what `_error` makes of a refusal."""
        method = "GET" if body is None else "POST"
        request = urllib.request.Request(self.url + path, data=body, headers=self._headers, method=method)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise _error(error.code, error.read(), error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException) as error:
            raise ExecutionError(f"the server cannot be reached: {error}") from error

    def _iterate(self, body: bytes) -> Generator[dict[str, Any], None, None]:
        with self._open("/generate", body) as reply, _faults_mapped():
            lines: Iterable[bytes] = reply
            for line in lines:
                if _is_done(line):
                    return
                if (item := _event(line)) is not None:
                    yield item
        raise ExecutionError(ENDED_EARLY)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of 10000-40000 that nobody listens on now. Raises ConfigError when none is found."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT + 1), 200):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port between {FIRST_PORT} and {LAST_PORT} on {host}")


def command_line(options: dict[str, Any]) -> list[str]:
    """Options of `headrace serve` for fields of `ServerArgs`. Keys are left out. Raises ConfigError for an unknown field."""
    by_name = {option.name: option for option in fields(ServerArgs)}
    words = []
    for name, value in options.items():
        if name not in by_name:
            raise ConfigError(f"unknown option: {name}")
        if name in _KEY_VARIABLES or value is None:
            continue
        flag = name.replace("_", "-")
        if not isinstance(value, bool):
            words.append(f"--{flag}={value}")
        elif value != by_name[name].default:
            words.append(f"--{flag}" if value else f"--no-{flag}")
    return words


def _body(prompt: object, sampling_params: object, others: dict[str, Any]) -> bytes:
    given = {"text": prompt, "sampling_params": sampling_params, **others}
    return json.dumps({name: value for name, value in given.items() if value is not None}).encode()


@contextlib.contextmanager
def _faults_mapped() -> Iterator[None]:
    """A reply that breaks off or cannot be read is an ExecutionError."""
    try:
        yield
    except (OSError, http.client.HTTPException, aiohttp.ClientError, ValueError) as error:
        raise ExecutionError(f"{ENDED_EARLY} ({type(error).__name__})") from error


def _operation_reply(answer: Any) -> WeightOpReply:
    return WeightOpReply(0, answer["success"], answer["message"], answer["weight_version"])


def _is_done(line: bytes) -> bool:
    return line.strip() == b"data: [DONE]"


def _event(line: bytes) -> dict[str, Any] | None:
    """The object of an SSE line; None for other lines. Raises ExecutionError for an error frame."""
    if not line.startswith(b"data: "):
        return None
    item: dict[str, Any] = json.loads(line[len(b"data: ") :])
    if "error" in item:
        raise ExecutionError(item["error"]["message"])
    return item


def _error(status: int, body: bytes, retry_after: str | None) -> HeadraceError:
    """The error a reply stands for."""
    try:
        error = json.loads(body)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = f"the server answered {status}", None, None
    if status in (429, 503):
        return CapacityError(message, float(retry_after or 1.0), status)
    if status == 401:
        return AuthError(message, param, code)
    if status == 404:
        return NotFoundError(message, param, code)
    return RequestError(message, param, code) if status < 500 else ExecutionError(message)
