"""What an open dashboard costs a busy server: tokens per second of many streams, with and without it, in turns.

    .venv/bin/python -m bench.dashboard [MODEL] [--streams 200] [--tokens 800] [--window 5] [--serve "OPTIONS"] [--output FILE]

Starts `headrace serve` and lets all streams run at once. Every other window of so many seconds, a client asks once a second for what the page asks
for (src/headrace/server/ui/static/dashboard.js, with a server without keys); a browser would draw its plots on another machine. Each window with
it is compared with the mean of its two neighbours without it, since a step takes longer as the streams grow. Prints JSON: the mean of these ratios
with its standard error, and, since the speed of a shared machine varies by more than the page costs, the processor time of the server's main
process, which answers the page, in each kind of window.
"""

import argparse
import asyncio
import contextlib
import shlex
import statistics
import time

import aiohttp

from bench.program import parser_of, write_report
from bench.servers import ServerProcess, arrivals, own_server

PERIOD_S = 1.0
PATHS = ("/metrics", "/v1/loads", "/internal_state", "/v1/requests?limit=100")


async def watch(session: aiohttp.ClientSession, url: str, looks: list[int]) -> None:
    """What the page does until it is closed. looks: gets the bytes of each look."""

    async def read(path: str) -> int:
        async with session.get(url + path) as reply:
            assert reply.status == 200, (path, reply.status)
            return len(await reply.read())

    while True:
        looks.append(sum(await asyncio.gather(*map(read, PATHS))))
        await asyncio.sleep(PERIOD_S)


async def open_and_close(server: ServerProcess, window_s: float, looks: list[int], busy_s: list[float]) -> None:
    """Watch in every other window, from the second on. busy_s: gets the main process's processor time in each window."""

    def busy() -> float:
        times = server.process.cpu_times()
        return float(times.user + times.system)

    before = busy()
    async with aiohttp.ClientSession() as session:
        while True:
            for is_open in (False, True):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(window_s):
                        await (watch(session, server.url, looks) if is_open else asyncio.sleep(2 * window_s))
                busy_s.append(round(busy() - before, 2))
                before += busy_s[-1]


async def measure(server: ServerProcess, options: argparse.Namespace) -> dict[str, object]:
    """One run of all streams."""
    url = server.url
    looks: list[int] = []
    busy_s: list[float] = []
    await asyncio.gather(*(arrivals(url, f"Story {number}:", 8) for number in range(options.streams)))
    streams = asyncio.gather(*(arrivals(url, f"Story {number}:", options.tokens) for number in range(options.streams)))
    await asyncio.sleep(options.window)  # the prompts
    begin = time.perf_counter()
    page = asyncio.create_task(open_and_close(server, options.window, looks, busy_s))
    found = await streams
    page.cancel()
    await asyncio.wait([page])
    end = min(times[-1] for times in found)
    counts = [0] * int((end - begin) / options.window)
    for times in found:
        for now_s in times:
            window = int((now_s - begin) / options.window)
            if now_s >= begin and window < len(counts):
                counts[window] += 1
    rates = [count / options.window for count in counts]
    whole = min(len(busy_s), len(counts))

    def busy_share(seconds: list[float]) -> float:
        return round(statistics.mean(seconds) / options.window, 4)

    ratios = [rates[i] / statistics.mean((rates[i - 1], rates[i + 1])) for i in range(1, len(rates) - 1, 2)]
    return {
        "streams": options.streams,
        "tokens": options.tokens,
        "window_s": options.window,
        "ratio_mean": round(statistics.mean(ratios), 4),
        "ratio_standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
        "main_process_busy_share": {"closed": busy_share(busy_s[0:whole:2]), "open": busy_share(busy_s[1:whole:2])},
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "looks": len(looks),
        "bytes_a_look": round(statistics.median(looks)),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--window", type=float, default=5.0, help="seconds")
    parser.add_argument(
        "--serve", default="--quantization int8 --max-running-requests 256", help="options of the server"
    )
    options = parser.parse_args()
    with own_server(options.model, shlex.split(options.serve)) as server:
        results = asyncio.run(measure(server, options))
    write_report({"results": results}, options.output)


if __name__ == "__main__":
    main()
