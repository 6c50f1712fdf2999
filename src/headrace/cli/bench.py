"""`headrace bench`: its commands and their options. What they measure is in the room `benchmark`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from headrace.cli.arguments import ENGINE_OPTIONS, Model, with_model
from headrace.config.cli import ServerCommand
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

bench = typer.Typer(
    help="Measure a server, an engine or its steps (docs/benchmarking.md, docs/performance.md).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Presets = Annotated[str, typer.Option(help="Workloads to run, in this order, comma-separated (docs/benchmarking.md).")]
_Tokenizer = Annotated[str, typer.Option(help="Model (name or path) whose tokenizer measures the prompts.")]
_Repeat = Annotated[
    int, typer.Option(help="Repeat everything N times; figures are medians, with their spread.", metavar="N")
]
_Rate = Annotated[
    float | None,
    typer.Option(help="Send requests at this rate per second (Poisson) instead of the presets' fixed concurrency."),
]
_Concurrency = Annotated[
    int | None, typer.Option(help="Requests in flight at a time, instead of the presets' own numbers.")
]
_NumRequests = Annotated[int | None, typer.Option(help="Send only the first N requests of each preset.", metavar="N")]
_WarmUp = Annotated[int, typer.Option(help="Requests to send before the clock starts.")]
_WorkloadSeed = Annotated[int, typer.Option(help="Seed of the prompts; published figures use the default.")]
_Output = Annotated[Path | None, typer.Option(help="Write all results as JSON to this file.")]
_Plot = Annotated[Path | None, typer.Option(help="Plot throughput and latencies to this .svg or .png file.")]
_LIMITS = "Goodput limits"
_TtftMs = Annotated[float | None, typer.Option(help="Longest time to first token, ms.", rich_help_panel=_LIMITS)]
_PerTokenMs = Annotated[
    float | None, typer.Option(help="Longest mean time per output token, ms.", rich_help_panel=_LIMITS)
]
_E2eMs = Annotated[float | None, typer.Option(help="Longest time of a whole request, ms.", rich_help_panel=_LIMITS)]
_ALL_PRESETS = "A,B1,B8,B32,C,Ccold,D"


@bench.command("serving")
def bench_serving(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Server to measure; may be given several times: the servers then take turns within each repetition."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name to send; default: the first model that the server lists.")
    ] = None,
    presets: _Presets = _ALL_PRESETS,
    tokenizer: _Tokenizer = "smollm2",
    repeat: _Repeat = 1,
    rate: _Rate = None,
    concurrency: _Concurrency = None,
    num_requests: _NumRequests = None,
    warm_up: _WarmUp = 2,
    seed: _WorkloadSeed = 1234,
    prompt_form: Annotated[
        Literal["auto", "ids", "text", "chat"],
        typer.Option(help="Send prompts as token ids, as text or as chats; auto: ids if the server takes them."),
    ] = "auto",
    extra_body: Annotated[str, typer.Option(help="JSON object merged into every request.")] = "{}",
    api_key: Annotated[str | None, typer.Option(help="API key of the servers.", envvar="HEADRACE_API_KEY")] = None,
    timeout_s: Annotated[float, typer.Option(help="Give up on a request after this many seconds.")] = 600.0,
    check_against: Annotated[
        str | None, typer.Option(help="First compare greedy outputs with those of the server at this URL.")
    ] = None,
    limit_ttft_ms: _TtftMs = None,
    limit_per_token_ms: _PerTokenMs = None,
    limit_e2e_ms: _E2eMs = None,
    output: _Output = None,
    plot: _Plot = None,
) -> None:
    """Measure any OpenAI-compatible server over HTTP."""
    from headrace.benchmark.serving import LoadOptions, ServingOptions, run_serving

    load = LoadOptions(
        presets=presets, tokenizer=tokenizer, repeat=repeat, rate=rate, concurrency=concurrency,
        num_requests=num_requests, warm_up=warm_up, seed=seed, output=output, plot=plot,
        limits=_limits(limit_ttft_ms, limit_per_token_ms, limit_e2e_ms),
    )  # fmt: skip
    options = ServingOptions(
        urls=url or ["http://127.0.0.1:30000"], load=load, model=model, prompt_form=prompt_form, api_key=api_key,
        extra_body=_json_object("--extra-body", extra_body), check_against=check_against, timeout_s=timeout_s,
    )  # fmt: skip
    run_serving(options, Console())


@bench.command("offline", cls=ServerCommand)
@ENGINE_OPTIONS
def bench_offline(
    model: Model = None,
    presets: _Presets = _ALL_PRESETS,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer measures the prompts; default: the model itself.")
    ] = None,
    repeat: _Repeat = 1,
    rate: _Rate = None,
    concurrency: _Concurrency = None,
    num_requests: _NumRequests = None,
    warm_up: _WarmUp = 2,
    seed: _WorkloadSeed = 1234,
    limit_ttft_ms: _TtftMs = None,
    limit_per_token_ms: _PerTokenMs = None,
    limit_e2e_ms: _E2eMs = None,
    output: _Output = None,
    plot: _Plot = None,
    *,
    server_args: ServerArgs,
) -> None:
    """Measure an Engine in this process, without HTTP."""
    from headrace.benchmark.serving import LoadOptions, run_offline

    server_args = with_model(server_args, model)
    load = LoadOptions(
        presets=presets, tokenizer=tokenizer or server_args.tokenizer_name, repeat=repeat,
        rate=rate, concurrency=concurrency, num_requests=num_requests, warm_up=warm_up, seed=seed, output=output,
        plot=plot, limits=_limits(limit_ttft_ms, limit_per_token_ms, limit_e2e_ms),
    )  # fmt: skip
    run_offline(server_args, load, Console())


@bench.command("step", cls=ServerCommand)
@ENGINE_OPTIONS
def bench_step(
    model: Model = None,
    batch: Annotated[str, typer.Option(help="Numbers of rows of a decode step, comma-separated.")] = "1,8,32",
    context: Annotated[str, typer.Option(help="Numbers of cached tokens per row, comma-separated.")] = "256",
    prefill: Annotated[
        str, typer.Option(help="Numbers of prompt tokens of a prefill step, comma-separated; empty: none.")
    ] = "512",
    repeat: Annotated[int, typer.Option(help="Steps per shape.")] = 20,
    phases: Annotated[
        bool, typer.Option("--phases", help="Also print how long each part of a step takes.", metavar="")
    ] = False,
    busy_neighbours: Annotated[
        int, typer.Option(help="Measure again beside N processes that use a full core each.", metavar="N")
    ] = 0,
    output: _Output = None,
    *,
    server_args: ServerArgs,
) -> None:
    """Time prefill and decode steps on the CPU, without a server, and compare them with the machine's limits."""
    from headrace.benchmark.step import StepOptions, run_step

    options = StepOptions(
        batches=_counts("--batch", batch), contexts=_counts("--context", context),
        prefills=_counts("--prefill", prefill), repeat=repeat, phases=phases,
        busy_neighbours=busy_neighbours, output=output,
    )  # fmt: skip
    run_step(with_model(server_args, model), options, Console())


@bench.command("quality", cls=ServerCommand)
@ENGINE_OPTIONS
def bench_quality(
    model: Model = None,
    num_tokens: Annotated[
        int, typer.Option(help="Perplexity on the first N tokens of the text.", min=2, metavar="N")
    ] = 4096,
    output: _Output = None,
    *,
    server_args: ServerArgs,
) -> None:
    """Compare an Engine's perplexity, logprobs and greedy tokens with those of float32."""
    from headrace.benchmark.quality import run_quality

    run_quality(with_model(server_args, model), num_tokens, output, Console())


# --- what commands share


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} takes comma-separated positive whole numbers, got {text!r}")
    return tuple(map(int, words))


def _limits(ttft_ms: float | None, per_token_ms: float | None, e2e_ms: float | None) -> Any:
    from headrace.benchmark.figures import Limits

    return Limits(*(None if value is None else value / 1000 for value in (ttft_ms, per_token_ms, e2e_ms)))


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} must be a JSON object, got {text}")
    return value
