"""Whether files of KV can lie, or cost more than they save: damage of every kind below --kv-cache-dir of a real server.

    python -m bench.kv_damage MODEL [--parts files,full,gone,slow,shared,weights,killed,writer] [--trials 1000] [--points 20] [--kills 200] [--seed 0]
        [--output FILE]

files: before each of --trials requests a file is changed in a bit, cut, swapped with another, or none. full: no file may have more than a MiB.
gone: the folder cannot be written. slow: reading has 20 MB/s. shared: two servers on one folder, which is damaged, too. weights: a bit of one weight
is changed under the same name. killed: kill -9 while files are written, at --points moments, and a new server. writer: a tier alone, killed at
--kills points while it writes: half of them after so many bytes, half after so long; what the next one finds is compared byte for byte.

The pool holds a third of the prompts. A text must be the one that was computed without files, and take at most 1.1 times as long: the report has
the number of texts that differ, and the median of the seconds over that of computing, of what was found and of what was not. What was not found is
asked again at once of a server without files and tree (of a new one, where it was the first request of a server): that is what computing takes.
Parts may run one at a time, and several times: the report adds to that of the same file.
"""

import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.progress import track

from bench.kv_files import ask, ids_of, kill
from bench.kv_writer import killed_writers, unfinished
from bench.program import parser_of, refusals, words, write_report
from bench.servers import ServerProcess, own_server
from headrace import Engine
from headrace.cache.page_files import PageFiles, Run
from headrace.checkpoint.names import resolve_model

PROMPTS, TOKENS, OUT = 9, 256, 4
POOL = ("--max-total-tokens", str(PROMPTS * TOKENS // 3 + 256))
PLAIN = (*POOL, "--disable-radix-cache")
SLOW_BYTES_PER_S = 20e6
_PARTS = ("files", "full", "gone", "slow", "shared", "weights", "killed", "writer")


class Counts:
    """Of one part: what its requests said and took, beside what they say and take without files, on the server `plain`."""

    def __init__(self, texts: Sequence[str], plain: ServerProcess) -> None:
        self._texts = texts
        self._plain = plain
        self._computed_s: list[float] = []
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self.num_wrong = 0

    def ask(self, server: ServerProcess, number: int) -> int:
        seconds, cached, text = ask(server.url, ids_of(number, TOKENS), OUT)
        self.take(number, seconds, cached, text)
        return cached

    def ask_first(self, server: ServerProcess, number: int, model: str) -> None:
        """The first request of a new server: what is not found is compared with the first one of a new server without files."""
        seconds, cached, text = ask(server.url, ids_of(number, TOKENS), OUT)
        with own_server(model, PLAIN) if cached <= TOKENS // 2 else nullcontext(self._plain) as plain:
            self.take(number, seconds, cached, text, plain)

    def take(self, number: int, seconds: float, cached: int, text: str, plain: ServerProcess | None = None) -> None:
        self.num_wrong += text != self._texts[number]
        self._seconds[cached > TOKENS // 2].append(seconds)
        if cached <= TOKENS // 2:
            self._computed_s.append(ask((plain or self._plain).url, ids_of(number, TOKENS), OUT)[0])

    def report(self) -> dict[str, Any]:
        computed_s = median(self._computed_s) if self._computed_s else None
        over = {
            name: round(median(self._seconds[found]) / computed_s, 3) if computed_s and self._seconds[found] else None
            for name, found in (("found_over_computed", True), ("not_found_over_computed", False))
        }
        return {
            "requests": sum(map(len, self._seconds.values())),
            "found": len(self._seconds[True]),
            "wrong_texts": self.num_wrong,
            **over,
            "computed_s": computed_s and round(computed_s, 4),
        }


def damage(source: random.Random, folder: Path) -> str:
    """Do something to a file. Returns what."""
    files = sorted(folder.rglob("*.kv"))
    if not files:
        return "nothing"
    path, other = source.choice(files), source.choice(files)
    kind = source.choice(["bit", "cut", "swapped"])
    try:
        data = bytearray(path.read_bytes())
        match kind:
            case "bit":
                place = source.randrange(len(data)) if source.random() < 0.8 else source.randrange(200)
                data[place % len(data)] ^= 1 << source.randrange(8)
                path.write_bytes(data)
            case "cut":
                os.truncate(path, source.randrange(len(data)))
            case "swapped":
                path.write_bytes(other.read_bytes())
                other.write_bytes(data)
    except FileNotFoundError:  # the server has just removed it
        return "nothing"
    return kind


def metric(server: ServerProcess, name: str) -> int:
    """A counter of the server."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if name in line and not line.startswith("#")))


class Trials:
    """What all parts share: the model, the folder of the files, a server without them, and its text of each prompt."""

    def __init__(
        self, model: str, plain: ServerProcess, folder: Path, trials: int, points: int, kills: int, seed: int
    ) -> None:
        self._plain = plain
        self.model, self.folder, self.trials, self.points, self.kills = model, folder, trials, points, kills
        self.source = random.Random(seed)
        ask(plain.url, ids_of(-1, TOKENS), OUT)
        asked = [ask(plain.url, ids_of(number, TOKENS), OUT) for number in range(PROMPTS)]
        self.texts = [text for _, _, text in asked]
        self.computed_s = median(seconds for seconds, _, _ in asked)

    def counts(self) -> Counts:
        return Counts(self.texts, self._plain)

    def any_prompt(self) -> int:
        return self.source.randrange(PROMPTS)

    @contextmanager
    def server(self, model: str = "", *options: str) -> Iterator[ServerProcess]:
        with own_server(model or self.model, [*POOL, "--kv-cache-dir", str(self.folder), *options]) as server:
            yield server

    def rounds(self, counts: Counts, server: ServerProcess) -> dict[str, Any]:
        for number in [*range(PROMPTS), *(self.any_prompt() for _ in range(2 * PROMPTS))]:
            counts.ask(server, number)
        return counts.report()

    def files(self) -> dict[str, Any]:
        counts = self.counts()
        kinds: dict[str, int] = {}
        with self.server() as server:
            for number in range(PROMPTS):
                counts.ask(server, number)
            for _ in track(range(self.trials), "files", transient=True):
                kind = damage(self.source, self.folder)
                kinds[kind] = kinds.get(kind, 0) + 1
                counts.ask(server, self.any_prompt())
            removed = metric(server, "kv_tier_damaged_files_total")
        return {**counts.report(), "damage": kinds, "removed_files": removed}

    def full(self) -> dict[str, Any]:
        with self.server() as server:
            for process in [server.process, *server.process.children(recursive=True)]:
                psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            return self.rounds(self.counts(), server)

    def gone(self) -> dict[str, Any]:
        with self.server() as server:
            shutil.rmtree(self.folder)
            self.folder.write_text("no folder")
            found = self.rounds(self.counts(), server)
        self.folder.unlink()
        return found

    def slow(self) -> dict[str, Any]:
        read = PageFiles.read

        def slowly(files: PageFiles, run: Run, keys: Sequence[bytes], at_once: int) -> Iterator[tuple[int, memoryview]]:
            for first, part in read(files, run, keys, at_once):
                time.sleep(len(part) / SLOW_BYTES_PER_S)
                yield first, part

        counts = self.counts()
        options: dict[str, Any] = {"max_total_tokens": int(POOL[1]), "kv_cache_dir": str(self.folder)}
        PageFiles.read = slowly  # type: ignore[method-assign,assignment]
        try:
            with Engine(model_path=self.model, single_process=True, log_level="warning", **options) as engine:
                for number in [*range(PROMPTS), *(self.any_prompt() for _ in range(3 * PROMPTS))]:
                    begin = time.perf_counter()
                    sampling: Any = {"temperature": 0, "max_new_tokens": OUT, "ignore_eos": True}
                    reply: Any = engine.generate(input_ids=ids_of(number, TOKENS), sampling_params=sampling)
                    counts.take(number, time.perf_counter() - begin, reply["meta_info"]["cached_tokens"], reply["text"])
        finally:
            PageFiles.read = read  # type: ignore[method-assign]
        return counts.report()

    def shared(self) -> dict[str, Any]:
        counts = self.counts()
        with ExitStack() as stack:
            servers = [stack.enter_context(self.server()) for _ in range(2)]
            for _ in track(range(self.trials // 10), "two servers", transient=True):
                if self.source.random() < 0.3:
                    damage(self.source, self.folder)
                counts.ask(self.source.choice(servers), self.any_prompt())
        return counts.report()

    def weights(self) -> dict[str, Any]:
        """The first request of each prompt must compute it: `found` is 0. Packed weights of before would be loaded in place of these."""
        with self.server("", "--disable-weight-cache") as server:
            self.rounds(self.counts(), server)
        original = resolve_model(self.model)
        copy = self.folder.parent / "changed" / original.name
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            copy.parent.mkdir()
            shutil.copy2(original, copy)
        file = next(copy.glob("*.safetensors")) if copy.is_dir() else copy
        about = file.stat()
        file.chmod(0o600)
        with file.open("r+b") as data:
            data.seek(about.st_size // 2)
            byte = data.read(1)[0]
            data.seek(about.st_size // 2)
            data.write(bytes([byte ^ 1]))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        with self.server(str(copy), "--disable-weight-cache") as server:
            found = [ask(server.url, ids_of(number, TOKENS), OUT)[1] for number in range(PROMPTS)]
        shutil.rmtree(copy.parent)
        return {"requests": PROMPTS, "found": sum(cached > 0 for cached in found)}

    def killed(self) -> dict[str, Any]:
        counts = self.counts()
        for _ in track(range(self.points), "kill -9", transient=True):
            with self.server() as server, ThreadPoolExecutor(1) as client:
                counts.ask_first(server, self.any_prompt(), self.model)
                asked = client.submit(ask, server.url, ids_of(self.any_prompt(), TOKENS), OUT)
                time.sleep(self.source.random() * 1.5 * self.computed_s)
                kill(server)
                with suppress(httpx.HTTPError):
                    asked.result()
        with self.server() as server:
            counts.ask_first(server, self.any_prompt(), self.model)
            return {**self.rounds(counts, server), "unfinished": len(unfinished(self.folder))}

    def writer(self) -> dict[str, Any]:
        return killed_writers(self.folder.with_name("writer"), self.kills, self.source)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--parts", type=words, default=_PARTS)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    is_begun = options.output is not None and options.output.exists()
    before = json.loads(options.output.read_text()) if is_begun else {}
    found: dict[str, Any] = {part: before[part] for part in _PARTS if part in before}
    found["model"] = options.model
    folder = Path(tempfile.mkdtemp(prefix="headrace-kv-"))
    try:
        with refusals(), own_server(options.model, PLAIN) as plain:
            counts = options.trials, options.points, options.kills
            trials = Trials(options.model, plain, folder / "kv", *counts, options.seed)
            for part in options.parts:
                found[part] = [*found.get(part, ()), getattr(trials, part)()]
                write_report(found, options.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
