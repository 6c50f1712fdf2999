"""How much processor time a token costs beside the kernels: the HTTP server, the detokenizer, the scheduler's loop.

    .venv/bin/python -m bench.host_path MODEL [--streams 1 32] [--tokens 256] [--repeat 5] [--serve "OPTIONS"] [--output FILE]

Starts `headrace serve MODEL OPTIONS` and lets `--streams` chats at a time stream `--tokens` tokens each; the client is this process and is not
counted. Reads the time that the kernel has charged to every thread (`schedstat`) around the part in which all streams decode, and divides it by
the tokens that arrived meanwhile. The scheduler process has kernels in other threads: only its loop, the main thread, counts.
Processor time, not wall time: what else runs on the machine changes it little. Prints JSON, microseconds a token.
"""

import json
import shlex
import socket
import statistics
from pathlib import Path

from bench.program import parser_of, write_report
from bench.servers import ServerProcess, own_server

MARK = b'"delta":{"content"'
"""Once in the chunk of each token."""


def parts_of(server: ServerProcess) -> dict[str, int]:
    """Process ids of the parts of a server, by name."""
    return {"main": server.process.pid, **{kind: server.part(kind).pid for kind in ("scheduler", "detokenizer")}}


def times_us(parts: dict[str, int]) -> dict[str, float]:
    """Microseconds that the threads of each part have run so far."""
    times: dict[str, float] = {}
    for part, pid in parts.items():
        task = Path(f"/proc/{pid}/task")
        threads = [task / str(pid)] if part == "scheduler" else task.iterdir()
        times[part] = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e3
    return times


class Stream:
    """One streaming chat on a connection of its own; counts the tokens that arrive."""

    def __init__(self, port: int, number: int, tokens: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text = json.dumps(body).encode()
        self.tokens = 0
        self.ended = False
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(text), text)
        )

    def take(self) -> None:
        """Wait for bytes and count their tokens."""
        if self.ended:
            return
        data = self.socket.recv(1 << 20)
        if not data or b'"error"' in data:
            raise RuntimeError(f"the server ended a stream: {data!r}")
        self.tokens += data.count(MARK)
        self.ended = self.ended or b"[DONE]" in data


def measure(port: int, parts: dict[str, int], num_streams: int, tokens: int) -> dict[str, float]:
    """Microseconds a token by part, from when every stream has an eighth of its tokens until one has seven eighths."""
    streams = [Stream(port, number, tokens) for number in range(num_streams)]
    while min(stream.tokens for stream in streams) < tokens // 8:
        _take_all(streams)
    begun, had = times_us(parts), sum(stream.tokens for stream in streams)
    while not any(stream.ended or stream.tokens >= tokens - tokens // 8 for stream in streams):
        _take_all(streams)
    ended, num_new = times_us(parts), sum(stream.tokens for stream in streams) - had
    while not all(stream.ended for stream in streams):
        _take_all(streams)
    for stream in streams:
        stream.socket.close()
    return {name: (ended[name] - begun[name]) / num_new for name in ended}


def _take_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream.take()


def report(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians by part, and the least and the median of their sums."""
    sums = [sum(run.values()) for run in runs]
    medians = {name: round(statistics.median(run[name] for run in runs), 1) for name in sorted(runs[0])}
    return {**medians, "sum_min": round(min(sums), 1), "sum_median": round(statistics.median(sums), 1)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--serve", default="", help="more options of `headrace serve`")
    options = parser.parse_args()
    with own_server(options.model, shlex.split(options.serve)) as server:
        parts = parts_of(server)
        results = []
        for num_streams in options.streams:
            measure(server.port, parts, num_streams, 64)
            runs = [measure(server.port, parts, num_streams, options.tokens) for _ in range(options.repeat)]
            results.append({"streams": num_streams, "us_per_token": report(runs)})
    write_report({"results": results}, options.output)


if __name__ == "__main__":
    main()
