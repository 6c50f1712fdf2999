"""Headrace and its peers on one machine, in turns: exactness first, then speed and latency, then the ratios.

Owns the order of the whole comparison: per class of precision start every server, compare greedy tokens with the reference, check
that idle servers are idle, measure all presets in turns, stop the servers. How servers are started is peers.py, how they are asked
for tokens greedy.py, measuring is `headrace.benchmark.serving`, arithmetic and plot are `ratios.py`.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.compare import peers, ratios
from bench.compare.greedy import continue_all
from bench.compare.peers import ComparedServer, Precision, ServerCommand, quantized_command
from bench.compare.ratios import RATE, Measured
from bench.program import names_of, parser_of, refusals, table_of
from bench.servers import free_port, leave_on_sigterm
from headrace.benchmark.agreement import PROMPTS, Agreement, Greedy, agreement
from headrace.benchmark.machine import this_machine
from headrace.benchmark.results import Result, document, print_results, write_json
from headrace.benchmark.serving import LoadOptions, measure, run_client
from headrace.benchmark.targets import OpenAITarget
from headrace.benchmark.workloads import PRESETS, TokenIds, preset_names
from headrace.checkpoint.names import resolve_model
from headrace.errors import ConfigError
from headrace.text.tokenizers import Tokenizer, load_tokenizer

OURS = "Headrace"
_OURS = [name for names in peers.QUANTIZATIONS.values() for name in names]
_ROUNDS = "requests of a preset for each that runs at a time, at most its own number (default: %(default)s)"
_MODEL = "smollm2"
_BUSY_SHARE = 0.1  # of a core: what a server may take while nobody asks it anything
_DURATIONS = """about how long, on 2 cores of an AMD EPYC (Zen 5) with --rounds 2, in seconds for each server and repetition:
  A 2-6   B1 1-3   B8 3-7   B32 11-25   C 1-3   Ccold 2-11   Cspaced 2-11   D 1-6   D8k 10-40
and 2 minutes a class to start its servers and compare their tokens with the reference's.
All presets with --repeat 3: 16 bits 16 minutes, 8 bits 11, 4 bits 9."""


@dataclass(slots=True)
class ClassRun:
    """Everything measured in one class of precision. servers: name -> start-up, memory, precision and what else it says of itself."""

    precision: Precision
    servers: dict[str, dict[str, Any]]
    agreements: dict[str, Agreement]
    results: list[Result]
    measured: list[Measured]


@dataclass(frozen=True, slots=True)
class Turns:
    """Presets and the servers that are measured with them in turns."""

    presets: list[str]
    servers: list[ComparedServer]


def figures_of(precision: Precision, result: Result) -> list[Measured]:
    """What is compared of one preset and server: its rate, and of the presets where streams compete their latencies."""
    errors = sum(summary.num_errors for summary in result.repetitions)
    is_ours = result.target.startswith(OURS)

    figures = {RATE: ratios.rate_key(result.preset)}
    if result.preset in ratios.LATENCY_PRESETS:
        figures |= ratios.LATENCIES
    found = []
    for figure, place in figures.items():
        # A run without one answer has no latencies; it has errors, so that no ratio is made of the 0.
        values = [attrgetter(place)(summary) or 0.0 for summary in result.repetitions]
        median, lowest, highest = statistics.median(values), min(values), max(values)
        found.append(
            Measured(precision, result.preset, result.target, is_ours, figure, median, lowest, highest, errors)
        )
    return found


def reference_tokens(prompts: Sequence[TokenIds]) -> Greedy:
    """Continuations by transformers in float32. Raises ConfigError when it fails."""
    model = peers.MODELS / "hf"
    if not model.exists():
        raise ConfigError(f"the reference needs {model}; run bench/compare/setup first")
    done = subprocess.run(
        [sys.executable, str(peers.HERE / "reference_texts.py"), str(model)],
        input=json.dumps(list(prompts)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(f"the reference failed:\n{done.stderr[-2000:]}")
    return Greedy(**json.loads(done.stdout))


async def run_class(
    precision: Precision,
    turns: Sequence[Turns],
    tokenizer: Tokenizer,
    reference: Greedy,
    load: LoadOptions,
    console: Console,
) -> ClassRun:
    """Check and measure running servers. Raises ConfigError when one does not idle between its turns."""
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    servers = list(dict.fromkeys(server for each in turns for server in each.servers))
    run = ClassRun(precision, {}, {}, [], [])
    targets = {}
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600, connect=10), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        for server in servers:
            target = await OpenAITarget.connect(session, server.url, tokenizer.decode, prompt_form="ids")
            target.name = server.name
            targets[server.name] = target
            got = await continue_all(server.command.continue_greedily, session, server.url, prompts)
            run.agreements[server.name] = agreement(reference, got)
            console.print(f"{server.name}: {run.agreements[server.name]}", highlight=False)
            run.servers[server.name] = {**await target.describe(), **server.command.ask_precision()}
        await asyncio.to_thread(check_idle, servers)
        for each in turns:
            chosen = [targets[server.name] for server in each.servers]
            run.results += await measure(chosen, tokenizer, replace(load, presets=",".join(each.presets)), console)
    for server in servers:
        run.servers[server.name]["memory_mib"] = round(server.memory_mib())
    run.measured = [figure for result in run.results for figure in figures_of(precision, result)]
    return run


def check_idle(servers: Sequence[ComparedServer]) -> None:
    """Raises ConfigError when a server computes while nobody asks it: it would slow down the others' turns."""
    for server in servers:
        share = server.cpu_share()
        if share > _BUSY_SHARE:
            raise ConfigError(f"{server.name} takes {share:.2f} cores while idle: it cannot be compared in turns")


def start_and_run_class(
    precision: Precision, options: "Options", tokenizer: Tokenizer, reference: Greedy, console: Console
) -> ClassRun:
    """Start every server, one after the other, run the class, stop them."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-compare-")))
        ready = {}

        def start(command_at: Callable[[int], ServerCommand]) -> ComparedServer:
            port = free_port()
            server = stack.enter_context(ComparedServer(command_at(port), port, logs / f"{port}.log"))
            ready[server.name] = server.wait_until_ready()
            console.print(f"{server.name}: ready after {ready[server.name]:.1f} s", highlight=False)
            return server

        ours = [start(partial(quantized_command, name)) for name in options.ours_of(precision)]
        theirs = {name: start(partial(peers.PEERS[name], precision)) for name in options.all_peers}
        turns = [
            Turns(presets, ours + [theirs[name] for name in names]) for presets, names in options.presets_and_peers()
        ]
        done = run_client(run_class(precision, turns, tokenizer, reference, options.load, console))
    for name, seconds in ready.items():
        done.servers[name]["ready_s"] = round(seconds, 2)
    return done


def report(runs: Sequence[ClassRun], load: LoadOptions, console: Console) -> None:
    """Print the tables; write the JSON and the plot that were asked for."""
    results = [result for run in runs for result in run.results]
    measured = [figure for run in runs for figure in run.measured]
    found = ratios.ratios(measured)
    servers = {name: said for run in runs for name, said in run.servers.items()}
    agreements = {name: each for run in runs for name, each in run.agreements.items()}
    content = document("compare", servers, results, load.described(), load.limits, command="python -m bench.compare")
    content["classes"] = []
    for run in runs:
        exactness = [{"server": name, **asdict(each)} for name, each in run.agreements.items()]
        content["classes"].append({"class": run.precision, "servers": list(run.servers), "agreement": exactness})
    content["ratios"] = [{**asdict(each), "is_reached": each.is_reached} for each in found]
    print_results(console, results)
    machine = this_machine()
    where = f"{machine.cpu}, {machine.num_cores} cores"
    console.print(f"{where}, {machine.memory_gib} GiB, {' '.join(machine.isa)}", highlight=False)
    for name in preset_names(load.presets):
        console.print(f"  {name}: {PRESETS[name].description}", highlight=False)
    console.print(server_table(servers, agreements))
    console.print(ratios.rate_table(found, agreements))
    if any(each.figure != RATE for each in found):
        console.print(ratios.latency_table(found))
    if load.output is not None:
        write_json(load.output, content)
        console.print(f"results written to {load.output}", highlight=False)
    if load.plot is not None:
        commit = (content["commit"] or "no commit")[:10] + ("+" if content["dirty"] else "")
        ratios.draw(load.plot, measured, found, f"{where} · {commit}")
        console.print(f"plot written to {load.plot}", highlight=False)


def server_table(servers: dict[str, dict[str, Any]], agreements: dict[str, Agreement]) -> Table:
    """One row a server: what it computes in, and how close its greedy tokens are to those of float32."""
    title, texts = "Precision, and greedy tokens against float32", ("server", "products", "KV cache")
    table = table_of(title, texts, ("same texts", "same tokens", "dlogprob"))
    for name, said in servers.items():
        quantization = said.get("quantization", "none")
        products = quantization if quantization != "none" else said.get("activations") or said.get("dtype", "?")
        each = agreements[name]
        difference = "-" if each.logprob_difference is None else f"{each.logprob_difference:.4f}"
        same, tokens = f"{each.identical} of {each.num_prompts}", f"{each.mean_tokens:.1f} of {each.num_tokens}"
        table.add_row(name, products, said.get("kv_cache_dtype", "?"), same, tokens, difference)
    return table


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. ours: names of `QUANTIZATIONS`. stream_peers: in presets with several requests at a time."""

    classes: Sequence[Precision]
    ours: Sequence[str]
    peers: Sequence[str]
    stream_peers: Sequence[str]
    load: LoadOptions

    def __post_init__(self) -> None:
        """Raises ConfigError when --ours leaves nothing of a class."""
        for precision in self.classes:
            if not self.ours_of(precision):
                raise ConfigError(f"--ours names nothing of the class of {precision} bits: {', '.join(self.ours)}")

    @property
    def all_peers(self) -> list[str]:
        """Those of any preset that is measured."""
        names = {name for _, chosen in self.presets_and_peers() for name in chosen}
        return [name for name in peers.PEERS if name in names]

    def ours_of(self, precision: Precision) -> list[str]:
        """Our kinds of weights of a class."""
        return [name for name in peers.QUANTIZATIONS[precision] if name in self.ours]

    def presets_and_peers(self) -> list[tuple[list[str], Sequence[str]]]:
        """Presets that have the same peers, together."""
        names = preset_names(self.load.presets)
        single = [name for name in names if PRESETS[name].concurrency == 1]
        several = [name for name in names if PRESETS[name].concurrency > 1]
        return [group for group in ((single, self.peers), (several, self.stream_peers)) if group[0]]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Raises ConfigError for values that make no sense together."""
    parser = parser_of(__doc__)
    parser.epilog = _DURATIONS
    for option, known, default, what in (
        ("--classes", peers.PRECISIONS, peers.PRECISIONS, "bits of a weight"),
        ("--ours", _OURS, _OURS, "our kinds of weights"),
        ("--peers", tuple(peers.PEERS), tuple(peers.PEERS), "peers in presets with one request at a time"),
        ("--stream-peers", tuple(peers.PEERS), ("openvino",), "peers in presets with several at a time"),
        ("--presets", ratios.COMPARED_PRESETS, ratios.COMPARED_PRESETS, "workloads"),
    ):
        what += " (default: %(default)s)"
        parser.add_argument(option, type=names_of(known), default=",".join(default), help=what)
    parser.add_argument("--rounds", type=int, default=2, help=_ROUNDS)
    parser.add_argument("--repeat", type=int, default=1, help="repetitions; the median counts (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="plot to write, .svg or .png")
    given = vars(parser.parse_args(arguments))
    presets = ",".join(given.pop("presets"))
    load = {name: given.pop(name) for name in ("repeat", "rounds", "output", "plot")}
    return Options(**given, load=LoadOptions(presets=presets, tokenizer=_MODEL, **load))


def main() -> None:
    """The command python -m bench.compare."""
    leave_on_sigterm()
    console = Console()
    with refusals():
        options = parse()
        tokenizer = load_tokenizer(resolve_model(_MODEL))
        console.print("[dim]greedy tokens of the reference: transformers, float32[/dim]")
        reference = reference_tokens([tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS])
        runs = []
        for number, precision in enumerate(options.classes, 1):
            console.rule(f"class of {precision} bits ({number} of {len(options.classes)})")
            runs.append(start_and_run_class(precision, options, tokenizer, reference, console))
        report(runs, options.load, console)


if __name__ == "__main__":
    main()
