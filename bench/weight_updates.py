"""What weight updates cost that wait for no request: throughput with them over that without, in windows of the same server that take turns.

    python -m bench.weight_updates MODEL [--to MODEL] [--policy recompute] [--every 30] [--seconds 90] [--rounds 1] [--streams 16] [--output FILE]

Streams of 128 tokens in and 256 out follow one another without a break; an update from disk comes half an interval after the start of a window, then
each interval: to --to and to MODEL by turns. From the labels of the tokens: the tokens of KV of other weights, how many requests went on across each
update, and the tokens that were computed again for it, whose share of the time follows from the prefill rate that is measured first.
"""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import httpx

from bench.program import parser_of, refusals, write_report
from bench.servers import greedy, own_server, posted

TOKENS_IN, TOKENS_OUT = 128, 256


class Load:
    """Clients of a server. vocabulary: token ids are below it."""

    def __init__(self, url: str, num_streams: int, vocabulary: int) -> None:
        self.url, self.num_streams, self.vocabulary = url, num_streams, vocabulary
        self._numbers = itertools.count()

    def ask(self, num_in: int, num_out: int) -> dict[str, Any]:
        """The meta_info of a new prompt's greedy reply."""
        source = random.Random(next(self._numbers))
        ids = [source.randrange(self.vocabulary // 40, self.vocabulary) for _ in range(num_in)]
        return dict(greedy(self.url, ids, num_out)["meta_info"])

    def prefill_rate(self) -> float:
        """Tokens per second of prompts as long as requests are on average, as many at a time as there are streams."""
        length = TOKENS_IN + TOKENS_OUT // 2
        begin = time.perf_counter()
        with ThreadPoolExecutor(self.num_streams) as pool:
            list(pool.map(lambda _: self.ask(length, 1), range(self.num_streams)))
        return self.num_streams * length / (time.perf_counter() - begin)

    def num_made(self) -> int:
        return int(httpx.get(f"{self.url}/internal_state", timeout=600).json()["generation_tokens"])

    def window(self, seconds: float, every_s: float, models: list[str]) -> dict[str, Any]:
        """Throughput over `seconds`, after the first tokens of all streams. models: to update to, by turns; none = no updates."""
        stop = threading.Event()
        replies: list[dict[str, Any]] = []

        def stream() -> None:
            while not stop.is_set():
                replies.append(self.ask(TOKENS_IN, TOKENS_OUT))

        threads = [threading.Thread(target=stream) for _ in range(self.num_streams)]
        at_rest = self.num_made()
        for thread in threads:
            thread.start()
        while self.num_made() < at_rest + self.num_streams:
            time.sleep(0.01)
        begin_s, made = time.monotonic(), self.num_made()
        took_s: list[float] = []
        for number in itertools.count():
            at_s = begin_s + (number + 0.5) * every_s
            if not models or at_s > begin_s + seconds:
                break
            time.sleep(max(0.0, at_s - time.monotonic()))
            sent_s = time.monotonic()
            body = {"model_path": models[number % len(models)], "weight_version": f"{begin_s}-{number}"}
            posted(f"{self.url}/update_weights_from_disk", body)
            took_s.append(time.monotonic() - sent_s)
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        made, lasted_s = self.num_made() - made, time.monotonic() - begin_s
        stop.set()
        for thread in threads:
            thread.join()
        found: dict[str, Any] = {"tokens_per_s": made / lasted_s, "seconds": lasted_s}
        return found | (_of_updates(replies, took_s) if models else {})


def _of_updates(replies: list[dict[str, Any]], took_s: list[float]) -> dict[str, Any]:
    """What the labels of the replies say. went_on: requests with tokens before and after an update."""
    went_on: dict[str, int] = {}
    again = old = 0
    for meta in replies:
        parts = meta.get("weight_versions", [])
        ends = [part["start"] for part in parts[1:]] + [meta["completion_tokens"]]
        old += sum(end - part["start"] for part, end in zip(parts, ends, strict=True) if part["kv_age"])
        for part in parts[1:]:
            went_on[part["weight_version"]] = went_on.get(part["weight_version"], 0) + 1
            again += TOKENS_IN + part["start"]
    return {
        "updates": len(took_s),
        "update_s": [round(seconds, 2) for seconds in took_s],
        "went_on": list(went_on.values()),
        "drained": len(took_s) - len(went_on),
        "tokens_of_old_kv": old,
        "computed_again": again,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--to")
    parser.add_argument("--policy", choices=("flush", "recompute", "keep"), default="recompute")
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=40000)
    options = parser.parse_args()
    models = [options.to or options.model, options.model]
    without, updated, rates = [], [], []
    with refusals(), own_server(options.model, ("--kv-on-update", options.policy)) as server:
        load = Load(server.url, options.streams, options.vocabulary)
        load.prefill_rate()
        for _ in range(options.rounds):
            rates.append(load.prefill_rate())
            without.append(load.window(options.seconds, options.every, []))
            updated.append(load.window(options.seconds, options.every, models))
    rate = median(rates)
    share = median(one["computed_again"] / rate / one["seconds"] for one in updated)
    ratio = median(one["tokens_per_s"] for one in updated) / median(one["tokens_per_s"] for one in without)
    found = {
        "model": options.model,
        "to": options.to or options.model,
        "policy": options.policy,
        "streams": options.streams,
        "every_s": options.every,
        "prefill_tokens_per_s": [round(one, 1) for one in rates],
        "without": without,
        "updated": updated,
        "throughput_ratio": round(ratio, 4),
        "share_of_time_computed_again": round(share, 4),
        "ratio_less_that_share": round(ratio / (1 - share), 4) if share < 1 else None,
    }
    write_report(found, options.output)


if __name__ == "__main__":
    main()
