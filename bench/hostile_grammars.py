"""Grammars that take all that they can get, each beside 8 plain streams: how it ends, and what the streams notice.

    .venv/bin/python -m bench.hostile_grammars [MODEL] [--serve "OPTIONS"] [--repeat 5] [--output FILE]

In each round, starts `headrace serve` and, for each grammar of tests/reliability/hostile_grammars.py, first lets 8 streams run alone, then
beside a request with that grammar. Reports the request's answer and how long it took, the worst gap between two chunks of a stream (alone and
beside it), and by how much the memory of all processes has grown when everything is over. Prints JSON: the median of the worst gaps over the
rounds and each of them, the longest time to an answer and the largest growth; times in seconds.
"""

import asyncio
import json
import shlex
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import aiohttp

from bench.program import parser_of, write_report
from bench.servers import ServerProcess, arrivals, own_server
from tests.reliability.hostile_grammars import HOSTILE

STREAMS = 8
TOKENS = 200
LIMIT_S = 60.0


async def beside_streams(session: aiohttp.ClientSession, url: str, params: dict[str, Any] | None) -> dict[str, Any]:
    """8 streams, and once they run the request with `params`, if any."""
    streams = asyncio.gather(*(arrivals(url, f"Story {number}:", TOKENS) for number in range(STREAMS)))
    found: dict[str, Any] = {}
    if params is not None:
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        body = {"text": "Answer:", "sampling_params": {"max_new_tokens": 64} | params}
        async with session.post("/generate", json=body) as reply:
            answer = await reply.json()
        found = {"status": reply.status, "seconds": round(time.perf_counter() - begin, 2)}
        if reply.status == 200:
            found["finish"] = answer["meta_info"]["finish_reason"]["type"]
            found["output_tokens"] = answer["meta_info"]["completion_tokens"]
        else:
            found["message"] = answer["error"]["message"][:200]
    worst = max(after - before for times in await streams for before, after in pairwise(times))
    return {"worst_gap_s": round(worst, 4), **found}


async def measure(server: ServerProcess, number: int) -> list[dict[str, Any]]:
    """Every grammar in turn, each new to the server; a dictionary for each."""
    results = []
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        await beside_streams(session, server.url, {"regex": "warm( up)?"})
        for name, params in HOSTILE.items():
            alone = await beside_streams(session, server.url, None)
            before_mib = server.memory_mib()
            beside = await beside_streams(session, server.url, params)
            await asyncio.sleep(2.0)
            found = {
                "grammar": name,
                "alone_worst_gap_s": alone["worst_gap_s"],
                **beside,
                "grown_mib": round(server.memory_mib() - before_mib, 1),
            }
            print(f"round {number}:", json.dumps(found), file=sys.stderr)
            results.append(found)
    return results


def summary(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each grammar: the last answer, the longest wait, the largest growth, and the medians of the worst gaps."""
    summed = []
    for values in zip(*rounds, strict=True):
        alone = [value["alone_worst_gap_s"] for value in values]
        beside = [value["worst_gap_s"] for value in values]
        summed.append(
            values[-1]
            | {
                "seconds": max(value["seconds"] for value in values),
                "grown_mib": max(value["grown_mib"] for value in values),
                "alone_worst_gap_s": statistics.median(alone),
                "worst_gap_s": statistics.median(beside),
                "gap_ratio": round(statistics.median(beside) / statistics.median(alone), 2),
                "gaps_s": {"alone": alone, "beside": beside},
            }
        )
    return summed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--serve", default="--quantization int8", help="options of the server")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, each with a server of its own (default 5)")
    options = parser.parse_args()
    rounds = []
    for number in range(1, options.repeat + 1):
        with own_server(options.model, shlex.split(options.serve)) as server:
            rounds.append(asyncio.run(measure(server, number)))
    write_report({"results": summary(rounds)}, options.output)


if __name__ == "__main__":
    main()
