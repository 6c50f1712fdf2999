"""Kill a part of a running server under load, and look at what its clients get.

    python -m bench.recovery MODEL [--kill scheduler|detokenizer] [--streams 8] [--tokens 200] [--output FILE]

Starts `headrace serve MODEL`, asks for the streams once undisturbed, then again with a `kill -9` when every stream has had a third of its tokens.
Prints JSON: the longest wait of a stream for its next token after the kill, and whether all texts are the same as before.
"""

import json
import signal
import threading
import time

import httpx
import psutil

from bench.program import parser_of, write_report
from bench.servers import own_server


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
    texts = [""] * num
    times: list[list[float]] = [[] for _ in range(num)]
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
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--kill", choices=("scheduler", "detokenizer"), default="scheduler")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    with own_server(options.model) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        want, _, _ = run(client, options.streams, options.tokens, None)
        victim = server.part(options.kill)
        got, killed_s, times = run(client, options.streams, options.tokens, victim)
        after = [next(t for t in chunks if t > killed_s + 0.3) - killed_s for chunks in times]
        counters = client.get("/internal_state").json()["frontend"]
    found = {
        "killed": options.kill,
        "streams": options.streams,
        "tokens_each": options.tokens,
        "next_token_after_s": round(max(after), 2),
        "same_texts": got == want,
        "num_replayed": counters["num_replayed"],
    }
    write_report(found, options.output)


if __name__ == "__main__":
    main()
