"""`headrace ps`: the servers of this machine that the user can see.

Owns how they are found: processes whose command line is that of a server, and the ports on which these listen. Linux only, as the rest.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from headrace.benchmark.tables import print_table
from headrace.cli.top_reader import ServerReader
from headrace.errors import ConfigError

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = ("-X", "-W")
"""Options of Python before its program that have a value of their own."""


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
    """All servers, the oldest first."""
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
    """Ask each server, and print them."""
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
    """The model and the state of a server."""
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
