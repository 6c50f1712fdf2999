"""A seeded mix of clients against a server of its own, for seconds or for hours, and checks of the server's state afterwards.

Owns the mix (chats that grow turn by turn, completions, several samples, clients that leave, bad requests, pins), updates of the weights to the same
weights without a drain, the checks of every reply, the samples of memory and throughput, and the final state: nothing may run, leak or have changed.
Run by `scripts/soak`; the server is a process, the clients are tasks of one event loop here.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from bench.program import words
from headrace.api.http_client import DONE, EventParser
from headrace.api.runtime import Runtime
from headrace.benchmark.results import header, write_json
from headrace.benchmark.tables import print_table
from headrace.errors import ExecutionError

KINDS: tuple[tuple[str, int], ...] = (("chat", 60), ("completion", 20), ("disconnect", 10), ("bad", 5), ("samples", 5))
"""What clients do, in percent."""
PINS = ("pin", 10)
PIN_S = 15
"""The longest time of a pin: all have ended when the idle server is looked at."""

LIMITS: dict[str, Any] = {"max_running_requests": 8, "max_queued_requests": 64, "chunked_prefill_size": 128}
MAX_TURNS = 6
WARM_UP_SHARE = 1 / 3
"""Memory is judged after this share of the time; before, caches and arenas fill (it takes ten minutes, see docs/operations.md)."""
JUDGED_MINUTES = 30.0
"""Runs of at least this length without kills must keep the limits on memory growth and throughput; other runs only report them."""
MAX_SLOPE_MB_PER_HOUR = 1.0
MIN_LAST_TO_FIRST = 0.95
SETTLE_S = 20.0
RECOVER_S = 120.0
"""A killed scheduler has to be back within this time."""
MAX_RESTARTS = 1_000_000
REQUEST_TIMEOUT_S = 120.0
MB = 1 << 20
MAX_PROBLEMS = 50
NO_ROOM = (429, 503)
_WORDS = words("river, stone, light, winter, engine, paper, garden, signal, orange, window, thunder, market")
_BAD: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "n": "2"},
    {"messages": [{"role": "user", "content": "x"}], "nonsense": 1},
    {"messages": "x"},
)


@dataclass(slots=True)
class Sample:
    """The server at one moment: seconds since the start, bytes of all its processes, tokens received so far."""

    at_s: float
    rss_bytes: int
    num_tokens: int


@dataclass(slots=True)
class Soak:
    """What is counted during the run. problems: what was wrong, at most MAX_PROBLEMS entries.

    num_accepted: samples that the server took, whatever became of them. num_pins: pins that were asked for, each of which may be a sample.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    num_tokens: int = 0
    num_accepted: int = 0
    num_kills: int = 0
    num_pins: int = 0
    num_updates: int = 0

    def check(self, holds: bool, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not holds and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class NoRoom(Exception):
    """The server has turned a request away, which is no fault."""


class Client:
    """One client with a conversation that grows until MAX_TURNS, then begins anew."""

    def __init__(
        self, soak: Soak, session: aiohttp.ClientSession, model: str, rng: random.Random, pins: bool = False
    ) -> None:
        self._soak, self._session, self._model, self._rng = soak, session, model, rng
        self._kinds = [*KINDS, PINS] if pins else KINDS
        self._messages: list[dict[str, str]] = []

    async def act(self) -> None:
        """One request of a kind drawn from the mix."""
        kind = self._rng.choices([name for name, _ in self._kinds], [weight for _, weight in self._kinds])[0]
        act = {
            "chat": self._chat,
            "completion": self._completion,
            "disconnect": self._disconnect,
            "bad": self._bad,
            "samples": self._samples,
            "pin": self._pin,
        }[kind]
        try:
            await act()
        except NoRoom:
            kind = "shed"
        except (aiohttp.ClientError, TimeoutError) as error:
            self._soak.check(False, f"{kind}: {type(error).__name__}")
            return
        self._soak.counts[kind] += 1

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=num_words))

    def _is_taken(self, kind: str, status: int, num_samples: int = 1) -> bool:
        """Whether the server has taken a request; a refusal is noted. Raises NoRoom."""
        if status in NO_ROOM:
            raise NoRoom
        self._soak.num_accepted += num_samples
        self._soak.check(status == 200, f"{kind}: status {status}")
        return status == 200

    async def _answer(self, kind: str, path: str, body: dict[str, Any], num_samples: int = 1) -> Any:
        """None if the request is refused."""
        async with self._session.post(path, json=body) as reply:
            return await reply.json() if self._is_taken(kind, reply.status, num_samples) else None

    async def _chat(self) -> None:
        if len(self._messages) >= 2 * MAX_TURNS:
            self._messages = []
        self._messages.append({"role": "user", "content": self._text(self._rng.randint(2, 12))})
        body = {
            "model": self._model,
            "messages": self._messages,
            "stream": True,
            "max_tokens": self._rng.randint(4, 24),
        }
        text, ends, done = "", 0, 0
        async with self._session.post("/v1/chat/completions", json=body) as reply:
            if reply.status == 400:  # the conversation has outgrown the context
                self._messages = []
                return
            if reply.status in NO_ROOM:
                await asyncio.sleep(min(5.0, float(reply.headers["retry-after"])))
            self._is_taken("chat", reply.status)
            parser = EventParser()
            async for piece in reply.content.iter_any():
                for event in parser.feed(piece):
                    if event == DONE:
                        done += 1
                        continue
                    chunk = json.loads(event)
                    self._soak.check("error" not in chunk, f"chat: {chunk.get('error')}")
                    for choice in chunk.get("choices", ()):
                        text += choice["delta"].get("content") or ""
                        ends += choice["finish_reason"] is not None
                        self._soak.num_tokens += bool(choice["delta"].get("content"))
        self._soak.check((ends, done) == (1, 1), f"chat: {ends} finish reasons and {done} [DONE]")
        self._messages.append({"role": "assistant", "content": text})

    async def _completion(self) -> None:
        prompt = self._text(self._rng.randint(5, 60))
        body = {"model": self._model, "prompt": prompt, "max_tokens": self._rng.randint(1, 24)}
        if (answer := await self._answer("completion", "/v1/completions", body)) is not None:
            is_finished = answer["choices"][0]["finish_reason"] in ("stop", "length")
            self._soak.check(is_finished, "completion: no finish reason")
            self._soak.num_tokens += answer["usage"]["completion_tokens"]

    async def _samples(self) -> None:
        params = {"max_new_tokens": 8, "n": 2, "temperature": 0.8}
        body = {"text": self._text(20), "sampling_params": params, "return_logprob": True}
        if (answers := await self._answer("samples", "/generate", body, num_samples=2)) is not None:
            self._soak.check(len(answers) == 2, f"answers to a request for two samples: {len(answers)}")
            self._soak.num_tokens += sum(each["meta_info"]["completion_tokens"] for each in answers)

    async def _disconnect(self) -> None:
        body = {"text": self._text(40), "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        reply = await self._session.post("/generate", json=body)
        try:
            self._is_taken("disconnect", reply.status)
            for _ in range(self._rng.randint(0, 4)):
                await reply.content.readany()
        finally:
            reply.close()  # the connection, not only the reply

    async def _pin(self) -> None:
        self._soak.num_pins += 1
        body = {"prompt": self._text(self._rng.randint(10, 120)), "ttl": self._rng.randint(1, PIN_S)}
        async with self._session.post("/v1/cache/pin", json=body) as reply:
            is_known = reply.status in (200, 400, *NO_ROOM)  # 400: larger than the share
            self._soak.check(is_known, f"pin: status {reply.status}")
            if reply.status != 200:
                raise NoRoom

    async def _bad(self) -> None:
        body = {"model": self._model, **self._rng.choice(_BAD)}
        async with self._session.post("/v1/chat/completions", json=body) as reply:
            self._soak.check(reply.status == 400, f"bad: status {reply.status}")


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run it against a new server; the report. Raises what starting the server raises."""
    arguments = {**LIMITS, **options.server}
    if options.kill_every_s:
        arguments["max_restarts"] = MAX_RESTARTS
    with Runtime(model_path=options.model, log_level="warning", **arguments) as runtime:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(runtime.url, timeout=timeout, connector=connector) as session:
            run = Soak()
            async with session.get("/v1/models") as reply:
                name = (await reply.json())["data"][0]["id"]
            golden = await _canary(session)
            ended_before = await _num_ended(session)
            num_processes = len(_processes(runtime.pid))
            begin_s = time.monotonic()
            end_s = begin_s + 60 * options.minutes
            rng = random.Random(options.seed)
            sources = [random.Random(rng.random()) for _ in range(options.clients)]
            clients = [Client(run, session, name, source, options.pins) for source in sources]
            helpers = [_watch(run, runtime.pid, begin_s, end_s)]
            if options.kill_every_s:
                helpers.append(_kill(run, session, runtime.pid, options.kill_every_s, end_s))
            if options.update_every_s:
                helpers.append(_update(run, session, options.model, options.update_every_s, end_s))
            await asyncio.gather(*helpers, *(_repeat(client, end_s) for client in clients))
            duration_s = time.monotonic() - begin_s
            state = await _look_after(run, session, golden)
            num_ended = await _num_ended(session) - ended_before - 1  # the last canary
            as_many = num_ended == run.num_accepted or (run.num_pins > 0 and num_ended > run.num_accepted)
            run.check(as_many, f"samples accepted: {run.num_accepted} and pins, ended: {num_ended}")
            now = len(_processes(runtime.pid))
            run.check(now == num_processes, f"there are {now} processes, there were {num_processes}")
    return _report(options, run, duration_s, state)


async def _repeat(client: Client, end_s: float) -> None:
    while time.monotonic() < end_s:
        await client.act()


async def _kill(run: Soak, session: aiohttp.ClientSession, pid: int, every_s: float, end_s: float) -> None:
    """Kill a scheduler (kill -9) every `every_s` seconds, except while one is being started."""
    while time.monotonic() + every_s < end_s:
        await asyncio.sleep(every_s)
        if await _health(session) == 200:
            schedulers = [process for process in _processes(pid) if _is_scheduler(process)]
            if schedulers:
                schedulers[run.num_kills % len(schedulers)].kill()
                run.num_kills += 1


def _is_scheduler(process: psutil.Process) -> bool:
    """False for one that was killed, too."""
    try:
        return "scheduler" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


async def _update(run: Soak, session: aiohttp.ClientSession, model: str, every_s: float, end_s: float) -> None:
    """Load the same weights again every `every_s` seconds. While a scheduler is being started, it may be refused."""
    while time.monotonic() + every_s < end_s:
        await asyncio.sleep(every_s)
        kills = run.num_kills
        async with session.post("/update_weights_from_disk", json={"model_path": model}) as reply:
            reason = await reply.text()
        run.num_updates += reply.status == 200
        run.check(reply.status == 200 or run.num_kills > 0, f"update {reply.status}: {reason[:200]} ({kills} kills)")


async def _watch(run: Soak, pid: int, begin_s: float, end_s: float) -> None:
    """Samples of memory, a hundred in all, and not more than one a second."""
    step_s = max(1.0, (end_s - begin_s) / 100)
    while (now_s := time.monotonic()) < end_s:
        rss = 0
        for process in _processes(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                rss += process.memory_info().rss
        run.samples.append(Sample(now_s - begin_s, rss, run.num_tokens))
        await asyncio.sleep(min(step_s, max(0.0, end_s - time.monotonic())))


async def _look_after(run: Soak, session: aiohttp.ClientSession, golden: object) -> dict[str, Any]:
    """Check the final state of the idle server."""
    recovered_s = time.monotonic() + (RECOVER_S if run.num_kills else 0.0)
    while (status := await _health(session)) != 200 and time.monotonic() < recovered_s:  # noqa: ASYNC110  another process
        await asyncio.sleep(0.1)
    run.check(status == 200, f"health: {status}")
    deadline_s = time.monotonic() + SETTLE_S
    while (state := await _state(session))["num_running"] + state["num_waiting"] + state["pool"]["leased_tokens"]:
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.1)
    pool = state["pool"]
    run.check(state["num_running"] + state["num_waiting"] == 0, f"{state['num_running']} still run")
    run.check(pool["free_tokens"] + pool["evictable_tokens"] == pool["total_tokens"], f"KV is missing: {pool}")
    run.check(pool["request_slots_free"] == pool["request_slots_total"], f"slots are missing: {pool}")
    run.check(state["memory_repairs"] == 0, f"{state['memory_repairs']} repairs of the pool")
    run.check(await _canary(session) == golden, "the canary's text has changed")
    async with session.post("/flush_cache") as reply:
        run.check(reply.status == 200, f"flush: {reply.status}")
    frontend = (await _state(session))["frontend"]
    restarts = frontend["num_restarts"]
    run.check(restarts == run.num_kills, f"restarts: {restarts}, kills: {run.num_kills}")
    run.check(frontend["num_held"] == 0, f"samples still held: {frontend['num_held']}")
    pool = (await _state(session))["pool"]
    run.check(pool["free_tokens"] == pool["total_tokens"], f"KV is missing after a flush: {pool}")
    return state


async def _state(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/internal_state") as reply:
        state: dict[str, Any] = await reply.json()
        return state


async def _health(session: aiohttp.ClientSession) -> int:
    async with session.get("/health") as reply:
        return reply.status


async def _num_ended(session: aiohttp.ClientSession) -> int:
    """The number of samples that have ended for any reason, as /metrics counts them."""
    async with session.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("headrace:requests_total{")))


async def _canary(session: aiohttp.ClientSession) -> object:
    """The ids of one greedy request."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    body = {"text": "The canary sings: ", "sampling_params": sampling}
    async with session.post("/generate", json=body) as reply:
        if reply.status != 200:
            raise ExecutionError(f"the server does not answer: {reply.status}")
        return (await reply.json())["output_ids"]


def _processes(pid: int) -> list[psutil.Process]:
    main = psutil.Process(pid)
    return [main, *sorted(main.children(), key=lambda child: child.pid)]


def slope_per_hour(samples: list[Sample]) -> float:
    """Bytes per hour by least squares over the samples after the warm-up; 0.0 for fewer than three."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    if len(kept) < 3:
        return 0.0
    line = linear_regression([each.at_s for each in kept], [each.rss_bytes for each in kept])
    return 3600 * line.slope


def first_and_last(samples: list[Sample]) -> tuple[float, float]:
    """Tokens per second of the first and of the last part: ten minutes, or a third of a shorter run."""
    if len(samples) < 4:
        return 0.0, 0.0
    part_s = min(600.0, (samples[-1].at_s - samples[0].at_s) / 3)
    first = [each for each in samples if each.at_s <= samples[0].at_s + part_s]
    last = [each for each in samples if each.at_s >= samples[-1].at_s - part_s]
    return _rate(first), _rate(last)


def _rate(part: list[Sample]) -> float:
    elapsed_s = part[-1].at_s - part[0].at_s
    return (part[-1].num_tokens - part[0].num_tokens) / elapsed_s if elapsed_s > 0 else 0.0


def _report(options: argparse.Namespace, run: Soak, duration_s: float, state: dict[str, Any]) -> dict[str, Any]:
    slope = slope_per_hour(run.samples) / MB
    first, last = first_and_last(run.samples)
    judged = options.minutes >= JUDGED_MINUTES and not run.num_kills
    if judged:
        run.check(slope <= MAX_SLOPE_MB_PER_HOUR, f"memory grows by {slope:.1f} MB per hour")
        run.check(
            last >= MIN_LAST_TO_FIRST * first, f"throughput fell from {first:.1f} to {last:.1f} tokens per second"
        )
    return {
        **header("soak", "scripts/soak"),
        "model": Path(options.model).name,
        "seed": options.seed,
        "clients": options.clients,
        "duration_s": round(duration_s, 1),
        "requests": dict(run.counts),
        "tokens_per_s_first": round(first, 1),
        "tokens_per_s_last": round(last, 1),
        "rss_mb_first": round(run.samples[0].rss_bytes / MB, 1),
        "rss_mb_last": round(run.samples[-1].rss_bytes / MB, 1),
        "rss_slope_mb_per_hour": round(slope, 1),
        "slope_and_throughput_judged": judged,
        "num_retracted": state["num_retracted"],
        "num_kills": run.num_kills,
        "num_updates": run.num_updates,
        "num_pins": run.num_pins,
        "kv_cache_dir": "kv_cache_dir" in options.server,
        "num_replayed": state["frontend"]["num_replayed"],
        "problems": run.problems,
        "samples": [asdict(each) for each in run.samples],
    }


def print_report(report: dict[str, Any]) -> None:
    """The report as a table."""
    table = Table("what", "value", title="soak", title_justify="left")
    for name, value in report.items():
        if name not in ("schema", "kind", "command", "machine", "samples", "problems"):
            table.add_row(name, str(value))
    table.add_row("problems", "\n".join(report["problems"]) or "none")
    print_table(Console(), table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of scripts/soak; `server`: further options of the server, as ServerArgs has them."""
    parser = argparse.ArgumentParser(
        "scripts/soak", description="A mix of clients against a server, and its state after."
    )
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="length of the run (default 1; a real one takes hours)"
    )
    parser.add_argument("--model", default="smollm2", help="as `headrace serve` takes it")
    parser.add_argument("--clients", type=int, default=12, help="number of concurrent clients (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-total-tokens", type=int, default=4096, help="of the KV pool (default 4096: it gets full)"
    )
    parser.add_argument(
        "--kill-every-s", type=float, default=0.0, help="kill -9 the scheduler every so many seconds (default 0: never)"
    )
    parser.add_argument("--kv-cache-dir", help="keep KV in files of this folder, which is made")
    parser.add_argument("--pins", action="store_true", help="a tenth as many pins as other requests")
    parser.add_argument(
        "--update-every-s", type=float, default=0.0, help="load the weights again every so many seconds, with no drain"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON report, such as bench/results")
    options = parser.parse_args(argv)
    options.server = {"max_total_tokens": options.max_total_tokens}
    if options.kv_cache_dir:
        options.server["kv_cache_dir"] = options.kv_cache_dir
    if options.update_every_s:
        options.server["kv_on_update"] = "recompute"
    return options


def main() -> int:
    """0 when there was no problem."""
    options = parse()
    report = asyncio.run(soak(options))
    print_report(report)
    if options.out is not None:
        path = options.out / f"{report['date'][:10]}-soak-{options.minutes:g}min.json"
        write_json(path, report)
        print(path)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
