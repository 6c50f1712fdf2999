"""What `headrace top` reads of a server, over HTTP.

Owns the connection: which routes are asked, which the key does not open, and when the server counts as gone. A thread of its own may run it.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from headrace.cli.top_figures import Load, Samples, label, parse_metrics
from headrace.errors import ConfigError
from headrace.plain_types import plain_reason

TIMEOUT_S = 10.0
MAX_REQUESTS = 100
"""Most requests to list."""

METRICS, LOADS, REQUESTS, STATE = "/metrics", "/v1/loads", f"/v1/requests?limit={MAX_REQUESTS}", "/internal_state"
_INFO = "/server_info"

_UNAUTHORIZED, _NOT_FOUND = 401, 404

_T = TypeVar("_T")


class Request(msgspec.Struct, frozen=True):
    """A sample as `/v1/requests` lists it. Times are in seconds."""

    rid: str = ""
    state: str = ""
    key: str | None = None
    adapter: str | None = None
    dp_rank: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    age_s: float = 0.0
    finish_reason: str | None = None


class FrontendState(msgspec.Struct, frozen=True):
    """Counters of the main process."""

    num_sessions: int = 0
    num_restarts: int = 0


class State(msgspec.Struct, frozen=True):
    """The counters of `/internal_state`, those of all replicas together."""

    num_steps: int = 0
    num_retracted: int = 0
    num_aborted: int = 0
    num_finished: int = 0
    paused: str = ""
    frontend: FrontendState = FrontendState()


class _Loads(msgspec.Struct, frozen=True):
    loads: list[Load]


class _Requests(msgspec.Struct, frozen=True):
    data: list[Request]


class _Info(msgspec.Struct, frozen=True):
    served_model_name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A server at one moment. None = the key does not open it, or the server did not answer.

    at_s: time.monotonic() when its metrics were asked for. started_unix_s: 0.0 = not known. has_metrics: False with --disable-metrics.
    problem: what the server said instead of an answer.
    """

    at_s: float
    model: str = ""
    version: str = ""
    started_unix_s: float = 0.0
    has_metrics: bool = True
    metrics: Samples | None = None
    loads: list[Load] | None = None
    requests: list[Request] | None = None
    state: State | None = None
    problem: str = ""


class ServerReader:
    """See the module docstring. url: with or without `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._statuses: dict[str, int] = {}
        self._problem = ""
        self._info: _Info | None = None

    def read(self) -> Snapshot:
        """Ask the server. Raises ConfigError when nothing answers, or no Headrace server."""
        try:
            return self._read()
        except ConfigError:
            # The next server at this address may have other keys.
            self._statuses.clear()
            self._info = None
            raise

    def _read(self) -> Snapshot:
        self._problem = ""
        at_s = time.monotonic()
        metrics = self._metrics()
        loads = self._json(LOADS, _Loads)
        requests, state = self._json(REQUESTS, _Requests), self._json(STATE, State)
        if self._statuses.get(METRICS) == self._statuses.get(LOADS) == _NOT_FOUND:
            raise ConfigError(f"the server at {self.url} is no Headrace server")
        if metrics is not None:
            model, version = (label(metrics, "build_info", key) for key in ("model_name", "version"))
        else:
            self._info = self._info or self._json(_INFO, _Info)
            model, version = (self._info.served_model_name, self._info.version) if self._info else ("", "")
        return Snapshot(
            at_s=at_s,
            model=model,
            version=version,
            started_unix_s=_started(metrics) if metrics is not None else 0.0,
            has_metrics=self._statuses.get(METRICS) != _NOT_FOUND,
            metrics=metrics,
            loads=loads.loads if loads else None,
            requests=requests.data if requests else None,
            state=state,
            problem=self._problem,
        )

    def _metrics(self) -> Samples | None:
        body = self._get(METRICS)
        if body is None:
            return None
        try:
            return parse_metrics(body.decode())
        except ValueError as error:
            raise ConfigError(f"the server at {self.url} is no Headrace server: {METRICS} has no metrics") from error

    def _json(self, path: str, kind: type[_T]) -> _T | None:
        """The answer of a route; None if it has none for us. Raises ConfigError."""
        body = self._get(path)
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"the server at {self.url} is no Headrace server: {path}: {plain_reason(error)}"
            ) from error

    def _get(self, path: str) -> bytes | None:
        """The body of a reply with status 200, else None. What was refused, or is not there, is not asked for again."""
        if self._statuses.get(path) in (_UNAUTHORIZED, _NOT_FOUND):
            return None
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                body: bytes = response.read()
            self._statuses[path] = 200
            return body
        except urllib.error.HTTPError as error:
            with error:
                self._statuses[path] = error.code
                if error.code not in (_UNAUTHORIZED, _NOT_FOUND):
                    self._problem = _message(error)
            return None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"no server answers at {self.url}: {reason}") from error


def _started(metrics: Samples) -> float:
    """Unix time of the main process's start."""
    series = metrics.get("process_start_time_seconds", ())
    return next((value for labels, value in series if labels.get("process") == "main"), 0.0)


def _message(error: urllib.error.HTTPError) -> str:
    """The message of an error reply, or its status."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return f"the server answered with HTTP status {error.code}"
