"""What --kv-cache-dir gives: the first token of a long prompt after a kill -9, and the throughput where half of the prefixes fit into the pool.

    python -m bench.kv_files MODEL [--rounds 3] [--tokens 8000] [--prefixes 64] [--requests 96] [--parts restart,shared] [--output FILE]

A round of the first: a new prompt is computed, asked again, and asked of a new server two seconds after the end of the old one by kill -9, with the
files in the page cache and then after POSIX_FADV_DONTNEED. The second: prefixes of 2,048 tokens in random order, 8 at a time, 32 tokens out, with
and without files that hold them all. Texts must be the same in all.
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track

from bench.program import parser_of, refusals, words, write_report
from bench.servers import ServerProcess, greedy, own_server

PREFIX, OUT, AT_ONCE = 2048, 32, 8
_SETTLED_S = 2.0
"""After which a prefix has been written, and the weights of a new server have been hashed."""


def ids_of(number: int, count: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(1000, 40000) for _ in range(count)]


def ask(url: str, ids: Sequence[int], num_new: int = 1) -> tuple[float, int, str]:
    """Seconds, cached tokens and text of a greedy reply."""
    begin = time.perf_counter()
    reply = greedy(url, ids, num_new)
    return time.perf_counter() - begin, reply["meta_info"]["cached_tokens"], reply["text"]


def kill(server: ServerProcess) -> None:
    for process in [*server.process.children(recursive=True), server.process]:
        process.send_signal(signal.SIGKILL)


def drop_from_memory(folder: Path) -> None:
    """Let the system forget what the files hold."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def restarted(model: str, folder: Path, rounds: int, num_tokens: int) -> dict[str, Any]:
    """The first token of a prompt, by where its KV is."""
    found: dict[str, list[tuple[float, int, str]]] = {"computed": [], "tree": [], "files": [], "disk": []}
    options = ("--kv-cache-dir", str(folder))
    for number in track(range(rounds), "restarts", transient=True):
        ids = ids_of(number, num_tokens)
        for wheres in (("computed", "tree"), ("files",), ("disk",)):
            if wheres == ("disk",):
                drop_from_memory(folder)
            with own_server(model, options) as server:
                ask(server.url, ids_of(-1, 16))
                time.sleep(_SETTLED_S)
                for where in wheres:
                    found[where].append(ask(server.url, ids))
                time.sleep(_SETTLED_S)
                kill(server)
    computed_s = median(seconds for seconds, _, _ in found["computed"])
    rows = {
        where: {
            "seconds": [round(seconds, 4) for seconds, _, _ in asked],
            "over_computed": round(median(seconds for seconds, _, _ in asked) / computed_s, 4),
            "cached_tokens": [cached for _, cached, _ in asked],
        }
        for where, asked in found.items()
    }
    same = all(len({asked[number][2] for asked in found.values()}) == 1 for number in range(rounds))
    return {"prompt_tokens": num_tokens, "same_text": same, **rows}


def turns(url: str, order: Iterable[int]) -> tuple[float, int, list[str]]:
    """Seconds, cached tokens and texts of requests for prefixes in this order."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as clients:
        replies = list(clients.map(lambda number: ask(url, ids_of(number, PREFIX), OUT), order))
    return time.perf_counter() - begin, sum(cached for _, cached, _ in replies), [text for _, _, text in replies]


def throughput(
    model: str, folder: Path | None, num_prefixes: int, num_requests: int
) -> tuple[dict[str, Any], list[str]]:
    """Where the pool holds half of the prefixes, with files below `folder` or without; and the texts."""
    source = random.Random(0)
    order = [source.randrange(num_prefixes) for _ in range(num_requests)]
    options = ["--max-total-tokens", str(num_prefixes * PREFIX // 2)]
    if folder is not None:
        options += ["--kv-cache-dir", str(folder)]
    with own_server(model, options) as server:
        turns(server.url, range(num_prefixes // 2 if folder is None else num_prefixes))
        time.sleep(_SETTLED_S)
        seconds, cached, texts = turns(server.url, order)
    return {"tokens_per_s": round(num_requests * OUT / seconds, 1), "cached_tokens": cached}, texts


def shared(model: str, folder: Path, num_prefixes: int, num_requests: int) -> dict[str, Any]:
    files, texts = throughput(model, folder, num_prefixes, num_requests)
    without, texts_without = throughput(model, None, num_prefixes, num_requests)
    return {
        "prefixes": num_prefixes,
        "prefix_tokens": PREFIX,
        "requests": num_requests,
        "files": files,
        "without": without,
        "ratio": round(files["tokens_per_s"] / without["tokens_per_s"], 2),
        "same_texts": texts == texts_without,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--prefixes", type=int, default=64)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--parts", type=words, default=("restart", "shared"))
    options = parser.parse_args()
    found = {"model": options.model}
    with refusals(), tempfile.TemporaryDirectory(prefix="headrace-kv-", ignore_cleanup_errors=True) as folder:
        if "restart" in options.parts:
            found["restart"] = restarted(options.model, Path(folder), options.rounds, options.tokens)
        if "shared" in options.parts:
            found["shared"] = shared(options.model, Path(folder), options.prefixes, options.requests)
        write_report(found, options.output)


if __name__ == "__main__":
    main()
