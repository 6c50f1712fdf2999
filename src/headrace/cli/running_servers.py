"""`headrace ps`, the servers of this machine; and what it and `headrace top` read of one over HTTP: its load, its latest requests, once its name.

Owns how servers are found (processes whose command line is that of a server, and the ports on which these listen; Linux only, as the rest), which
routes are asked, which the key does not open, and when a server counts as gone. A thread of its own may run a `ServerReader`.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from headrace.api.http_client import FAULTS, HttpClient, Refusal
from headrace.benchmark.tables import print_table
from headrace.cli.chat_sources import error_message, no_server
from headrace.errors import ConfigError
from headrace.plain_types import plain_reason

TIMEOUT_S = 10.0
LOADS, REQUESTS, INFO, METRICS = "/v1/loads", "/v1/requests?limit=100", "/server_info", "/metrics"
_CLOSED = (401, 404)
_MODEL = re.compile(rb'headrace[:_]build_info\{[^}]*model_name="([^"\\]*)"')

_T = TypeVar("_T")

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = ("-X", "-W")
"""Options of Python before its program that have a value of their own."""


class Load(msgspec.Struct, frozen=True):
    """A replica's load as `/v1/loads` gives it."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_grammar_queue_reqs: int = 0
    token_usage: float = 0.0
    cache_hit_rate: float = 0.0
    gen_throughput: float = 0.0

    @property
    def num_waiting(self) -> int:
        """Those whose grammar is being compiled wait, too."""
        return self.num_waiting_reqs + self.num_grammar_queue_reqs


class Request(msgspec.Struct, frozen=True):
    """A sample as `/v1/requests` lists it. Times are in seconds."""

    rid: str = ""
    state: str = ""
    key: str | None = None
    adapter: str | None = None
    dp_rank: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    age_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float | None = None
    finish_reason: str | None = None


class _Loads(msgspec.Struct, frozen=True):
    loads: list[Load]


class _Requests(msgspec.Struct, frozen=True):
    data: list[Request]


class _Info(msgspec.Struct, frozen=True):
    served_model_name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A server at one moment. None = the key does not open it, or the server did not answer: then `problem` is what it said."""

    model: str = ""
    version: str = ""
    loads: list[Load] | None = None
    requests: list[Request] | None = None
    problem: str = ""


class ServerReader:
    """A connection. url: with or without `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._http = HttpClient(url, api_key)
        self.url = self._http.url
        self._forget()

    def _forget(self) -> None:
        self._statuses: dict[str, int] = {}
        self._info = _Info()

    def read(self) -> Snapshot:
        """Ask the server. Raises ConfigError when nothing answers, or no Headrace server."""
        self._problem = ""
        try:
            loads, requests = self._json(LOADS, _Loads), self._json(REQUESTS, _Requests)
            self._info = self._info if self._info.served_model_name else self._named()
        except ConfigError:
            self._forget()  # the next server at this address may have other keys
            raise
        if self._statuses[LOADS] == self._statuses[REQUESTS] == 404:
            raise ConfigError(f"the server at {self.url} is not a Headrace server")
        return Snapshot(
            model=self._info.served_model_name,
            version=self._info.version,
            loads=loads.loads if loads else None,
            requests=requests.data if requests else None,
            problem=self._problem,
        )

    def _named(self) -> _Info:
        """The server's model; without the key that of its metrics, which need none."""
        if info := self._json(INFO, _Info):
            return info
        found = _MODEL.search(self._get(METRICS) or b"")
        return _Info(found[1].decode(errors="replace") if found else "")

    def _json(self, path: str, kind: type[_T]) -> _T | None:
        """The answer of a route; None if it has none for us. Raises ConfigError."""
        body = self._get(path)
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            reason = f"{path.partition('?')[0]}: {plain_reason(error)}"
            raise ConfigError(f"the server at {self.url} is not a Headrace server: {reason}") from error

    def _get(self, path: str) -> bytes | None:
        """The body of a reply with status 200, else None. What was refused, or is not there, is not asked for again."""
        if self._statuses.get(path) in _CLOSED:
            return None
        try:
            with self._http.open(path, timeout_s=TIMEOUT_S) as response:
                body: bytes = response.read()
            self._statuses[path] = 200
            return body
        except Refusal as refusal:
            self._statuses[path] = refusal.status
            if refusal.status not in _CLOSED:
                self._problem = error_message(refusal.status, refusal.error)
            return None
        except FAULTS as error:
            raise no_server(self.url, error) from error


@dataclass(frozen=True, slots=True)
class Found:
    """A server's process. url: "" while it does not listen yet."""

    pid: int
    url: str
    age_s: float


def is_server(words: Sequence[str]) -> bool:
    """Whether a command line starts a server: `headrace serve`, `python -m headrace.cli serve`, `-m headrace.launch_server`."""
    match [PurePath(word).name for word in _without_python(words)]:
        case ["headrace.launch_server", *_] | ["headrace" | "headrace.cli", "serve", *_]:
            return True
    return False


def _without_python(words: Sequence[str]) -> Sequence[str]:
    """A command line from its program on, which is a script or a module if Python runs it."""
    if not words or not _PYTHON.fullmatch(PurePath(words[0]).name):
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-c":
            return ()
        at += 2 if words[at] in _WITH_VALUE else 1
    return words[at:]


def address(host: str, port: int) -> str:
    """The URL at which a server that listens there can be asked."""
    host = _EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def find_servers() -> list[Found]:
    urls: dict[int, str] = {}
    for socket in psutil.net_connections("tcp"):
        if socket.status == psutil.CONN_LISTEN and socket.pid is not None and socket.laddr:
            urls.setdefault(socket.pid, address(*socket.laddr))
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
        if is_server(process.info["cmdline"] or ()):
            age_s = time.time() - process.info["create_time"]
            found.append(Found(process.info["pid"], urls.get(process.info["pid"], ""), age_s))
    return sorted(found, key=lambda one: -one.age_s)


def print_servers(console: Console, api_key: str | None) -> None:
    found = find_servers()
    if not found:
        console.print("no server runs; `headrace serve MODEL` starts one", highlight=False)
        return
    table = Table("address", "model", "state", Column("for", justify="right"), Column("pid", justify="right"))
    for server in found:
        model, state = _asked(server, api_key)
        table.add_row(server.url or "-", escape(model), state, _duration(server.age_s), str(server.pid))
    print_table(console, table)


def _asked(server: Found, api_key: str | None) -> tuple[str, str]:
    if not server.url:
        return "-", "starts"
    try:
        seen = ServerReader(server.url, api_key).read()
    except ConfigError:
        return "-", "[red]does not answer[/red]"
    return seen.model or "(it needs the key: --api-key)", "[green]answers[/green]"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
