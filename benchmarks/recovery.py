"""Kill a part of a running server under load, and look at what its clients get.

    python benchmarks/recovery.py MODEL [--kill scheduler|detokenizer] [--streams 8] [--tokens 200]

Starts `headrace serve MODEL`, asks for the streams once undisturbed, then again with a `kill -9` when every stream has had a third of its tokens.
Prints one JSON line: the longest wait of a stream for its next token after the kill, and whether all texts are the same as before.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil

PORT = 31877


def stream(client: httpx.Client, i: int, tokens: int, times: list[float], texts: list[str]) -> None:
    sampling = {"max_new_tokens": tokens, "temperature": 0.8, "seed": i, "ignore_eos": True}
    body = {"text": f"Chapter {i}. In the beginning", "sampling_params": sampling, "stream": True}
    with client.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                texts[i] = json.loads(line[6:])["text"]


def run(
    client: httpx.Client, num: int, tokens: int, kill: psutil.Process | None
) -> tuple[list[str], float, list[list[float]]]:
    """Texts, the time of the kill, and when each stream's chunks came."""
    texts, times = [""] * num, [[] for _ in range(num)]
    threads = [threading.Thread(target=stream, args=(client, i, tokens, times[i], texts)) for i in range(num)]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < tokens // 3:
        time.sleep(0.001)
    killed_s = time.monotonic()
    if kill is not None:
        kill.send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join()
    return texts, killed_s, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kill", choices=("scheduler", "detokenizer"), default="scheduler")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    command = [os.path.join(os.path.dirname(sys.executable), "headrace"), "serve", options.model, "--port", str(PORT)]
    server = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
            while True:
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.1)
            want, _, _ = run(client, options.streams, options.tokens, None)
            children = psutil.Process(server.pid).children()
            victim = next(child for child in children if options.kill in child.cmdline())
            got, killed_s, times = run(client, options.streams, options.tokens, victim)
            after = [next(t for t in chunks if t > killed_s + 0.3) - killed_s for chunks in times]
            counters = client.get("/internal_state").json()["frontend"]
            result = {
                "killed": options.kill,
                "streams": options.streams,
                "tokens_each": options.tokens,
                "next_token_after_s": round(max(after), 2),
                "same_texts": got == want,
                "num_replayed": counters["num_replayed"],
            }
            print(json.dumps(result), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
