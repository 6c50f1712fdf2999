"""A prefill and a decode server beside one server alone: whether texts are the same, what streams notice, and what becomes of requests when one dies.

    python -m bench.disaggregation MODEL [--parts equality,failures,rooms,latency] [--prompts 200] [--points 100] [--rooms 1000] [--seed 0]
        [--backend tcp] [--output FILE]

Each request goes to both servers at once, as from a router. equality: --prompts requests of 1 to 1,500 tokens and of ten kinds, and three with
an image to a small model with random weights. failures: at --points random moments of 16 streams a scheduler or main process is killed (-9) or
stopped for STOPPED_S, or the router leaves; a stream must have the text of the server alone or an error, and wait at most LIMIT_S, not counting
how long its decode server was stopped; afterwards the pools of servers that live must be whole. rooms: 50 at once, and --rooms one after the
other: memory, threads and descriptors of both schedulers. latency: gaps of 8 streams of --tokens while prompts of 7,900 tokens come one after the
other, beside the streams alone, and beside one server, with and without --max-step-ms.

The servers of a pair have --num-threads 1 each, the server alone has 2. Parts may run one at a time: the report adds to that of the same file.
"""

import asyncio
import base64
import io
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import numpy as np
from PIL import Image

from bench.program import parser_of, refusals, words, write_report
from bench.servers import ServerProcess, free_port, own_server, token_times
from examples import make_tiny_vlm
from headrace.benchmark.http_stream import StreamReply, post
from headrace.config.machine import SECRET_VARIABLE

STREAMS, TOKENS = 16, 48
STOPPED_S, LIMIT_S, WHOLE_S = 3.0, 5.0, 60.0
LONG, ITL_STREAMS = 7900, 8
OPTIONS = ("--max-total-tokens", "24576", "--max-running-requests", "64", "--num-threads", "1")
# A step of several tokens is longer, and whether there is one depends on the texts.
PLAIN = (*OPTIONS, "--speculative-algorithm", "off")
_SECRET = {SECRET_VARIABLE: "a secret of this measurement"}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
_SEEDED = {"temperature": 0.8}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "seeded": (_SEEDED, {}),
    "schema": ({"json_schema": json.dumps(_SCHEMA)}, {}),
    "schema seeded": (_SEEDED | {"json_schema": json.dumps(_SCHEMA)}, {}),
    "logprobs": ({}, _LOGPROBS),
    "logprobs seeded": (_SEEDED, _LOGPROBS),
    "stop": (_SEEDED | {"stop": ["e", "."], "max_new_tokens": 32}, {}),
    "penalties": (_SEEDED | {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}, {}),
    "two": (_SEEDED | {"n": 2}, {}),
    "adapter": ({}, {"lora_path": "own"}),
}
"""Sampling parameters and fields of what is asked in turns."""

Body = dict[str, Any]
Ask = Callable[[Body], Awaitable[StreamReply]]


def body_of(source: random.Random, num_tokens: int, sampling: dict[str, Any], **fields: Any) -> Body:
    ids = [source.randrange(100, 40_000) for _ in range(num_tokens)]
    return {"input_ids": ids, "sampling_params": sampling_of(source, sampling), **fields}


def sampling_of(source: random.Random, changes: dict[str, Any]) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 16, "sampling_seed": source.randrange(1 << 30)} | changes


class Pair:
    """A prefill and a decode server of a model. servers: by name."""

    def __init__(self, model: str, options: Sequence[str], backend: str) -> None:
        self._stacks = {"prefill": ExitStack(), "decode": ExitStack()}
        self._port = free_port()
        self._model = model
        self._options = {
            "prefill": (*options, "--disaggregation-bootstrap-port", str(self._port)),
            "decode": (*options, "--disaggregation-transfer-backend", backend),
        }
        self._rooms = itertools.count(10, 10)
        self.servers: dict[str, ServerProcess] = {}

    def __enter__(self) -> "Pair":
        for name in self._stacks:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self._stacks.values():
            stack.close()

    def start(self, name: str) -> None:
        """Again, if it has ended."""
        self._stacks[name].close()
        options = (*self._options[name], "--disaggregation-mode", name)
        self.servers[name] = self._stacks[name].enter_context(own_server(self._model, options, _SECRET))

    async def ask(self, body: Body) -> StreamReply:
        """What the decode server says, as a router has it, which joins the logprobs of prompts."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": next(self._rooms)}
        prefill = asyncio.create_task(ask(self.servers["prefill"], body | room))
        try:
            reply = await ask(self.servers["decode"], body | room)
            if reply.status == 200 and body.get("return_logprob") and not body.get("stream"):
                joined, computed = json.loads(reply.body), json.loads((await prefill).body)
                name = "input_token_logprobs"
                joined["meta_info"][name] = computed["meta_info"][name] + joined["meta_info"][name]
                reply.pieces = [(0.0, json.dumps(joined).encode())]
            return reply
        finally:
            prefill.cancel()

    def flush(self) -> None:
        for server in self.servers.values():
            httpx.post(f"{server.url}/flush_cache", timeout=30)

    def decode_state(self) -> Any:
        return state(self.servers["decode"])

    def transferred_since(self, before: Any) -> dict[str, int]:
        """Rooms that came by transfer, and those without KV. before: an earlier `decode_state`."""
        now = self.decode_state()["transfer"]
        return {name: now[name] - before["transfer"][name] for name in ("rooms", "failed")}


async def ask(server: ServerProcess, body: Body) -> StreamReply:
    try:
        return await post(f"{server.url}/generate", json.dumps(body).encode(), {}, 300)
    except (OSError, TimeoutError) as error:
        return StreamReply(error=error)


def state(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]


def told(reply: StreamReply) -> Any:
    """What must be equal of an answer without its stream; words of an error."""
    if reply.status != 200 or reply.error is not None:
        return f"{reply.status} {reply.error or reply.body[:300]!r}"
    answers = json.loads(reply.body)
    lists = [f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("token", "top")]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", *lists)
    return [
        [one["text"], one["output_ids"], *(one["meta_info"].get(name) for name in names)]
        for one in (answers if isinstance(answers, list) else [answers])
    ]


def text_of(reply: StreamReply) -> tuple[str, str]:
    """The last text of a stream, and why it did not end well, or nothing."""
    if reply.status != 200 or reply.error is not None:
        return "", str(reply.error or reply.body[:200]) or repr(reply.error)
    text = ""
    for line in reply.body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return text, str(event["error"])
            text = event.get("text", text)
    return text, "" if b"data: [DONE]" in reply.body else "ended early"


async def several(ask_one: Ask, bodies: Sequence[Body], at_once: int) -> list[StreamReply]:
    limit = asyncio.Semaphore(at_once)

    async def one(body: Body) -> StreamReply:
        async with limit:
            return await ask_one(body)

    return await asyncio.gather(*map(one, bodies))


async def whole(pair: Pair, names: Sequence[str]) -> tuple[float, list[str]]:
    """Seconds until the pools of these servers are whole, and what is wrong with those that are not after WHOLE_S."""
    begin_s, wrong = time.perf_counter(), [""]
    while wrong and time.perf_counter() < begin_s + WHOLE_S:
        await asyncio.sleep(0.1)
        wrong = [f"{name}: {why}" for name in names if (why := not_whole(pair.servers[name]))]
    return time.perf_counter() - begin_s, wrong


def not_whole(server: ServerProcess) -> str:
    """Why its pool is not, or nothing."""
    try:
        now = state(server)
    except (httpx.HTTPError, KeyError) as error:
        return repr(error)
    pool, repairs = now["pool"], now["memory_repairs"]
    if now["num_running"] or now["num_waiting"] or pool["leased_tokens"] or not pool["consistent"] or repairs:
        return f"{pool}, {now['num_running']} run, {repairs} repairs"
    return ""


# -- parts


async def equality(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    bodies = []
    for number, (sampling, fields) in zip(range(options.prompts), itertools.cycle(KINDS.values())):
        num_tokens = source.randint(1, 1500) if number % 3 else source.randint(1, 60)
        bodies.append(body_of(source, num_tokens, sampling, **fields))
    with tempfile.TemporaryDirectory() as folder:
        make_lora(model, f"{folder}/lora")
        found = await compare(model, bodies, (*OPTIONS, "--lora-paths", f"own={folder}/lora"), options.backend)
        make_tiny_vlm.write("llava", Path(folder) / "vlm")
        asked = {"text": "What is <image> that?"}
        pictures = [
            asked | {"image_data": picture(number), "sampling_params": sampling_of(source, changes)}
            for number, changes in enumerate(({}, _SEEDED, {}))
        ]
        of_images = ("--max-total-tokens", "4096", "--num-threads", "1")
        images = await compare(f"{folder}/vlm", pictures, of_images, options.backend)
    return {**found, "images": images}


def make_lora(model: str, folder: str) -> None:
    command = [sys.executable, "examples/make_lora.py", model, folder, "--size", "0.3"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def picture(seed: int) -> str:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (56, 56, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


async def compare(model: str, bodies: list[Body], options: Sequence[str], backend: str) -> dict[str, Any]:
    with own_server(model, options) as alone:
        want = [told(reply) for reply in await several(partial(ask, alone), bodies, 4)]
    with Pair(model, options, backend) as pair:
        # The weights are compared before the first room.
        await pair.ask(bodies[0] | {"sampling_params": {"max_new_tokens": 1}})
        before = pair.decode_state()
        got = [told(reply) for reply in await several(pair.ask, bodies, 4)]
        computed, transferred = pair.decode_state()["computed_prefill_tokens"], pair.transferred_since(before)
        _, wrong = await whole(pair, ("prefill", "decode"))
    differ = [number for number in range(len(bodies)) if got[number] != want[number]]
    for number in differ[:3]:
        answers = str(want[number])[:600], str(got[number])[:600]
        print(number, bodies[number]["sampling_params"], *answers, file=sys.stderr)
    return {
        "prompts": len(bodies),
        "refused_alone": sum(isinstance(each, str) for each in want),
        "differ": len(differ),
        "samples": sum(body["sampling_params"].get("n", 1) for body in bodies),
        **transferred,
        "prompt_tokens_computed_on_decode": computed - before["computed_prefill_tokens"],
        "not_whole": wrong,
    }


async def failures(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    kinds = [kind for kind in KINDS if kind not in ("two", "adapter")]
    bodies = []
    for _, kind in zip(range(STREAMS), itertools.cycle(kinds)):
        sampling, fields = KINDS[kind]
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": "schema" not in kind, **sampling}
        bodies.append(body_of(source, source.randint(10, 600), sampling, stream=True, **fields))
    with own_server(model, OPTIONS) as alone:
        want = [text_of(reply) for reply in await several(partial(ask, alone), bodies, STREAMS)]
    victims = itertools.product(("kill", "stop"), ("decode", "prefill"), ("scheduler", "main"))
    acts = [*map(" ".join, victims), "router leaves"]
    ended: dict[str, Counter[str]] = {act: Counter() for act in acts}
    waits: dict[str, list[float]] = {act: [] for act in acts}
    whole_s, problems = [], list[str]()
    began_s = time.perf_counter()
    with Pair(model, OPTIONS, options.backend) as pair:
        await pair.ask(body_of(source, 20, {}))
        begin_s = time.perf_counter()
        undisturbed = [text_of(reply) for reply in await several(pair.ask, bodies, STREAMS)]
        took_s = time.perf_counter() - begin_s
        problems += ["undisturbed texts differ"] * (undisturbed != want)
        for point, act in zip(range(options.points), itertools.cycle(acts)):
            pair.flush()
            tasks = [asyncio.create_task(timed(pair, body)) for body in bodies]
            await asyncio.sleep(source.random() * took_s)
            event_s = time.perf_counter()
            alive = await happen(act, pair, tasks)
            done_s = time.perf_counter()
            for number, ending in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if isinstance(ending, BaseException):
                    ended[act]["left"] += 1
                    continue
                reply, end_s = ending
                text, error = text_of(reply)
                ended[act]["error" if error else "equal" if (text, "") == want[number] else "different"] += 1
                if end_s > event_s:
                    wait_s = longest_wait(reply, end_s, event_s, done_s, "stop decode" in act)
                    waits[act].append(wait_s)
                    if wait_s > LIMIT_S:
                        problems.append(f"{point} {act}: stream {number} waited {wait_s:.1f} s")
            seconds, wrong = await whole(pair, alive)
            whole_s.append(seconds)
            problems += [f"{point} {act}: {each}" for each in wrong]
            said = f"{max(waits[act], default=0):.1f} s, whole {seconds:.1f} s"
            print(point, act, dict(ended[act]), said, wrong, file=sys.stderr)
            for name in set(pair.servers) - set(alive):
                pair.start(name)
            await pair.ask(body_of(source, 20, {}))
    return {
        "points": options.points,
        "minutes": round((time.perf_counter() - began_s) / 60, 1),
        "undisturbed_s": round(took_s, 2),
        "streams": {act: dict(counts) for act, counts in ended.items()},
        "longest_wait_s": {act: round(max(each), 2) for act, each in waits.items() if each},
        "pools_whole_s": round(max(whole_s, default=0), 2),
        "problems": problems,
    }


async def timed(pair: Pair, body: Body) -> tuple[StreamReply, float]:
    """The reply, and when it ended."""
    return await pair.ask(body), time.perf_counter()


def longest_wait(reply: StreamReply, end_s: float, event_s: float, done_s: float, is_stopped: bool) -> float:
    """Of a client, from the event on. Nobody can say anything while the server that is asked is stopped, until `done_s`."""
    times = [event_s, *(max(event_s, now_s) for now_s, _ in reply.pieces), end_s]
    stopped_s = done_s - event_s if is_stopped else 0.0
    return max(late - early - stopped_s * (early < done_s) for early, late in itertools.pairwise(times))


async def happen(act: str, pair: Pair, tasks: Sequence[asyncio.Task[Any]]) -> list[str]:
    """Do it. Returns the servers that live."""
    if act == "router leaves":
        for task in tasks:
            task.cancel()
        return list(pair.servers)
    what, side, part = act.split()
    server = pair.servers[side]
    victim = server.process if part == "main" else server.part("scheduler")
    if what == "kill":
        victim.send_signal(signal.SIGKILL)
        return [name for name in pair.servers if part != "main" or name != side]
    victim.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    victim.send_signal(signal.SIGCONT)
    return list(pair.servers)


async def rooms(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    short = {"max_new_tokens": 2, "ignore_eos": True}
    with Pair(model, OPTIONS, options.backend) as pair:
        # The pool is filled once, so that all of its memory is there.
        for _ in range(20):
            await pair.ask(body_of(source, 1500, short))
        parts = {name: server.part("scheduler") for name, server in pair.servers.items()}

        def counted() -> list[dict[str, int]]:
            """Threads and descriptors of both schedulers."""
            return [
                {name: part.num_threads() for name, part in parts.items()},
                {name: part.num_fds() for name, part in parts.items()},
            ]

        before, begun = pair.decode_state(), counted()
        replies = await several(pair.ask, [body_of(source, source.randint(1, 400), short) for _ in range(50)], 50)
        memory: dict[str, list[float]] = {name: [] for name in parts}
        begin_s = time.perf_counter()
        for number in range(options.rooms):
            replies.append(await pair.ask(body_of(source, source.randint(1, 120), short)))
            if number % 10 == 9:
                for name, part in parts.items():
                    memory[name].append(part.memory_info().rss / 2**20)
        took_s = time.perf_counter() - begin_s
        _, wrong = await whole(pair, ("prefill", "decode"))
        threads, descriptors = zip(begun, counted(), strict=True)
        return {
            "in_a_row": options.rooms,
            "rooms_per_s": round(options.rooms / took_s, 1),
            "wrong": [answer for answer in map(told, replies) if isinstance(answer, str)][:5],
            "not_whole": wrong,
            "transfer": pair.transferred_since(before),
            "rss_mib": {name: [round(each[at], 1) for at in (0, len(each) // 3, -1)] for name, each in memory.items()},
            "rss_mib_per_1000_rooms": {name: round(100 * late_slope(each), 2) for name, each in memory.items()},
            "threads": threads,
            "descriptors": descriptors,
        }


def late_slope(values: list[float]) -> float:
    """From one value to the next, without the first third."""
    values = values[len(values) // 3 :]
    return float(np.polyfit(range(len(values)), values, 1)[0])


async def gaps(ask_one: Ask, options: Any, source: random.Random, ask_long: Ask | None = None) -> dict[str, Any]:
    """Times between tokens of the same streams, from when all have begun until one ends, while `ask_long` answers long prompts."""
    sampling = {"max_new_tokens": options.tokens, "ignore_eos": True, "temperature": 1}
    same = random.Random(options.seed)
    streams = [body_of(same, 30, sampling, stream=True) for _ in range(ITL_STREAMS)]
    tasks = [asyncio.ensure_future(ask_one(body)) for body in streams]
    await asyncio.sleep(1.0)
    begin_s, num_long, long = time.perf_counter(), 0, None
    while not any(task.done() for task in tasks):
        long = asyncio.ensure_future(ask_long(body_of(source, LONG, {"max_new_tokens": 1}))) if ask_long else None
        await asyncio.wait([*([long] if long else []), *tasks], return_when=asyncio.FIRST_COMPLETED)
        num_long += long is not None and long.done()
    until_s = time.perf_counter()
    found = list[float]()
    for reply in await asyncio.gather(*tasks):
        times = token_times(reply)
        found += [1e3 * (b - a) for a, b in itertools.pairwise(times) if begin_s < a and b < until_s]
    if long is not None:
        await long
    p99 = quantiles(found, n=100)[98]
    return {"gaps": len(found), "long_prompts": num_long, "p50_ms": round(median(found), 1), "p99_ms": round(p99, 1)}


async def latency(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    with Pair(model, PLAIN, options.backend) as pair:
        await pair.ask(body_of(source, 30, {}))
        report: dict[str, Any] = {"alone": await gaps(pair.ask, options, source)}
        report["beside_prompts"] = await gaps(pair.ask, options, source, pair.ask)
        report["transfer"] = pair.decode_state()["transfer"]
    steps = {"one_server": [], "one_server_max_step_ms_50": ["--max-step-ms", "50"]}
    for name, bound in steps.items():
        with own_server(model, [*PLAIN, "--num-threads", "2", *bound]) as server:
            asks = partial(ask, server)
            await asks(body_of(source, 30, {}))
            report[name] = await gaps(asks, options, source, asks)
    for name in ("alone", *steps):
        report[f"p99_over_{name}"] = round(report["beside_prompts"]["p99_ms"] / report[name]["p99_ms"], 2)
    return report


_PARTS = {part.__name__: part for part in (equality, failures, rooms, latency)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--parts", type=words, default=tuple(_PARTS))
    for name, default in (("prompts", 200), ("points", 100), ("rooms", 1000), ("tokens", 1500), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="tcp", choices=("tcp", "shm"))
    options = parser.parse_args()
    found: dict[str, Any] = {"model": options.model}
    if options.output is not None and options.output.exists():
        found |= {part: result for part, result in json.loads(options.output.read_text()).items() if part in _PARTS}
    with refusals():
        for part in options.parts:
            found[part] = asyncio.run(_PARTS[part](options.model, options))
            write_report(found, options.output)


if __name__ == "__main__":
    main()
