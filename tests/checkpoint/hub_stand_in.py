"""A Hugging Face Hub on loopback: the routes that a download uses, as the Hub answers them, with faults to order.

Large files (here: safetensors and GGUF) are redirected to a second server, as the Hub does to its CDN.
"""

import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class StandIn:
    """url: of the Hub. repos: files by repository. seen: (server, method, path, headers) of every request.

    cut_after: bytes after which a large file's connection breaks, one entry a request. api_statuses, cdn_statuses: answers instead, one entry
    a request. missing: files that are listed only. refusal: (status, X-Error-Code) of every API request.
    ignores_range; corrupts: the last byte of large files. trickles: what comes a byte at a time, and never ends: "head" and "list" of the API, or
    "file". redirects: "far" = every redirect has a body that never ends, "around" = the API's lead to each other. padding: more of the list.
    """

    url: str = ""
    cdn_url: str = ""
    commit: str = "a" * 40
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    seen: list[tuple[str, str, str, dict[str, str]]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    api_statuses: list[int] = field(default_factory=list)
    cdn_statuses: list[int] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    refusal: tuple[int, str] | None = None
    ignores_range: bool = False
    corrupts: bool = False
    trickles: str = ""
    redirects: str = ""
    padding: bytes = b""
    ended: threading.Event = field(default_factory=threading.Event)

    def downloads(self) -> list[str]:
        """Files that were asked for, in order."""
        paths = [path for server, method, path, _ in self.seen if server == "hub" and method == "GET"]
        return [path.partition(f"/resolve/{self.commit}/")[2] for path in paths if "/resolve/" in path]

    def ranges(self) -> list[str | None]:
        """The Range header of each request for a large file."""
        return [headers.get("range") for server, _, _, headers in self.seen if server == "cdn"]


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _sibling(name: str, data: bytes) -> dict:
    entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
    if is_large(name):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_name = ""
    stand_in: StandIn

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.stand_in.seen.append((self.server_name, self.command, path, headers))
        if self.server_name == "cdn":
            self.large(path, headers)
        elif path.startswith("/api/"):
            self.info(path)
        else:
            self.file(path)

    def reply(self, status: int, body: bytes = b"", **headers: str):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def trickle(self, data: Iterable[bytes], pause_s: float = 0.005):
        """Until the client leaves, or the test is over."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            for piece in data:
                if self.stand_in.ended.wait(pause_s):
                    return
                self.wfile.write(piece)

    def info(self, path: str):
        if self.stand_in.redirects == "around":
            self.reply(307, Location=path + "?blobs=true")
            return
        if self.stand_in.trickles in ("head", "list"):
            self.send_response(200)
            self.send_header("X-Long", "x")
            if self.stand_in.trickles == "list":
                self.end_headers()
            else:
                self.flush_headers()
            self.trickle(itertools.repeat(b"x"))
            return
        if self.stand_in.refusal is not None:
            status, code = self.stand_in.refusal
            self.reply(status, b"{}", X_Error_Code=code)
            return
        if self.stand_in.api_statuses:
            self.reply(self.stand_in.api_statuses.pop(0))
            return
        repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        files = self.stand_in.repos.get(repo)
        if files is None:
            self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        elif revision not in ("main", "refs/pr/1", self.stand_in.commit):
            self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
        else:
            siblings = [_sibling(name, data) for name, data in files.items()]
            info = json.dumps({"id": repo, "sha": self.stand_in.commit, "siblings": siblings})
            self.reply(200, info.encode()[:-1] + self.stand_in.padding + b"}")

    def file(self, path: str):
        repo, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        data = self.stand_in.repos.get(repo, {}).get(name)
        if data is None or name in self.stand_in.missing or revision not in ("main", self.stand_in.commit):
            self.reply(404, X_Error_Code="EntryNotFound")
            return
        common = {"X-Repo-Commit": self.stand_in.commit}
        if is_large(name):
            digest = hashlib.sha256(data).hexdigest()
            common |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            location = f"{self.stand_in.cdn_url}/{repo}/{name}"
            if self.stand_in.redirects == "far":
                self.send_response(302)
                self.send_header("Location", location)
                self.end_headers()
                self.trickle(itertools.repeat(bytes(1 << 20)), pause_s=0)
                return
            self.reply(302, Location=location, **common)
        else:
            self.reply(200, data, ETag=f'"{git_sha1(data)}"', **common)

    def large(self, path: str, headers: dict[str, str]):
        stand_in = self.stand_in
        if stand_in.cdn_statuses:
            self.reply(stand_in.cdn_statuses.pop(0))
            return
        org, name, file = path[1:].split("/", 2)
        data = stand_in.repos[f"{org}/{name}"][file]
        if stand_in.corrupts:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0
        if "range" in headers and not stand_in.ignores_range:
            start = int(headers["range"].removeprefix("bytes=").removesuffix("-"))
        body = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if stand_in.cut_after:
            body = body[: stand_in.cut_after.pop(0)]
            self.close_connection = True
        if stand_in.trickles == "file":
            self.trickle(body[i : i + 1] for i in range(len(body)))
            return
        self.wfile.write(body)


@contextlib.contextmanager
def running_hub() -> Iterator[StandIn]:
    """Both servers, on free ports."""
    stand_in = StandIn()
    servers = []
    for name in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"server_name": name, "stand_in": stand_in})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        servers.append((server, thread))
    stand_in.url, stand_in.cdn_url = (f"http://127.0.0.1:{server.server_port}" for server, _ in servers)
    try:
        yield stand_in
    finally:
        stand_in.ended.set()
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()
