"""A prefill and a decode server beside one server alone: whether texts are the same, what streams notice, and what becomes of requests when one dies.

    python -m bench.disaggregation MODEL [--parts equality,failures,transfer,rooms,latency,control,routers] [--prompts 200] [--points 100]
        [--rooms 1000] [--router COMMAND ...] [--seed 0] [--backend tcp] [--output FILE]

Each request goes to both servers at once, as from a router. equality: --prompts requests of 1 to 1,500 tokens and of ten kinds, and three with
an image to a small model with random weights. failures: at --points random moments of 16 streams a scheduler or main process is killed (-9) or
stopped for STOPPED_S, or the router leaves; a stream must have the text of the server alone or an error, and wait at most LIMIT_S, not counting
how long its decode server was stopped; afterwards the pools of servers that live must be whole. transfer: pages of two pools in two processes,
without servers, beside a memcpy of the same bytes. rooms: 50 at once, and --rooms one after the other: memory, threads and descriptors of both
schedulers. latency: gaps of 8 streams of --tokens while prompts of 7,900 tokens come one after the other, beside the streams alone, and beside one
server, with and without --max-step-ms. control: these gaps also with the prefill server at nice 10, beside prompts of a third server, whose KV goes
nowhere, and beside a loop that takes a core and no memory, in --turns turns; as root. routers: requests of many kinds on three routes to each
--router in front of a pair, such as "smg launch", beside one server.

The servers of a pair have --num-threads 1 each, the server alone has 2. Parts may run one at a time: the report adds to that of the same file.
"""

import asyncio
import base64
import io
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from bench.program import parser_of, refusals, words, write_report
from bench.servers import ServerProcess, free_port, own_server
from examples import make_tiny_vlm
from headrace.attention.base import KvPool, KvShape
from headrace.benchmark.http_stream import StreamReply, post
from headrace.config.machine import SECRET_VARIABLE
from headrace.disaggregation.sink import Incoming, PageSink
from headrace.disaggregation.source import Outgoing, PageSource
from headrace.execution.page_transfer import PoolPages

STREAMS, TOKENS = 16, 48
STOPPED_S, LIMIT_S, WHOLE_S = 3.0, 5.0, 60.0
LONG, ITL_STREAMS = 7900, 8
OPTIONS = ("--max-total-tokens", "24576", "--max-running-requests", "64", "--num-threads", "1")
PLAIN = (
    *OPTIONS,
    "--speculative-algorithm",
    "off",
)  # a step of several tokens is longer, and whether there is one depends on the texts
_SECRET = b"a secret of this measurement"
_ENVIRONMENT = {SECRET_VARIABLE: _SECRET.decode()}
_PARTS = ("equality", "failures", "transfer", "rooms", "latency", "control", "routers")
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
Ask = Callable[[Body], Coroutine[Any, Any, StreamReply]]


def body_of(source: random.Random, num_tokens: int, sampling: dict[str, Any], **fields: Any) -> Body:
    ids = [source.randrange(100, 40_000) for _ in range(num_tokens)]
    sampling = {"temperature": 0, "max_new_tokens": 16, "sampling_seed": source.randrange(1 << 30)} | sampling
    return {"input_ids": ids, "sampling_params": sampling, **fields}


class Pair:
    """A prefill and a decode server of a model. servers: by name."""

    def __init__(self, model: str, options: Sequence[str], backend: str) -> None:
        self._stacks = {"prefill": ExitStack(), "decode": ExitStack()}
        self.port = free_port()
        self._model = model
        self._options = {
            "prefill": (*options, "--disaggregation-bootstrap-port", str(self.port)),
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
        self.servers[name] = self._stacks[name].enter_context(own_server(self._model, options, _ENVIRONMENT))

    async def ask(self, body: Body) -> StreamReply:
        """What the decode server says, as a router has it, which joins the logprobs of prompts."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(self._rooms)}
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

    def states(self) -> dict[str, Any]:
        return {name: state(server) for name, server in self.servers.items()}


async def ask(server: ServerProcess, body: Body, timeout_s: float = 300, route: str = "/generate") -> StreamReply:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        return await post(server.url + route, data, headers, timeout_s)
    except (OSError, TimeoutError) as error:
        return StreamReply(error=error)


def state(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]


def flush(*servers: ServerProcess) -> None:
    for server in servers:
        httpx.post(f"{server.url}/flush_cache", timeout=30)


def told(reply: StreamReply) -> Any:
    """What must be equal of an answer without its stream; words of an error."""
    if reply.status != 200 or reply.error is not None:
        return f"{reply.status} {reply.error or reply.body[:300]!r}"
    # Routers may change the last bit of a number.
    answers = json.loads(reply.body, parse_float=lambda text: round(float(text), 12))
    if "choices" in answers:
        return answers["choices"]
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
            for choice in event.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            text = event.get("text", text)
    return text, "" if b"data: [DONE]" in reply.body else "ended early"


async def several(
    ask_one: Callable[[Body], Awaitable[StreamReply]], bodies: Sequence[Body], at_once: int
) -> list[StreamReply]:
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
        wrong = []
        for name in names:
            try:
                now = state(pair.servers[name])
            except (httpx.HTTPError, KeyError) as error:
                wrong.append(f"{name}: {error!r}")
                continue
            pool = now["pool"]
            if (
                now["num_running"]
                or now["num_waiting"]
                or pool["leased_tokens"]
                or not pool["consistent"]
                or now["memory_repairs"]
            ):
                wrong.append(f"{name}: {pool}, {now['num_running']} run, {now['memory_repairs']} repairs")
    return time.perf_counter() - begin_s, wrong


# -- parts


def equality(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    bodies = [
        body_of(
            source,
            source.randint(1, 1500) if number % 3 else source.randint(1, 60),
            KINDS[kind][0],
            **KINDS[kind][1],
        )
        for number, kind in zip(range(options.prompts), itertools.cycle(KINDS))
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_lora = [sys.executable, "examples/make_lora.py", model, f"{folder}/lora", "--size", "0.3"]
        subprocess.run(make_lora, check=True, stdout=subprocess.DEVNULL)
        found = asyncio.run(compare(model, bodies, (*OPTIONS, "--lora-paths", f"own={folder}/lora"), options.backend))
        make_tiny_vlm.write("llava", Path(folder) / "vlm")
        pictures = [body_of(source, 0, sampling) | {"text": "What is <image> that?"} for sampling in ({}, _SEEDED, {})]
        for number, body in enumerate(pictures):
            file = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 255, (56, 56, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(file, "png")
            del body["input_ids"]
            body["image_data"] = base64.b64encode(file.getvalue()).decode()
        of_images = ("--max-total-tokens", "4096", "--num-threads", "1")
        images = asyncio.run(compare(f"{folder}/vlm", pictures, of_images, options.backend))
    return {**found, "images": images}


async def compare(model: str, bodies: list[Body], options: Sequence[str], backend: str) -> dict[str, Any]:
    with own_server(model, options) as alone:
        want = [told(reply) for reply in await several(lambda body: ask(alone, body), bodies, 4)]
    with Pair(model, options, backend) as pair:
        await pair.ask(
            bodies[0] | {"sampling_params": {"max_new_tokens": 1}}
        )  # the weights are compared before the first room
        before = pair.states()["decode"]
        got = [told(reply) for reply in await several(pair.ask, bodies, 4)]
        after, (_, wrong) = pair.states()["decode"], await whole(pair, ("prefill", "decode"))
    differ = [number for number in range(len(bodies)) if got[number] != want[number]]
    for number in differ[:3]:
        print(
            number, bodies[number]["sampling_params"], str(want[number])[:600], str(got[number])[:600], file=sys.stderr
        )
    return {
        "prompts": len(bodies),
        "refused_alone": sum(isinstance(each, str) for each in want),
        "differ": len(differ),
        "samples": sum(body["sampling_params"].get("n", 1) for body in bodies),
        "rooms": after["transfer"]["rooms"] - before["transfer"]["rooms"],
        "failed": after["transfer"]["failed"] - before["transfer"]["failed"],
        "prompt_tokens_computed_on_decode": after["computed_prefill_tokens"] - before["computed_prefill_tokens"],
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
        want = [text_of(reply) for reply in await several(lambda body: ask(alone, body), bodies, STREAMS)]
    acts = [
        f"{act} {side} {part}"
        for act in ("kill", "stop")
        for side in ("decode", "prefill")
        for part in ("scheduler", "main")
    ]
    acts += ["router leaves"]
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
        for point in range(options.points):
            act = acts[point % len(acts)]
            flush(*pair.servers.values())
            since_s = [0.0] * STREAMS

            async def one(number: int, since_s: list[float] = since_s) -> StreamReply:
                reply = await pair.ask(bodies[number])
                since_s[number] = time.perf_counter()
                return reply

            tasks = [asyncio.create_task(one(number)) for number in range(STREAMS)]
            await asyncio.sleep(source.random() * took_s)
            event_s = time.perf_counter()
            alive = await happen(act, pair, tasks)
            done_s = time.perf_counter()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
            for number, reply in enumerate(replies):
                if isinstance(reply, BaseException):
                    ended[act]["left"] += 1
                    continue
                text, error = text_of(reply)
                ended[act]["error" if error else "equal" if (text, "") == want[number] else "different"] += 1
                if since_s[number] > event_s:
                    # Nobody can say anything while the server that is asked is stopped.
                    times = [max(event_s, now_s) for now_s, _ in reply.pieces] + [since_s[number]]
                    gaps = [(late - early, early) for early, late in itertools.pairwise([event_s, *times])]
                    stopped_s = done_s - event_s if "stop decode" in act else 0.0
                    wait_s = max(gap - stopped_s * (early < done_s) for gap, early in gaps)
                    waits[act].append(wait_s)
                    if wait_s > LIMIT_S:
                        problems.append(f"{point} {act}: stream {number} waited {wait_s:.1f} s")
            seconds, wrong = await whole(pair, alive)
            whole_s.append(seconds)
            problems += [f"{point} {act}: {each}" for each in wrong]
            print(
                point,
                act,
                dict(ended[act]),
                f"{max(waits[act], default=0):.1f} s, whole {seconds:.1f} s",
                wrong,
                file=sys.stderr,
            )
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


async def happen(act: str, pair: Pair, tasks: list[asyncio.Task[StreamReply]]) -> list[str]:
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

    def of_schedulers(kind: str) -> dict[str, int]:
        parts = {name: server.part("scheduler") for name, server in pair.servers.items()}
        return {name: part.num_threads() if kind == "threads" else part.num_fds() for name, part in parts.items()}

    with Pair(model, OPTIONS, options.backend) as pair:
        # The pool is filled once, so that all of its memory is there.
        for _ in range(20):
            await pair.ask(body_of(source, 1500, short))
        before = pair.states()["decode"]["transfer"]
        threads, files = of_schedulers("threads"), of_schedulers("files")
        replies = await several(pair.ask, [body_of(source, source.randint(1, 400), short) for _ in range(50)], 50)
        wrong = [told(reply) for reply in replies if isinstance(told(reply), str)]
        memory: dict[str, list[float]] = {name: [] for name in pair.servers}
        begin_s = time.perf_counter()
        for number in range(options.rooms):
            reply = told(await pair.ask(body_of(source, source.randint(1, 120), short)))
            wrong += [reply] if isinstance(reply, str) else []
            if number % 10 == 9:
                for name, server in pair.servers.items():
                    memory[name].append(server.part("scheduler").memory_info().rss / 2**20)
        took_s = time.perf_counter() - begin_s
        _, not_whole = await whole(pair, ("prefill", "decode"))
        after = pair.states()["decode"]["transfer"]
        return {
            "in_a_row": options.rooms,
            "rooms_per_s": round(options.rooms / took_s, 1),
            "wrong": wrong[:5],
            "not_whole": not_whole,
            "transfer": {name: after[name] - before[name] for name in ("rooms", "failed")},
            "rss_mib": {
                name: [round(each[place], 1) for place in (0, len(each) // 3, -1)] for name, each in memory.items()
            },
            "rss_mib_per_1000_rooms": {
                name: round(slope(each[len(each) // 3 :]) * 100, 2) for name, each in memory.items()
            },
            "threads": [threads, of_schedulers("threads")],
            "descriptors": [files, of_schedulers("files")],
        }


async def routers(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    plain = [kind for kind in KINDS if kind != "adapter"]
    asked = {kind: ("/generate", body_of(source, 200, KINDS[kind][0], **KINDS[kind][1])) for kind in plain}
    open_ai = {"model": "own", "max_tokens": 16, "temperature": 0}
    native, completion, seeded = (
        body_of(source, 200, {}),
        open_ai | {"prompt": "The sky is"},
        {"temperature": 0.9, "seed": 5, "n": 2},
    )
    chat = open_ai | {"messages": [{"role": "user", "content": "Name a colour."}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    asked |= {
        "stream": ("/generate", native | {"stream": True}),
        "several prompts": ("/generate", native | _LOGPROBS | {"input_ids": [[500, 600], [700]]}),
        "several texts": ("/generate", {"text": ["One", "Two"], "sampling_params": {"max_new_tokens": 8}}),
        "by seed": ("/generate", {"text": "One", "sampling_params": _SEEDED | {"seed": 7, "max_new_tokens": 8}}),
        "completion": ("/v1/completions", completion),
        "completion, stream": ("/v1/completions", completion | {"stream": True}),
        "completion, echo and logprobs": ("/v1/completions", completion | {"echo": True, "logprobs": 2}),
        "completion, prompts and samples": ("/v1/completions", completion | seeded | {"prompt": ["One", "Two"]}),
        "completion, tokens": ("/v1/completions", completion | {"prompt": [500, 600]}),
        "chat": ("/v1/chat/completions", chat),
        "chat, stream": ("/v1/chat/completions", chat | {"stream": True}),
        "chat, samples": ("/v1/chat/completions", chat | seeded | {"logprobs": True, "top_logprobs": 2}),
        "chat, schema": ("/v1/chat/completions", chat | {"response_format": schema}),
    }

    async def all_of(server: ServerProcess) -> dict[str, Any]:
        replies = {kind: await ask(server, body, route=route) for kind, (route, body) in asked.items()}
        return {kind: (text_of if "stream" in kind else told)(reply) for kind, reply in replies.items()}

    names, found = (*OPTIONS, "--served-model-name", "own"), dict[str, Any]()
    with own_server(model, names) as alone:
        want = await all_of(alone)
    with Pair(model, names, options.backend) as pair:
        await pair.ask(body_of(source, 20, {}))
        for router in options.router:
            port, workers = free_port(), [pair.servers["prefill"].url, str(pair.port), "--decode"]
            command = [*shlex.split(router), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port"]
            command += [str(free_port()), "--pd-disaggregation", "--prefill", *workers, pair.servers["decode"].url]
            before = pair.states()["decode"]["transfer"]
            with ServerProcess(router, command, port, environment={"HF_HUB_OFFLINE": "1"}) as server:
                server.wait_until_ready("/readiness")
                got = await all_of(server)
            after = pair.states()["decode"]["transfer"]
            differ = [kind for kind in asked if got[kind] != want[kind]]
            found[router] = {
                "equal": [kind for kind in asked if kind not in differ],
                "differ": {kind: got[kind] if isinstance(got[kind], str) else "other texts" for kind in differ},
                **{name: after[name] - before[name] for name in ("rooms", "failed")},
            }
    return found


def slope(values: list[float]) -> float:
    return float(np.polyfit(range(len(values)), values, 1)[0])


async def gaps(
    ask_one: Ask, options: Any, source: random.Random, ask_long: Ask | None = None
) -> tuple[list[float], int]:
    """Milliseconds between tokens of the same streams, from when all have begun until one ends, and how many long prompts `ask_long` has answered."""
    sampling = {"max_new_tokens": options.tokens, "ignore_eos": True, "temperature": 1}
    same = random.Random(options.seed)
    streams = [body_of(same, 30, sampling, stream=True) for _ in range(ITL_STREAMS)]
    tasks = [asyncio.create_task(ask_one(body)) for body in streams]
    await asyncio.sleep(1.0)
    begin_s, num_long, long = time.perf_counter(), 0, None
    while not any(task.done() for task in tasks):
        long = asyncio.create_task(ask_long(body_of(source, LONG, {"max_new_tokens": 1}))) if ask_long else None
        await asyncio.wait([*([long] if long else []), *tasks], return_when=asyncio.FIRST_COMPLETED)
        num_long += long is not None and long.done()
    until_s = time.perf_counter()
    found = list[float]()
    for reply in await asyncio.gather(*tasks):
        times = [now_s for now_s, piece in reply.pieces for _ in range(piece.count(b"data: {"))]
        found += [1e3 * (b - a) for a, b in itertools.pairwise(times) if begin_s < a and b < until_s]
    if long is not None:
        await long
    return found, num_long


def of_gaps(found: list[float], num_long: int) -> dict[str, Any]:
    p99 = quantiles(found, n=100)[98]
    return {"gaps": len(found), "long_prompts": num_long, "p50_ms": round(median(found), 1), "p99_ms": round(p99, 1)}


async def latency(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    with Pair(model, PLAIN, options.backend) as pair:
        await pair.ask(body_of(source, 30, {}))
        report: dict[str, Any] = {"alone": of_gaps(*await gaps(pair.ask, options, source))}
        report["beside_prompts"] = of_gaps(*await gaps(pair.ask, options, source, pair.ask))
        report["transfer"] = pair.states()["decode"]["transfer"]
    steps = {"one_server": [], "one_server_max_step_ms_50": ["--max-step-ms", "50"]}
    for name, bound in steps.items():
        with own_server(model, [*PLAIN, "--num-threads", "2", *bound]) as server:
            asks = partial(ask, server)
            await asks(body_of(source, 30, {}))
            report[name] = of_gaps(*await gaps(asks, options, source, asks))
    for name in ("alone", *steps):
        report[f"p99_over_{name}"] = round(report["beside_prompts"]["p99_ms"] / report[name]["p99_ms"], 2)
    return report


@contextmanager
def busy_loop() -> Iterator[None]:
    """A process that takes a core and no memory."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            yield
        finally:
            loop.kill()


def renice(server: ServerProcess, niceness: int) -> None:
    """Of all threads that it has; back to less takes root."""
    for process in (server.process, *server.process.children(recursive=True)):
        for thread in process.threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


async def control(model: str, options: Any) -> Any:
    source = random.Random(options.seed)
    asks: dict[str, Ask | None] = {"alone": None, "beside_a_loop": None}
    found: dict[str, list[float]] = {}
    longs, ratios = Counter[str](), dict[str, list[float]]()
    with Pair(model, PLAIN, options.backend) as pair, own_server(model, PLAIN) as other:
        asks |= {
            "beside_other_server": partial(ask, other),
            "beside_prompts": pair.ask,
            "beside_prompts_nice_10": pair.ask,
        }
        for one in (pair.ask, partial(ask, other)):
            await one(body_of(source, 30, {}))
        for turn in range(options.turns):
            for name in sorted(asks, reverse=(turn + options.seed) % 2 == 1):
                renice(pair.servers["prefill"], 10 if "nice" in name else 0)
                with busy_loop() if name == "beside_a_loop" else nullcontext():
                    times, num_long = await gaps(pair.ask, options, source, asks[name])
                found.setdefault(name, []).extend(times)
                longs[name] += num_long
                ratios.setdefault(name, []).append(quantiles(times, n=100)[98])
        moved = pair.states()["decode"]["transfer"]
    report: dict[str, Any] = {name: of_gaps(times, longs[name]) for name, times in found.items()}
    for name in asks:
        report[name]["p99_ms_of_turns"] = [round(each, 1) for each in ratios[name]]
        report[name]["p99_over_alone"] = round(report[name]["p99_ms"] / report["alone"]["p99_ms"], 2)
    return {**report, "transfer": moved}


def pool_pages(num_tokens: int = 8192) -> tuple[PoolPages, list[int]]:
    """A pool of the shape of SmolLM2-135M, in memory as a server's, and the numbers of its pages in another order."""
    size = num_tokens, 3, 64
    pool = KvPool.zeros(KvShape(30, 3, 64, torch.bfloat16), (size, size), num_tokens, 16, torch.device("cpu"))
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(size))
    pages = list(range(num_tokens // 16))
    random.Random(0).shuffle(pages)
    return PoolPages(pool, list, lambda: {"model": ""}), pages


def serve_pages() -> None:
    """The other process of `transfer`: offers its pages as rooms 0, 1, ..."""
    torch.set_num_threads(1)
    transfer, pages = pool_pages()
    source = PageSource(transfer, ("127.0.0.1", 0), _SECRET)
    source.start()
    for number in range(1000):
        source.open(Outgoing(number, str(number), b"", pages))
    print(source.port, flush=True)
    sys.stdin.read()


def transfer(model: str, options: Any) -> Any:
    torch.set_num_threads(1)
    into, pages = pool_pages()
    num_bytes = len(pages) * into.page_bytes
    plain, other = (np.ones(num_bytes, np.uint8) for _ in range(2))
    seconds: dict[str, list[float]] = {"memcpy": [], "shm": [], "tcp": []}
    command = [sys.executable, "-c", "from bench.disaggregation import serve_pages; serve_pages()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        port = int(child.stdout.readline())
        sinks = {"shm": PageSink(into, _SECRET, uses_memory=True), "tcp": PageSink(into, _SECRET)}
        rooms = itertools.count()
        for _ in range(32):
            begin = time.perf_counter()
            np.copyto(plain, other)
            seconds["memcpy"].append(time.perf_counter() - begin)
            for name, sink in sinks.items():
                one = Incoming("127.0.0.1", port, next(rooms), "", b"", pages=pages)
                begin = time.perf_counter()
                sink.ask(one)
                while one.num_arrived < len(pages):
                    if one.is_done:
                        child.kill()
                        raise RuntimeError(one.failure)
                    time.sleep(0.0005)
                seconds[name].append(time.perf_counter() - begin)
                sink.withdraw([one])
        for sink in sinks.values():
            sink.close()
        child.stdin.close()
    rates = {name: num_bytes / median(took[2:]) / 1e9 for name, took in seconds.items()}
    shares = {f"{name}_over_memcpy": round(rates[name] / rates["memcpy"], 3) for name in ("shm", "tcp")}
    return {"bytes": num_bytes, "gb_per_s": {name: round(rate, 2) for name, rate in rates.items()}, **shares}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--parts", type=words, default=_PARTS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--rooms", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream of latency and control")
    parser.add_argument(
        "--turns", type=int, default=1, help="of control; with an odd --seed the first one is the other way round"
    )
    parser.add_argument("--router", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="tcp", choices=("tcp", "shm"))
    options = parser.parse_args()
    is_begun = options.output is not None and options.output.exists()
    before = json.loads(options.output.read_text()) if is_begun else {}
    found: dict[str, Any] = {part: before[part] for part in _PARTS if part in before}
    found["model"] = options.model
    with refusals():
        for part in options.parts:
            result = globals()[part](options.model, options)
            found[part] = asyncio.run(result) if asyncio.iscoroutine(result) else result
            write_report(found, options.output)


if __name__ == "__main__":
    main()
