"""A client that owns a server process: `Runtime(model_path=...).generate("...")` over HTTP.

Owns `headrace serve` as a child (its start, waiting for it, its end) and the mapping from calls to routes. Does not share code with the server: it
uses the native HTTP API (`native_client`) like any client. Its methods may be called from any thread.
"""

import atexit
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import fields
from typing import Any, Literal, TypeVar, Unpack, overload

from headrace.api.arguments import PooledInputs, chat_fields, media_json, without_none
from headrace.api.chat_reply import ChatDelta, ChatReply, read_chunk, read_reply
from headrace.api.http_client import HttpClient, Refusal
from headrace.api.methods import Methods, Route, weight_op_reply
from headrace.api.native_client import NativeClient
from headrace.api.options import (
    ChatOptions,
    EncodeOptions,
    EngineOptions,
    GenerateOptions,
    JsonSampling,
    Messages,
    RuntimeOptions,
    SamplingOptions,
    Tools,
    option_values,
    options_text,
    takes,
)
from headrace.config.server_args import ServerArgs
from headrace.config.settings import variable
from headrace.errors import AuthError, CapacityError, ConfigError, ExecutionError, NotFoundError, RequestError
from headrace.messages.weights import WeightOpReply
from headrace.processes import lifeline

FIRST_PORT, LAST_PORT = 10000, 40000
READY_POLL_S = 0.1
STOP_TIMEOUT_S = 10.0
KEY_VARIABLES = {"api_key": "HEADRACE_API_KEY", "admin_api_key": "HEADRACE_ADMIN_API_KEY"}
"""Keys are passed in the environment, since every user of the machine can read the command line."""


class ServerProcess:
    """A started server. It ends at `stop`, at exit, and when this process is killed.

    options: fields of `ServerArgs`; default for `port`: a free one. Raises ConfigError.
    url: of the server. key: to authorize with, None if it needs no key.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("ssl_certfile") is not None:
            raise ConfigError(
                "a Runtime talks to its own server without TLS: leave ssl_certfile out, or start `headrace serve`"
            )
        host = options.get("host", "127.0.0.1")
        port = options.get("port", 0) or free_port(host)
        self.url = f"http://{host}:{port}"
        self.key: str | None = options.get("admin_api_key") or options.get("api_key") or None
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "serve",
            *command_line({**options, "host": host, "port": port}),
        ]
        their_end, self._lifeline_fd = os.pipe()
        variables = {**_environment(options), lifeline.VARIABLE: f"{their_end}:{os.getpid()}"}
        try:
            self._popen = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, pass_fds=(their_end,))
        except BaseException:
            os.close(self._lifeline_fd)
            raise
        finally:
            os.close(their_end)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._owner_pid = os.getpid()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until it is ready. Raises ExecutionError if it exits first, or after `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            code = self._popen.poll()
            if code is not None:
                raise ExecutionError(f"the server exited during start-up (exit code {code}); see its log")
            # It refuses while it loads; before, nobody listens.
            with contextlib.suppress(Refusal, OSError), HttpClient(self.url).open("/ready", timeout_s=2.0):
                return
            time.sleep(READY_POLL_S)
        raise ExecutionError(f"the server was not ready within {timeout_s:g} s")

    def stop(self) -> None:
        """Stop the server: gracefully, then by force. Idempotent. Does nothing in the child of a fork, since the server belongs to the parent."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            atexit.unregister(self.stop)
            self._popen.terminate()
            try:
                self._popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
            os.close(self._lifeline_fd)


def free_port(host: str = "127.0.0.1") -> int:
    """A free port from 10000 to 40000. Raises ConfigError if there is none."""
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
        if name in KEY_VARIABLES or value is None:
            continue
        flag = name.replace("_", "-")
        if not isinstance(value, bool):
            words.append(f"--{flag}={value}")
        elif value != by_name[name].default:
            words.append(f"--{flag}" if value else f"--no-{flag}")
    return words


def _environment(options: dict[str, Any]) -> dict[str, str]:
    """Our environment without its options, which are meant for other servers (keys would lock us out of this one), with the keys of `options`."""
    theirs = {variable(f.name) for f in fields(ServerArgs)}
    own = {name: value for name, value in os.environ.items() if name not in theirs}
    given = {variable: options[name] for name, variable in KEY_VARIABLES.items() if options.get(name) is not None}
    return {**own, **given}


T = TypeVar("T")


class Runtime(Methods):
    """A server process owned by this program. A context manager; `shutdown` is also called at exit, and the server ends if this process is killed.
    What an `Engine` does as well: `Methods`.

    model: same as the option `model_path`. start_timeout_s: how long loading may take. options: as of an `Engine`; default for `port`: a free
    one. Raises ConfigError for unknown options, ExecutionError if the server does not become ready.
    """

    @takes(RuntimeOptions)
    def __init__(
        self,
        model: str | None = None,
        /,
        *,
        start_timeout_s: float = 600.0,
        **options: Unpack[EngineOptions],  # type: ignore[misc]
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

    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        asked = {
            "abort_all_requests": "true" if abort_all_requests else "false",
            "load_format": "flattened_bucket" if bucketed else None,
            "weight_version": weight_version,
        }
        path = f"/update_weights_from_tensor?{urllib.parse.urlencode(without_none(asked))}"
        return weight_op_reply(self._http.operate(path, b"".join(parts), {"Content-Type": "application/octet-stream"}))

    def encode(
        self,
        prompt: PooledInputs | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **others: Unpack[EncodeOptions],
    ) -> Any:
        """Like `Engine.encode`: a dict, or a list of dicts."""
        return self._http.ask("/encode", **without_none({"text": prompt, "input_ids": input_ids, **others}))

    def _call(self, here: object, over_http: Callable[[NativeClient], T]) -> T:
        return over_http(self._http)

    def _wait(self, here: object, over_http: Callable[[NativeClient], T]) -> T:
        return over_http(self._http)

    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self._http.ask(route, **fields)
        return reply

    def shutdown(self) -> None:
        """Stop the server. Idempotent. Does nothing in the child of a fork, since the server belongs to the parent."""
        self._server.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._server.exit_code is not None else f"process {self.pid}"
        return f"<Runtime {self.url}, {state}>"


def _body(prompt: object, sampling_params: object, others: dict[str, Any]) -> bytes:
    given = media_json({"text": prompt, "sampling_params": sampling_params, **others})
    return json.dumps(without_none(given)).encode()
