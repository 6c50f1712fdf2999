"""Send the largest bodies that a server accepts, and look at what somebody else notices.

    python -m bench.cost MODEL [--at-once 20] [--seconds 6] [--only NAME] [--hidden-size 576]

Starts `headrace serve MODEL` with two keys; one asks for short answers in a loop, first undisturbed, then while the other sends each of
BODIES `--at-once` times together, again and again for `--seconds`. The sender stands for another machine, so it has the lowest priority on
this one: what the bystander notices is the server's work, not the sender's.
Prints a line for each: statuses of the large requests, how long the slowest took, p50 and p99 of the bystander's answers and of /ping beside
them, and by how much the memory of all processes has grown a second afterwards.
"""

import argparse
import base64
import collections
import concurrent.futures
import json
import multiprocessing
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from bench.program import parser_of
from bench.servers import ServerProcess, own_server

SHORT = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
KEYS = '[[keys]]\nname = "large"\nkey = "large"\n[[keys]]\nname = "bystander"\nkey = "bystander"\n'
STOPS = ["a" * 255 + chr(ord("b") + i) for i in range(20)]
_ONE_TOKEN = ',"sampling_params":{"max_new_tokens":1}'
WORST_PATTERN = r"(a|b)*a(a|b){12}c"


def _list(field: str, item: str, count: int, more: str = "") -> bytes:
    return f'{{"{field}":[{",".join([item] * count)}]{more}}}'.encode()


def _sampling(**params: object) -> bytes:
    fixed = {"n": 64, "max_new_tokens": 32, "ignore_eos": True, "temperature": 1.0}
    return json.dumps({"text": "a b a b", "sampling_params": fixed | params}).encode()


BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "3 million empty texts": ("/tokenize", lambda _: _list("prompt", '""', 3_000_000)),
    "3 million empty lists": ("/generate", lambda _: _list("input_ids", "[]", 3_000_000)),
    "500,000 ids": ("/generate", lambda _: _list("input_ids", "7", 500_000)),
    "500,000 ids in 1,000 prompts": ("/generate", lambda _: _list("input_ids", "[" + "7," * 499 + "7]", 1000, _ONE_TOKEN)),
    "500,000 ids to text": ("/detokenize", lambda _: _list("tokens", "7", 500_000)),
    "30,000 messages": ("/v1/chat/completions", lambda _: _list("messages", '{"role":"user","content":"a"}', 30_000, ',"model":"smollm2"')),
    "30 MB of text": ("/generate", lambda _: b'{"text":"' + b"a b " * 7_500_000 + b'"}'),
    "5 million escapes": ("/generate", lambda _: b'{"text":"' + rb"\u00e9" * 5_000_000 + b'"}'),
    "2 million characters": ("/tokenize", lambda _: b'{"prompt":"' + b"ab c" * 520_000 + b'"}'),
    "60,000 biases": ("/generate", lambda _: _sampling(logit_bias={str(i): 1 for i in range(60_000)})),
    "60,000 unknown fields": ("/generate", lambda _: json.dumps({f"x{i}": None for i in range(60_000)}).encode()),
    "30,000 objects in an extra": ("/generate", lambda _: _list("image_data", '{"a":1}', 30_000, ',"text":"a"')),
    "30 MB of embeddings": (
        "/generate",
        lambda width: _list("input_embeds", "[" + ",".join(["0.0123456"] * width) + "]", 30_000_000 // (10 * width), _ONE_TOKEN),
    ),
    "22 MB of embeddings in base64": (
        "/generate",
        lambda width: json.dumps({"input_embeds": base64.b64encode(struct.pack("<f", 0.01) * width * (22_000_000 // 4 // width)).decode()}).encode(),
    ),
    "64 samples with nothing else": ("/generate", lambda _: _sampling()),
    "64 samples with the longest stops": ("/generate", lambda _: _sampling(stop=STOPS)),
    "64 samples with the worst pattern": ("/generate", lambda _: _sampling(stop_regex=[WORST_PATTERN])),
    "64 samples with bad words": ("/generate", lambda _: _sampling(bad_words=[f"word{i} " * 10 for i in range(100)])),
    "64 samples with 40,000 allowed ids": ("/generate", lambda _: _sampling(allowed_token_ids=list(range(40_000)))),
}  # fmt: skip


# A fork would copy locks that the bystander's threads hold.
SPAWN = multiprocessing.get_context("spawn")


def send(url: str, route: str, body: bytes, at_once: int, seconds: float, results: Connection) -> None:
    """In a process of its own: the same body `at_once` times together, until `seconds` are over; sends back what came of each."""
    os.nice(19)

    def one(_: int) -> tuple[str, float]:
        begun_s = time.monotonic()
        try:
            status = str(
                httpx.post(
                    url + route,
                    content=body,
                    headers={"content-type": "application/json", "authorization": "Bearer large"},
                    timeout=300,
                ).status_code
            )
        except httpx.HTTPError as error:
            status = type(error).__name__
        return status, time.monotonic() - begun_s

    until_s = time.monotonic() + seconds
    found: list[tuple[str, float]] = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        while time.monotonic() < until_s:
            found += pool.map(one, range(at_once))
    results.send(found)


class Bystander:
    """Asks for short answers, and in another thread for /ping, and notes how long each takes."""

    def __init__(self, url: str) -> None:
        self.answers: list[float] = []
        self.pings: list[float] = []
        self._stop = threading.Event()
        ask = lambda client: client.post("/generate", json=SHORT).raise_for_status()  # noqa: E731
        ping = lambda client: client.get("/ping").raise_for_status()  # noqa: E731
        self._threads = [
            threading.Thread(target=self._loop, args=(url, *pair)) for pair in ((ask, self.answers), (ping, self.pings))
        ]

    def __enter__(self) -> "Bystander":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _loop(self, url: str, call: Callable[[httpx.Client], object], times: list[float]) -> None:
        with httpx.Client(base_url=url, timeout=300, headers={"authorization": "Bearer bystander"}) as client:
            while not self._stop.is_set():
                begun_s = time.monotonic()
                call(client)
                times.append(time.monotonic() - begun_s)
                self._stop.wait(0.01)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} p50 {1e3 * part(times, 0.5):5.0f} p99 {1e3 * part(times, 0.99):6.0f} ms ({len(times)})"
            for name, times in (("answers", self.answers), ("ping", self.pings))
        )


def part(times: list[float], share: float) -> float:
    """A quantile."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def main() -> None:
    parser = parser_of(__doc__, output=False)
    parser.add_argument("model")
    parser.add_argument("--at-once", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--hidden-size", type=int, default=576)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(KEYS)
        keys.chmod(0o600)
        given = ["--max-queued-requests", "2000", "--api-key-file", str(keys)]
        with own_server(options.model, given, {"HEADRACE_ADMIN_API_KEY": "admin"}) as server:
            measure(server, options)


def measure(server: ServerProcess, options: argparse.Namespace) -> None:
    """A line for each body."""
    with Bystander(server.url) as alone:
        time.sleep(10)
    print(f"{'nobody else':36} {alone}", flush=True)
    for name, (route, make) in BODIES.items():
        if options.only not in name:
            continue
        before, body = server.memory_mib(), make(options.hidden_size)
        results, sender = SPAWN.Pipe(duplex=False)
        attack = SPAWN.Process(target=send, args=(server.url, route, body, options.at_once, options.seconds, sender))
        attack.start()
        sender.close()
        with Bystander(server.url) as bystander:
            found = results.recv()
        attack.join()
        time.sleep(1)
        statuses = dict(collections.Counter(status for status, _ in found))
        grown, slowest = server.memory_mib() - before, max(seconds for _, seconds in found)
        print(f"{name:36} {bystander}, {statuses} in {slowest:.1f} s, {grown:+.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
