"""`headrace bench serving`: measure any OpenAI-compatible server from the client's side; `bench offline`: an Engine of this process, without HTTP.

Owns the order of a run (connect, check agreement, warm up, then per repetition and preset every target in turn, so that two servers are compared
interleaved), and when requests are sent. Sending is targets.py, arithmetic figures.py, output results.py. Runs in the benchmark client's event loop.
"""

import asyncio
import importlib.util
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import Progress

from headrace.benchmark.agreement import PROMPTS, common_length
from headrace.benchmark.figures import NO_LIMITS, Limits, RequestRecord, Summary, summarise
from headrace.benchmark.results import (
    Agreement,
    Result,
    document,
    plot,
    print_agreements,
    print_results,
    write_json,
)
from headrace.benchmark.tables import progress_columns
from headrace.benchmark.targets import EngineTarget, OpenAITarget, PromptForm, Target
from headrace.benchmark.workloads import (
    EMBEDDING,
    PRESETS,
    SEED,
    Answer,
    TokenIds,
    Workload,
    corpus,
    make_workloads,
    preset_names,
)
from headrace.checkpoint.names import resolve_model
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, RequestError
from headrace.text.chat_templates import TemplateChildren, chat_template_of
from headrace.text.tokenizers import Tokenizer, load_tokenizer

T = TypeVar("T")

_CHECK_TEXTS, _CHECK_TOKENS = PROMPTS[:5], 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent, in which order and how often; the same for servers and engines.

    presets: names, comma-separated. tokenizer: a model's name or path, whose tokenizer cuts the prompts.
    rate: Poisson arrivals per second instead of the preset's closed loop. concurrency: instead of the preset's own.
    num_requests: only so many of each preset. rounds: only so many for each that runs at a time. output, plot: files to write.
    """

    presets: str = "A,B1,B8,B32,C,Ccold,D"
    tokenizer: str = "smollm2"
    repeat: int = 1
    rate: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    rounds: int | None = None
    warm_up: int = 2
    seed: int = SEED
    limits: Limits = NO_LIMITS
    output: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for values that make no sense, and for a plot that nothing here can draw: before measuring, not after."""
        preset_names(self.presets)
        for name in ("repeat", "concurrency", "num_requests", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"--rate must be above 0, got {self.rate}")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate and --concurrency cannot be combined")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")

    def described(self) -> dict[str, Any]:
        said = {name: value for name, value in asdict(self).items() if name not in ("limits", "output", "plot")}
        return said | {"presets": preset_names(self.presets)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Which servers, and how to speak to them. check_against: a server whose greedy texts are the reference."""

    urls: Sequence[str]
    load: LoadOptions
    model: str | None = None
    prompt_form: PromptForm = "auto"
    api_key: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    check_against: str | None = None
    timeout_s: float = 600.0


def run_serving(options: ServingOptions, console: Console) -> dict[str, Any]:
    """Measure, print, write; the results document. Raises ConfigError when a server cannot be measured at all."""
    return run_client(_run_serving(options, console))


def run_client(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on a cheaper event loop: a client on the same machine takes processor time from the servers."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _run_serving(options: ServingOptions, console: Console) -> dict[str, Any]:
    tokenizer = load_tokenizer(resolve_model(options.load.tokenizer))
    timeout = aiohttp.ClientTimeout(total=options.timeout_s, connect=10)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with AsyncExitStack() as stack:
        # A connection for each request: some servers close a connection after a stream without saying so.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector)
        )

        connect = partial(
            OpenAITarget.connect,
            session,
            decode=tokenizer.decode,
            model=options.model,
            prompt_form=options.prompt_form,
            extra_body=options.extra_body,
            probe=_probe(options.load),
        )
        targets = [await connect(url) for url in options.urls]
        agreements = []
        if options.check_against is not None:
            reference = await connect(options.check_against)
            agreements = [await compare_greedy(reference, target) for target in targets]
            print_agreements(console, agreements)
        results = await measure(targets, tokenizer, options.load, console)
        said = {target.name: await target.describe() for target in targets}
    content = document("serving", said, results, options.load.described(), options.load.limits, agreements)
    report(content, results, options.load, console)
    return content


def run_offline(server_args: ServerArgs, options: LoadOptions, console: Console) -> dict[str, Any]:
    """Start an Engine, measure, print, write; the results document. Raises what the Engine raises when it cannot start."""
    from headrace.api.engine import Engine

    tokenizer = load_tokenizer(resolve_model(options.tokenizer))
    with Engine(**asdict(server_args)) as engine:

        async def run() -> dict[str, Any]:
            target = EngineTarget(f"Engine {server_args.model_path}", engine)
            results = await measure([target], tokenizer, options, console)
            said = {target.name: await target.describe()}
            content = document("offline", said, results, options.described(), options.limits)
            report(content, results, options, console)
            return content

        return asyncio.run(run())


async def compare_greedy(reference: OpenAITarget, target: OpenAITarget) -> Agreement:
    """Send both the same texts, one at a time, greedily. Raises ConfigError when either does not answer."""
    common, lengths = [], []
    for text in _CHECK_TEXTS:
        want, got = [await each.complete_text(text, Answer(_CHECK_TOKENS, ends=True)) for each in (reference, target)]
        for each, record in ((reference, want), (target, got)):
            if record.error is not None:
                raise ConfigError(f"{each.name} did not answer the agreement check: {record.error}")
        common.append(common_length(want.text, got.text))
        lengths.append(max(len(want.text), len(got.text)))
    num_equal = sum(same == length for same, length in zip(common, lengths, strict=True))
    return Agreement(reference.name, target.name, len(_CHECK_TEXTS), num_equal, common, lengths)


async def measure(
    targets: Sequence[Target], tokenizer: Tokenizer, options: LoadOptions, console: Console
) -> list[Result]:
    """Every preset on every target, `options.repeat` times, the targets taking turns within a repetition.

    Each repetition draws fresh prompts, so that what an earlier one left in a prefix cache does not help.
    """
    with closing(TemplateChildren()) as children:
        return await _measured(targets, tokenizer, _chats(tokenizer, children), options, console)


async def _measured(
    targets: Sequence[Target],
    tokenizer: Tokenizer,
    ask: Callable[[str], TokenIds],
    options: LoadOptions,
    console: Console,
) -> list[Result]:
    names = preset_names(options.presets)
    text_ids = corpus(lambda text: tokenizer.encode(text, add_special_tokens=False))
    summaries: dict[tuple[str, str], list[Summary]] = {}
    flushed: dict[str, bool] = {}
    draw = partial(make_workloads, text_ids, ask, max_requests=options.num_requests, rounds=options.rounds)
    first = draw(options.seed)
    work = sum(_work(first.workloads[name]) for name in names)
    with _progress(console, work * options.repeat * len(targets)) as start_bar:
        for repetition in range(options.repeat):
            drawn = draw(options.seed + repetition)
            if repetition == 0:
                await _warm_up(targets, drawn.warm_up[: options.warm_up], _probe(options), start_bar)
            for name in names:
                workload = drawn.workloads[name]
                for target in targets:
                    flushed[target.name] = await target.flush()
                    title = f"{name} · {target.name}" if len(targets) > 1 else f"{name}: {PRESETS[name].description}"
                    progress = f"{repetition + 1}/{options.repeat}"
                    on_done = start_bar(f"[{progress}] {title}", len(workload.prompts), _work(workload))
                    summary = await _run_once(target, workload, options, on_done)
                    summaries.setdefault((name, target.name), []).append(summary)
                    errors = f", errors: {summary.num_errors}" if summary.num_errors else ""
                    console.print(
                        f"[dim][{progress}] {title}: {summary.duration_s:.1f} s, prompt {summary.prompt_throughput:.0f} tok/s, "
                        f"output {summary.output_throughput:.1f} tok/s{errors}[/dim]"
                    )
    return [
        Result(target_name, name, flushed[target_name], repetitions)
        for (name, target_name), repetitions in summaries.items()
    ]


def _chats(tokenizer: Tokenizer, children: TemplateChildren) -> Callable[[str], TokenIds]:
    """What turns a text into the prompt of a chat whose first message it is; for a model that does not chat, into the text alone."""
    try:
        template = chat_template_of(tokenizer, children=children)
    except RequestError:
        return tokenizer.encode
    return lambda text: tokenizer.encode_rendered(template.render([{"role": "user", "content": text}]))


async def _run_once(target: Target, workload: Workload, options: LoadOptions, on_done: Callable[[], None]) -> Summary:
    for prompt in workload.priming:
        await target.complete(prompt, Answer(1))
    if options.rate is not None:
        load = run_open_loop(target, workload, options.rate, options.seed, on_done)
    else:
        concurrency = options.concurrency or workload.preset.concurrency
        load = run_closed_loop(target, workload, concurrency, on_done)
    done = await with_beside(target, workload, load)
    return summarise(done.records, done.duration_s, options.limits, done.beside)


def _probe(options: LoadOptions) -> Answer:
    """A short answer of the kind that the presets ask for."""
    return EMBEDDING if PRESETS[preset_names(options.presets)[0]].answer.is_embedding else Answer(1)


async def _warm_up(
    targets: Sequence[Target], prompts: Sequence[TokenIds], probe: Answer, start_bar: "_StartBar"
) -> None:
    answer = probe if probe.is_embedding else Answer(16)
    for target in targets:
        on_done = start_bar(f"warm-up · {target.name}", len(prompts), 0.0)
        for prompt in prompts:
            await target.complete(prompt, answer)
            on_done()


def report(content: dict[str, Any], results: Sequence[Result], options: LoadOptions, console: Console) -> None:
    print_results(console, results)
    if options.output is not None:
        write_json(options.output, content)
        console.print(f"results written to {options.output}", highlight=False)
    if options.plot is not None:
        plot(options.plot, content)
        console.print(f"plot written to {options.plot}", highlight=False)


# (title, requests, share of the whole run's work) -> what to call after each request
_StartBar = Callable[[str, int, float], Callable[[], None]]


def _work(workload: Workload) -> float:
    """About how long a workload takes, in decode steps of one stream: only its ratio to others matters, for the time left.

    A prompt token costs a tenth of a step, and of many streams about four run in the time of one.
    """
    steps = sum(len(prompt) / 10 + workload.preset.answer.max_new_tokens for prompt in workload.prompts)
    return steps / min(workload.preset.concurrency, 4)


@contextmanager
def _progress(console: Console, work: float) -> Iterator[_StartBar]:
    """Gives the function that starts the next workload on the bar. The bar shows the whole run; it is gone when that is over."""
    columns = progress_columns("{task.fields[requests]}")
    # Over the whole run: workloads differ too much for the speed of the last seconds to say anything.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=86400) as progress:
        task = progress.add_task("", total=work, requests="")

        def start_bar(title: str, num_requests: int, share: float) -> Callable[[], None]:
            num_done = 0
            progress.update(task, description=title, requests=f"0/{num_requests}")

            def on_done() -> None:
                nonlocal num_done
                num_done += 1
                progress.update(task, advance=share / num_requests, requests=f"{num_done}/{num_requests}")

            return on_done

        yield start_bar


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The records in the order of the prompts, and the seconds from the first request sent to the last one answered. beside: of what was sent beside
    them."""

    records: list[RequestRecord]
    duration_s: float
    beside: list[RequestRecord] = field(default_factory=list)


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each request of a Poisson process of `rate` requests per second arrives."""
    rng = random.Random(seed)
    return list(accumulate((rng.expovariate(rate) for _ in range(num_requests - 1)), initial=0.0))


async def run_closed_loop(
    target: Target, workload: Workload, concurrency: int, on_done: Callable[[], None] = lambda: None
) -> LoadResult:
    """Keep `concurrency` requests in flight until all prompts are answered. The first ones start as the preset says."""
    records: dict[int, RequestRecord] = {}
    pending = iter(enumerate(workload.prompts))

    async def one_client(number: int) -> None:
        await asyncio.sleep(number * workload.preset.start_gap_s)
        for index, prompt in pending:
            records[index] = await target.complete(prompt, workload.preset.answer)
            on_done()

    start_s = time.perf_counter()
    await asyncio.gather(*(one_client(number) for number in range(concurrency)))
    return LoadResult([records[index] for index in sorted(records)], time.perf_counter() - start_s)


async def run_open_loop(
    target: Target, workload: Workload, rate: float, seed: int, on_done: Callable[[], None] = lambda: None
) -> LoadResult:
    """Send each prompt when it arrives, however many are in flight: Poisson arrivals at `rate` requests per second."""

    async def one_request(prompt: list[int], arrives_s: float) -> RequestRecord:
        await asyncio.sleep(arrives_s)
        record = await target.complete(prompt, workload.preset.answer)
        on_done()
        return record

    times = arrival_times(len(workload.prompts), rate, seed)
    start_s = time.perf_counter()
    records = await asyncio.gather(
        *(one_request(prompt, arrives_s) for prompt, arrives_s in zip(workload.prompts, times, strict=True))
    )
    return LoadResult(list(records), time.perf_counter() - start_s)


async def with_beside(target: Target, workload: Workload, load: Awaitable[LoadResult]) -> LoadResult:
    """Await the load, and meanwhile send what the workload has beside its prompts; the last of these requests is waited for."""
    records: list[RequestRecord] = []
    is_over = asyncio.Event()

    async def client() -> None:
        for prompt in workload.beside:
            if is_over.is_set():
                return
            records.append(await target.complete(prompt, Answer(1)))

    sent = asyncio.create_task(client())
    await asyncio.sleep(0)
    try:
        done = await load
    finally:
        is_over.set()
        await sent
    return replace(done, beside=records)
