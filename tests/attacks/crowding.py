"""What one key feels of another that sends more than its share before the scheduler: long texts, chats of thousands of messages, half-sent bodies.

A server of SmolLM2 with two keys. A process of its own, at nice 19, attacks with one key for some seconds, while every tenth of a second one small
chat, one small text to tokenize and one ping are sent with the other. Prints the seconds that these took, alone and beside each attack.

    python tests/attacks/crowding.py --seconds 60
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from headrace.api.runtime import Runtime

ATTACKER, BYSTANDER = ({"authorization": f"Bearer secret-{name}"} for name in ("attacker", "bystander"))
TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. "
MESSAGES = [{"role": ("user", "assistant")[index % 2], "content": f"{index} {TEXT}"} for index in range(8000)]
TOOLS: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
for index in range(2000):
    call = {"id": f"call{index}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    TOOLS += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": TEXT},
    ]
FLOODS: dict[str, tuple[str, dict[str, Any]]] = {
    "texts": ("/tokenize", {"model": "default", "prompt": TEXT * (1_000_000 // len(TEXT))}),
    "messages": ("/v1/chat/completions", {"model": "default", "messages": MESSAGES, "max_tokens": 2}),
    "tool messages": ("/v1/chat/completions", {"model": "default", "messages": TOOLS, "max_tokens": 2}),
}
AT_ONCE = 20
HALF_BODIES = "half-sent bodies"
ATTACKS = (*FLOODS, HALF_BODIES)
HALF = b" " * ((32 << 20) - 1)


def flood(url: str, path: str, body: dict[str, Any]) -> None:
    """Until the process is ended."""
    content = json.dumps(body).encode()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=600, headers=ATTACKER | {"content-type": "application/json"}) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    client.post(path, content=content)

    run_at_once(ask)


def send_halves(url: str) -> None:
    def send() -> None:
        at = urlsplit(url)
        while True:
            with contextlib.suppress(OSError), socket.create_connection((at.hostname, at.port)) as sock:
                head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\nauthorization: {ATTACKER['authorization']}\r\n"
                sock.sendall(f"{head}content-type: application/json\r\ncontent-length: {32 << 20}\r\n\r\n".encode())
                sock.sendall(HALF)
                sock.recv(1)

    run_at_once(send)


def run_at_once(work: Callable[[], None]) -> None:
    os.nice(19)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    threads[0].join()


def stand_by(url: str, seconds: float) -> dict[str, Any]:
    """How long small requests take meanwhile, and how many fail."""
    asked: dict[str, Callable[[httpx.Client, int], httpx.Response]] = {
        "chat": lambda client, number: client.post(
            "/v1/chat/completions",
            json={"model": "default", "messages": [{"role": "user", "content": f"Hi {number}"}], "max_tokens": 2},
        ),
        "tokenize": lambda client, number: client.post(
            "/tokenize", json={"model": "default", "prompt": f"Hi {number}"}
        ),
        "ping": lambda client, _: client.get("/ping"),
    }
    taken: dict[str, list[float]] = {name: [] for name in asked}
    failed: Counter[str] = Counter()

    def ask(name: str, number: int) -> None:
        start_s = time.monotonic()
        with httpx.Client(base_url=url, timeout=120, headers=BYSTANDER) as client:
            reply = asked[name](client, number)
        taken[name].append(time.monotonic() - start_s)
        if reply.status_code != 200:
            failed[f"{name} {reply.status_code}"] += 1

    threads = []
    for number in range(int(10 * seconds)):
        for name in asked:
            threads.append(threading.Thread(target=ask, args=(name, number)))
            threads[-1].start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    quantiles = {
        name: [round(sorted(each)[min(len(each) - 1, int(share * len(each)))], 3) for share in (0.5, 0.99)]
        for name, each in taken.items()
        if each
    }
    return {"p50, p99": quantiles, "failed": dict(failed)}


def attack(seconds: float, names: tuple[str, ...] = ATTACKS) -> dict[str, Any]:
    """What the bystander feels, alone and beside each attack."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        both = [{"name": name, "key": f"secret-{name}"} for name in ("attacker", "bystander")]
        keys.write_text(json.dumps({"keys": both}))
        options = {"max_total_tokens": 16384, "log_level": "error", "api_key_file": str(keys)}
        with Runtime(model_path="smollm2", **options) as runtime:
            server = psutil.Process(runtime.pid)
            stand_by(runtime.url, 1)
            report["alone"] = stand_by(runtime.url, seconds)
            for name in names:
                before = server.memory_info().rss
                attacker = subprocess.Popen([sys.executable, __file__, "--attack", name, "--url", runtime.url])
                try:
                    time.sleep(1)
                    report[name] = stand_by(runtime.url, seconds)
                finally:
                    attacker.kill()
                    attacker.wait()
                report[name]["MB more"] = (server.memory_info().rss - before) >> 20
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack == HALF_BODIES:
        send_halves(given.url)
    elif given.attack is not None:
        flood(given.url, *FLOODS[given.attack])
    else:
        print(json.dumps(attack(given.seconds), indent=2))


if __name__ == "__main__":
    main()
