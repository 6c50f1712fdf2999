"""Headrace and its peers on one machine, in turns: agreement first, then speed, then the ratios.

Owns the order of the whole comparison: per class of precision start every server, check that the idle ones are idle, compare
greedy tokens with the reference, measure all presets in turns, stop the servers. How servers are started is `peer_*.py`,
measuring is `headrace.benchmark.serving`, arithmetic and plot are `ratios.py`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import peer_headrace
import peer_llama_cpp
import peer_openvino
from peer_process import HERE, MODELS, PRECISIONS, Precision, ServerCommand, ServerProcess, free_port
from ratios import Rate, draw, rate_key, ratio_table, ratios
from reference_texts import NUM_TOKENS
from rich.console import Console

from headrace.benchmark.results import Result, document, print_results, write_json
from headrace.benchmark.serving import LoadOptions, measure, run_client
from headrace.benchmark.targets import OpenAITarget
from headrace.benchmark.workloads import CHECK_TEXTS, TokenIds
from headrace.checkpoint.names import resolve_model
from headrace.errors import ConfigError
from headrace.text.tokenizers import Tokenizer, load_tokenizer

PEERS = {"llama.cpp": peer_llama_cpp.command_for, "openvino": peer_openvino.command_for}
OURS = "Headrace"
_MODEL = "smollm2"
_BUSY_SHARE = 0.1  # of a core: what a server may take while nobody asks it anything


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy tokens of one server against the reference. equal: tokens before the first that differs, of `num_tokens`."""

    server: str
    equal: list[int]
    num_tokens: list[int]

    @property
    def equal_texts(self) -> int:
        """Prompts whose whole continuation is the reference's."""
        return sum(equal == length for equal, length in zip(self.equal, self.num_tokens, strict=True))


def agreement(server: str, reference: Sequence[TokenIds], got: Sequence[TokenIds]) -> Agreement:
    """Count tokens of `got` that are the reference's, from the beginning of each up to the first that differs."""
    equal, lengths = [], []
    for want, have in zip(reference, got, strict=True):
        differing = [index for index, (a, b) in enumerate(zip(want, have, strict=False)) if a != b]
        equal.append(differing[0] if differing else min(len(want), len(have)))
        lengths.append(max(len(want), len(have)))
    return Agreement(server, equal, lengths)


def rates_of(precision: Precision, results: Sequence[Result]) -> list[Rate]:
    """The rates that count, one for each preset and server."""
    rates = []
    for result in results:
        values = sorted(getattr(summary, rate_key(result.preset)) for summary in result.repetitions)
        middle = len(values) // 2
        median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
        errors = sum(summary.num_errors for summary in result.repetitions)
        is_ours = result.target.startswith(OURS)
        rates.append(Rate(precision, result.preset, result.target, is_ours, median, values[0], values[-1], errors))
    return rates


def reference_tokens(prompts: Sequence[TokenIds]) -> list[TokenIds]:
    """Continuations by transformers in float32. Raises ConfigError when it fails."""
    model = MODELS / "hf"
    if not model.exists():
        raise ConfigError(f"the reference needs {model}; run benchmarks/compare/setup first")
    done = subprocess.run(
        [sys.executable, str(HERE / "reference_texts.py"), str(model)],
        input=json.dumps(list(prompts)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(f"the reference failed:\n{done.stderr[-2000:]}")
    texts: list[TokenIds] = json.loads(done.stdout)
    return texts


async def greedy_texts(target: OpenAITarget, prompts: Sequence[TokenIds]) -> list[str]:
    """What the server answers to each prompt, one at a time. Raises ConfigError when it does not."""
    texts = []
    for prompt in prompts:
        record = await target.complete_text(prompt, NUM_TOKENS)
        if record.error is not None:
            raise ConfigError(f"{target.name} did not answer the agreement check: {record.error}")
        texts.append(record.text)
    return texts


@dataclass(slots=True)
class ClassRun:
    """Everything measured in one class of precision. servers: name -> start-up, memory, idle share, its own description."""

    precision: Precision
    servers: dict[str, dict[str, Any]]
    agreements: list[Agreement]
    results: list[Result]
    rates: list[Rate]


async def run_class(
    precision: Precision,
    servers: Sequence[ServerProcess],
    tokenizer: Tokenizer,
    reference: Sequence[TokenIds],
    load: LoadOptions,
    console: Console,
) -> ClassRun:
    """Check and measure running servers. Raises ConfigError when one does not idle between its turns."""
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in CHECK_TEXTS]
    # The reference's tokens as text and back, as every server's are: what is compared went the same way.
    want = [tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) for ids in reference]
    described, agreements = {}, []
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600, connect=10), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        targets = []
        for server in servers:
            target = await OpenAITarget.connect(session, server.url, tokenizer.decode, prompt_form="ids")
            target.name = server.name
            targets.append(target)
            got = [tokenizer.encode(text, add_special_tokens=False) for text in await greedy_texts(target, prompts)]
            agreements.append(agreement(server.name, want, got))
            described[server.name] = await target.describe()
        _print_agreements(console, agreements)
        await asyncio.to_thread(check_idle, servers)
        results = await measure(targets, tokenizer, load, console)
    for server in servers:
        described[server.name]["memory_mib"] = round(server.memory_mib())
    return ClassRun(precision, described, agreements, results, rates_of(precision, results))


def check_idle(servers: Sequence[ServerProcess]) -> None:
    """Raises ConfigError when a server computes while nobody asks it: it would slow down the others' turns."""
    for server in servers:
        share = server.cpu_share()
        if share > _BUSY_SHARE:
            raise ConfigError(f"{server.name} takes {share:.2f} cores while idle: it cannot be compared in turns")


def _print_agreements(console: Console, agreements: Sequence[Agreement]) -> None:
    for each in agreements:
        colour = "green" if each.equal_texts == len(each.equal) else "yellow"
        console.print(
            f"[{colour}]{each.server}: {sum(each.equal)} of {sum(each.num_tokens)} greedy tokens are the reference's "
            f"before the first that differs, {each.equal_texts} of {len(each.equal)} texts whole[/{colour}]",
            highlight=False,
        )


def start_and_run_class(
    precision: Precision,
    commands: Sequence[Any],
    tokenizer: Tokenizer,
    reference: Sequence[TokenIds],
    load: LoadOptions,
    console: Console,
) -> ClassRun:
    """Start every server, one after the other, run the class, stop them."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-compare-")))
        servers, ready = [], {}
        for command_for in commands:
            port = free_port()
            command: ServerCommand = command_for(precision, port)
            server = stack.enter_context(ServerProcess(command, port, logs / f"{port}.log"))
            ready[command.name] = server.wait_until_ready()
            console.print(f"{command.name}: ready after {ready[command.name]:.1f} s", highlight=False)
            servers.append(server)
        done = run_client(run_class(precision, servers, tokenizer, reference, load, console))
    for name, seconds in ready.items():
        done.servers[name]["ready_s"] = round(seconds, 2)
    return done


def report(runs: Sequence[ClassRun], load: LoadOptions, console: Console) -> None:
    """Print the tables; write the JSON and the plot that were asked for."""
    results = [result for run in runs for result in run.results]
    rates = [rate for run in runs for rate in run.rates]
    found = ratios(rates)
    servers = {name: said for run in runs for name, said in run.servers.items()}
    content = document("compare", servers, results, load.described(), load.limits)
    content["command"] = ["benchmarks/compare/run", *sys.argv[1:]]
    content["classes"] = [
        {
            "class": run.precision,
            "servers": list(run.servers),
            "agreement": [{**asdict(each), "equal_texts": each.equal_texts} for each in run.agreements],
        }
        for run in runs
    ]
    content["ratios"] = [{**asdict(each), "is_reached": each.is_reached} for each in found]
    print_results(console, results)
    console.print(ratio_table(found))
    if load.output is not None:
        write_json(load.output, content)
        console.print(f"results written to {load.output}", highlight=False)
    if load.plot is not None:
        machine = content["machine"]
        commit = (content["commit"] or "no commit")[:10] + ("+" if content["dirty"] else "")
        draw(load.plot, rates, found, f"{machine['cpu']}, {machine['num_cores']} cores · {commit}")
        console.print(f"plot written to {load.plot}", highlight=False)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/compare/run", description=__doc__.partition("\n")[0])
    parser.add_argument("--classes", default=",".join(PRECISIONS), help="bits of a weight (default: %(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which peers (default: %(default)s)")
    parser.add_argument("--presets", default="A,B1,B8,B32,C,Ccold,D", help="workloads (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=2,
        help="requests of a preset for each that runs at a time, at most its own number (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="repetitions; the median counts (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="plot to write, .svg or .png")
    return parser.parse_args()


def _chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """Names of a comma-separated list. Raises ConfigError for one that is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(known):
        raise ConfigError(f"{option} takes any of {', '.join(known)}, got {text!r}")
    return names


def main() -> None:
    """The command benchmarks/compare/run."""
    options = _parse()
    console = Console()
    try:
        classes = _chosen(options.classes, PRECISIONS, "--classes")
        peers = [PEERS[name] for name in _chosen(options.peers, list(PEERS), "--peers")]
        load = LoadOptions(
            presets=options.presets, tokenizer=_MODEL, repeat=options.repeat, rounds=options.rounds,
            output=options.output, plot=options.plot,
        )  # fmt: skip
        tokenizer = load_tokenizer(resolve_model(_MODEL))
        console.print("[dim]greedy tokens of the reference: transformers, float32[/dim]")
        reference = reference_tokens([tokenizer.encode(text, add_special_tokens=False) for text in CHECK_TEXTS])
        runs = []
        for index, precision in enumerate(PRECISIONS):
            if precision not in classes:
                continue
            console.rule(f"class of {precision} bits ({len(runs) + 1} of {len(classes)})")
            other = [peer_headrace.other_command_for] if precision in peer_headrace.OTHER_QUANTIZATION else []
            commands = [peer_headrace.command_for, *other, *peers]
            runs.append(start_and_run_class(PRECISIONS[index], commands, tokenizer, reference, load, console))
        report(runs, load, console)
    except ConfigError as error:
        console.print(f"[red]{error.message}[/red]", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
