"""What one key feels of another that sends more than its share, however it does so.

Servers of SmolLM2 and of a tiny vision model, with two keys. A process of its own, at nice 19, attacks with one key for some seconds. Every tenth
of a second the other key sends one small request (a chat, a schema, a text to tokenize, an image, an embedding: what the server can, by turns, each
new) and a ping. Prints as JSON what these took in seconds, alone and beside each attack, and which part of the processors they take alone, with
the client; the attack's own finished work a second, alone and beside;
how many MB the server's main process has more afterwards; and what is beyond the limits. Then the status is 1.

    scripts/soak --attacks [all | "n = 64,schemas"] [--seconds 60] [--headrace PATH] [--output FILE]
"""

import argparse
import base64
import http.client
import io
import itertools
import json
import os
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from PIL import Image

ATTACKER, BYSTANDER = ({"authorization": f"Bearer secret-{name}"} for name in ("attacker", "bystander"))
JSON_HEAD = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. "
SYSTEM = {"role": "system", "content": TEXT * 20}
TIMEOUT_S = 600
READY_S = 120
SETTLE_S = 3
EVERY_S = 0.1
TURN_S = 10
"""An attack works alone and beside the bystander by such turns: texts become longer, and their steps with them."""

FEW_DESCRIPTORS = 1024
PIXELS = 7000

SERVERS: dict[str, list[str]] = {
    "text": ["smollm2"],
    "few descriptors": ["smollm2"],
    "few pages": ["smollm2", "--max-total-tokens", "16384"],
    "embedding": ["smollm2", "--is-embedding"],
    "vision": ["{folder}/vision", "--max-total-tokens", "8192", "--dtype", "float32"],
}

SLOWER, LATER_S = 2.0, 0.5
"""The 99th percentile of the bystander's times may be so many times what it is alone, or so much more."""
PING_S = 0.1
MORE_MB = 64
LEAST_WORK = 0.8
"""Of what the attacker finishes alone; or what the bystander's own processor time leaves, if that is less."""
LEAST_CACHED = 0.9
WORK = "attacker's work a second, alone, beside"
PROCESSORS = "part of the processors"

Body = dict[str, Any]


def chat(number: int, **more: Any) -> Body:
    messages = [{"role": "user", "content": f"Hi {number}"}]
    return {"model": "default", "messages": messages, "max_tokens": 2} | more


def generate(text: str, stream: bool = False, more: Body | None = None, **sampling: Any) -> Body:
    return {"text": text, "stream": stream, "sampling_params": {"max_new_tokens": 2, **sampling}} | (more or {})


def schema(name: str) -> str:
    return json.dumps({"enum": [f"{name} is a name", f"{name} is another"]})


def costly_schema(name: str) -> str:
    """Of 610 kB: some seconds of a child's time."""
    names = [f"{name} property {index}" for index in range(10_000)]
    properties = {each: {"type": "string", "maxLength": 7 + index % 50} for index, each in enumerate(names)}
    return json.dumps({"type": "object", "properties": properties, "required": names[::7]})


def png(pixels: int, name: str) -> str:
    """A square image as a data URI; `name` makes its file another one."""
    if pixels not in _FILES:
        file = io.BytesIO()
        Image.new("RGB", (pixels, pixels), (200, 7, 7)).save(file, "PNG")
        _FILES[pixels] = file.getvalue()
    data = b"Comment\0" + name.encode()
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data + struct.pack(">I", zlib.crc32(b"tEXt" + data))
    body = _FILES[pixels]
    start = body.index(b"IDAT") - 4
    return "data:image/png;base64," + base64.b64encode(body[:start] + chunk + body[start:]).decode()


_FILES: dict[int, bytes] = {}

SMALL: dict[str, Callable[[str, int], tuple[str, Body]]] = {
    "chat": lambda name, number: (CHAT, chat(number)),
    "schema": lambda name, number: ("/generate", generate("Hi", json_schema=schema(f"{name}{number}"))),
    "tokenize": lambda name, number: ("/tokenize", {"model": "default", "prompt": f"Hi {name} {number}"}),
    "system prompt": lambda name, number: (
        CHAT,
        chat(number, messages=[SYSTEM, {"role": "user", "content": f"Hi {number}"}]),
    ),
    "image": lambda name, number: (
        "/generate",
        generate("<image>", more={"image_data": png(64 + number % 64, f"{name}{number}")}),
    ),
    "embedding": lambda name, number: ("/v1/embeddings", {"model": "default", "input": f"Hi {name} {number}"}),
}
"""What a bystander asks, by kind: the path and the body of its request with a number."""

ASKED = {
    "text": ("chat", "schema", "tokenize"),
    "few descriptors": ("chat", "schema", "tokenize"),
    "few pages": ("system prompt", "tokenize"),
    "embedding": ("embedding", "tokenize"),
    "vision": ("image", "schema", "tokenize"),
}


@dataclass(frozen=True)
class Attack:
    """What a client does again and again, `at_once` times at once.

    do: one round of a client with its number and that of the round, at an address. is_lawful: whether its work counts, too.
    """

    server: str
    do: Callable[[str, int, int], None]
    at_once: int = 20
    is_lawful: bool = True


SENT, DONE = ".", "+"


def say(what: str) -> None:
    """To the process that counts: a request is sent, or finished."""
    sys.stdout.write(what)
    sys.stdout.flush()


def connect(url: str) -> http.client.HTTPConnection:
    at = urlsplit(url)
    return http.client.HTTPConnection(at.hostname or "", at.port, timeout=TIMEOUT_S)


def ask(url: str, path: str, body: Body | None, who: dict[str, str]) -> tuple[int, float, bytes]:
    """The status, the seconds of `Retry-After`, and the content of the reply to a POST, or to a GET without a body."""
    with closing(connect(url)) as connection:
        if body is None:
            connection.request("GET", path, headers=who)
        else:
            connection.request("POST", path, json.dumps(body), who | JSON_HEAD)
        with closing(connection.getresponse()) as reply:
            return reply.status, float(reply.headers.get("retry-after") or 1), reply.read()


def post(url: str, path: str, body: Body) -> None:
    say(SENT)
    status, retry_s, _ = ask(url, path, body, ATTACKER)
    if status in (429, 503):
        time.sleep(retry_s)
    else:
        say(DONE)


def posting(path: str, body: Callable[[int, int], Body]) -> Callable[[str, int, int], None]:
    """Requests with such a body, one after another."""
    return lambda url, client, turn: post(url, path, body(client, turn))


def send(url: str, path: str, body: Body, seconds: float) -> socket.socket:
    """A request of which nothing is read."""
    at = urlsplit(url)
    sock = socket.create_connection((at.hostname or "", at.port or 0), timeout=seconds)
    content = json.dumps(body).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in (ATTACKER | JSON_HEAD).items())
    sock.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}content-length: {len(content)}\r\n\r\n".encode())
    sock.sendall(content)
    say(SENT)
    return sock


def stream(url: str, client: int, turn: int) -> None:
    with closing(connect(url)) as connection:
        body = generate("a", stream=True, n=64, max_new_tokens=4000, ignore_eos=True)
        connection.request("POST", "/generate", json.dumps(body), ATTACKER | JSON_HEAD)
        say(SENT)
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                say(DONE)


def stay(url: str, client: int, turn: int) -> None:
    body = generate(f"{client} a", stream=True, max_new_tokens=4000, ignore_eos=True)
    with send(url, "/generate", body, TIMEOUT_S) as sock:
        first = sock.recv(12)
        if first.endswith(b"200"):
            time.sleep(TIMEOUT_S)
    time.sleep(1)


def read_slowly(url: str, client: int, turn: int) -> None:
    options = {"return_logprob": True, "top_logprobs_num": 20}
    body = generate(f"{client} a", stream=True, more=options, n=16, max_new_tokens=1000, ignore_eos=True)
    with send(url, "/generate", body, TIMEOUT_S) as sock:
        while sock.recv(1024):
            time.sleep(1)


def leave(url: str, client: int, turn: int) -> None:
    body = generate("Hi", json_schema=costly_schema(f"{client} {turn} {os.getpid()}"))
    with send(url, "/generate", body, TIMEOUT_S):
        time.sleep(1)


def send_half(url: str, client: int, turn: int) -> None:
    at = urlsplit(url)
    with socket.create_connection((at.hostname or "", at.port or 0)) as sock:
        head = "".join(f"{name}: {value}\r\n" for name, value in (ATTACKER | JSON_HEAD).items())
        sock.sendall(f"POST /generate HTTP/1.1\r\nhost: localhost\r\n{head}content-length: {32 << 20}\r\n\r\n".encode())
        sock.sendall(b" " * ((32 << 20) - 1))
        say(SENT)
        sock.recv(1)


def loop(url: str, client: int, turn: int) -> None:
    """A closed loop on a route that costs little: one in four without a key."""
    path = ("/health_generate", "/v1/models", "/v1/models", "/v1/models")[client % 4]
    with closing(connect(url)) as connection:
        while True:
            connection.request("GET", path, headers={} if client % 4 == 1 else ATTACKER)
            say(SENT)
            reply = connection.getresponse()
            reply.read()
            if reply.status == http.client.OK:
                say(DONE)


MESSAGES = [{"role": ("user", "assistant")[index % 2], "content": f"{index} {TEXT}"} for index in range(8000)]
TOOLS: list[Body] = [{"role": "user", "content": TEXT}]
for index in range(2000):
    call = {"id": f"call{index}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    TOOLS += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": TEXT},
    ]
LOGPROBS = {"return_logprob": True, "token_ids_logprob": list(range(1024))}


def unique(client: int, turn: int) -> str:
    return "".join(f"{client} {turn} {index} {TEXT}" for index in range(40))


ATTACKS: dict[str, Attack] = {
    "n = 64": Attack("text", stream, at_once=1),
    "idle streams": Attack("few descriptors", stay, at_once=768, is_lawful=False),
    "half-sent bodies": Attack("text", send_half, is_lawful=False),
    "texts": Attack("text", posting("/tokenize", lambda client, turn: {"prompt": TEXT * (1_000_000 // len(TEXT))})),
    "combining marks": Attack(
        "text", posting("/tokenize", lambda client, turn: {"prompt": "e" + "\u0301\u0323" * 250_000})
    ),
    "messages": Attack("text", posting(CHAT, lambda client, turn: chat(0, messages=MESSAGES))),
    "tool messages": Attack("text", posting(CHAT, lambda client, turn: chat(0, messages=TOOLS))),
    "schemas": Attack(
        "text",
        posting("/generate", lambda client, turn: generate("Hi", json_schema=costly_schema(f"{client} {turn}"))),
    ),
    "schemas that leave": Attack("text", leave, at_once=14, is_lawful=False),
    "cheap routes": Attack("text", loop, at_once=400),
    "slow readers": Attack("text", read_slowly, is_lawful=False),
    "logprobs": Attack(
        "text",
        posting("/generate", lambda client, turn: generate("a", more=LOGPROBS, n=64, max_new_tokens=100)),
        at_once=2,
    ),
    "unique prompts": Attack("few pages", posting("/generate", lambda client, turn: generate(unique(client, turn)))),
    "embeddings": Attack(
        "embedding",
        posting(
            "/v1/embeddings",
            lambda client, turn: {"model": "default", "input": [f"{client} {turn} {i}" for i in range(2048)]},
        ),
    ),
    "PNG bombs": Attack(
        "vision",
        posting(
            "/generate",
            lambda client, turn: generate(
                "<image>" * 8, more={"image_data": [png(PIXELS, f"{client} {turn} {i}") for i in range(8)]}
            ),
        ),
    ),
}


def go_on(attack: Attack, url: str) -> None:
    """Attack until the process is ended."""
    os.nice(19)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(256 << 10)

    def run(client: int) -> None:
        for turn in itertools.count():
            with suppress(OSError, http.client.HTTPException):
                attack.do(url, client, turn)

    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in range(attack.at_once)]
    for thread in threads:
        thread.start()
    threads[0].join()


@contextmanager
def attacking(name: str, url: str) -> Iterator["Counter[str]"]:
    """A process that attacks; how many requests it has `SENT`, and how much of its work is `DONE`."""
    line = [sys.executable, __file__, "--attack", name, "--url", url]
    counts: Counter[str] = Counter()

    def count() -> None:
        assert process.stdout is not None
        while said := os.read(process.stdout.fileno(), 1 << 16):
            counts.update(said.decode())

    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        thread = threading.Thread(target=count)
        thread.start()
        try:
            yield counts
        finally:
            process.kill()
            thread.join()


class Bystander:
    """Sends small requests of these kinds. taken: seconds of each; failed: how often, by what happened."""

    def __init__(self, url: str, kinds: tuple[str, ...]) -> None:
        self.url = url
        self.kinds = kinds
        self.taken: dict[str, list[float]] = {name: [] for name in (*kinds, "ping")}
        self.failed: Counter[str] = Counter()
        self._cached: list[int] = []
        self._name = f"{time.monotonic():.3f}"
        self._num_sent = 0

    def send_for(self, seconds: float) -> None:
        threads = []
        start_s = time.monotonic()
        for number in range(int(seconds / EVERY_S)):
            for kind in (self.kinds[self._num_sent % len(self.kinds)], "ping"):
                threads.append(threading.Thread(target=self._send_one, args=(kind, self._num_sent)))
                threads[-1].start()
            self._num_sent += 1
            time.sleep(max(0.0, start_s + (number + 1) * EVERY_S - time.monotonic()))
        for thread in threads:
            thread.join()

    def report(self) -> Body:
        quantiles = {
            kind: [round(sorted(each)[min(len(each) - 1, int(share * len(each)))], 3) for share in (0.5, 0.99)]
            for kind, each in self.taken.items()
            if each
        }
        report: Body = {"p50, p99": quantiles, "failed": dict(self.failed)}
        if self._cached:
            report["cached tokens"] = round(sum(self._cached) / len(self._cached), 1)
        return report

    def _send_one(self, kind: str, number: int) -> None:
        path, body = ("/ping", None) if kind == "ping" else SMALL[kind](self._name, number)
        start_s = time.monotonic()
        try:
            status, _, content = ask(self.url, path, body, BYSTANDER)
            self.taken[kind].append(time.monotonic() - start_s)
            if status != http.client.OK:
                self.failed[f"{kind} {status}"] += 1
            elif kind == "system prompt":
                usage = json.loads(content)["usage"]
                self._cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (OSError, http.client.HTTPException) as error:
            self.failed[f"{kind} {type(error).__name__}"] += 1


def stand_by(url: str, kinds: tuple[str, ...], seconds: float) -> Body:
    """How long small requests take meanwhile, and how many fail."""
    bystander = Bystander(url, kinds)
    bystander.send_for(seconds)
    return bystander.report()


@contextmanager
def serving(command: list[str], options: list[str], few_descriptors: bool = False) -> Iterator[tuple[str, int]]:
    """The address and the process of a server with two keys."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder = Path(name)
        if any("{folder}" in option for option in options):
            write_vision(folder / "vision")
            options = [option.format(folder=folder) for option in options]
        both = [{"name": name, "key": f"secret-{name}"} for name in ("attacker", "bystander")]
        (folder / "keys.json").write_text(json.dumps({"keys": both}))
        port = free.getsockname()[1]
        free.close()
        line = [*command, "serve", *options, "--port", str(port), "--api-key-file", str(folder / "keys.json")]
        line += ["--log-level", "error"]
        if few_descriptors:
            line = ["bash", "-c", f"ulimit -n {FEW_DESCRIPTORS}; exec {shlex.join(line)}"]
        server = subprocess.Popen(line)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url)
            yield url, server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def write_vision(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import make_tiny_vlm

    folder.mkdir()
    make_tiny_vlm.write("llava", folder)


def wait_until_ready(url: str) -> None:
    for _ in range(10 * READY_S):
        with suppress(OSError):
            if ask(url, "/health", None, {})[0] == http.client.OK:
                return
        time.sleep(0.1)
    raise TimeoutError("the server is not ready")


def measure(names: tuple[str, ...], seconds: float, command: list[str]) -> Body:
    """What the bystander feels, alone and beside each attack."""
    report: Body = {}
    for server in dict.fromkeys(ATTACKS[name].server for name in names):
        with serving(command, SERVERS[server], server == "few descriptors") as (url, pid):
            stand_by(url, ASKED[server], 2)
            start_s = processor_s(pid)
            report[f"alone: {server}"] = alone = stand_by(url, ASKED[server], seconds)
            alone[PROCESSORS] = round((processor_s(pid) - start_s) / seconds / (psutil.cpu_count() or 1), 3)
            print(server, alone, file=sys.stderr, flush=True)
            for name in names:
                if ATTACKS[name].server == server:
                    report[name] = beside(name, url, pid, seconds)
                    print(name, report[name], file=sys.stderr, flush=True)
    return report


def processor_s(pid: int) -> float:
    """Of a server's processes and of this one, so far."""
    server = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True), psutil.Process()))


def problems(report: Body) -> list[str]:
    """What is beyond the limits."""
    found = []
    for name, beside in report.items():
        if name not in ATTACKS:
            continue
        alone = report[f"alone: {ATTACKS[name].server}"]
        for kind, (_, last_s) in beside["p50, p99"].items():
            alone_s = alone["p50, p99"][kind][1]
            limit_s = PING_S if kind == "ping" else max(SLOWER * alone_s, alone_s + LATER_S)
            if last_s > limit_s:
                found.append(f"{name}: {kind} took {last_s} s of {limit_s:.3f}")
        found += [f"{name}: {count} times {what}" for what, count in beside["failed"].items()]
        if beside["MB more"] > MORE_MB:
            found.append(f"{name}: {beside['MB more']} MB more of {MORE_MB}")
        if beside.get("cached tokens", 0) < LEAST_CACHED * alone.get("cached tokens", 0):
            found.append(f"{name}: {beside['cached tokens']} tokens of {alone['cached tokens']} cached")
        alone_work, beside_work = beside.get(WORK, (0, 0))
        least = min(LEAST_WORK, 1 - alone[PROCESSORS])
        if beside_work < least * alone_work:
            found.append(f"{name}: {beside_work / alone_work:.2f} of its own work, not {least:.2f}")
    return found


def beside(name: str, url: str, pid: int, seconds: float) -> Body:
    attack = ATTACKS[name]
    main = psutil.Process(pid)
    before = main.memory_info().rss
    bystander = Bystander(url, ASKED[attack.server])
    num_turns = max(1, round(seconds / TURN_S))
    turn_s = seconds / num_turns
    done, took_s = [0, 0], [0.0, 0.0]  # alone, beside

    with attacking(name, url) as work:

        def count(is_beside: bool, act: Callable[[float], None], seconds: float) -> None:
            start, start_s = work[DONE], time.monotonic()
            act(seconds)
            done[is_beside] += work[DONE] - start
            took_s[is_beside] += time.monotonic() - start_s

        time.sleep(SETTLE_S)
        for turn in range(num_turns):
            if attack.is_lawful:
                count(False, time.sleep, turn_s if turn else turn_s / 2)
            count(True, bystander.send_for, turn_s)
        if attack.is_lawful:
            count(False, time.sleep, turn_s / 2)
    time.sleep(SETTLE_S)
    report = bystander.report()
    if attack.is_lawful:
        report[WORK] = [round(count / seconds, 3) for count, seconds in zip(done, took_s, strict=True)]
    return report | {"MB more": (main.memory_info().rss - before) >> 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attacks", default="all", help="names, with commas between them")
    parser.add_argument("--headrace", default=str(Path(sys.executable).with_name("headrace")), help="command")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack is not None:
        go_on(ATTACKS[given.attack], given.url)
        return
    names = tuple(ATTACKS) if given.attacks == "all" else tuple(given.attacks.split(","))
    report = measure(names, given.seconds, shlex.split(given.headrace))
    report["problems"] = problems(report)
    text = json.dumps(report, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
