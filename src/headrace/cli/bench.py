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
    help="Measure a server, an engine, its steps or its kernels (docs/benchmarking.md, docs/performance.md).",
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
    from headrace.benchmark.offline import run_offline
    from headrace.benchmark.serving import LoadOptions

    server_args = with_model(server_args, model)
    load = LoadOptions(
        presets=presets, tokenizer=tokenizer or server_args.tokenizer_path or server_args.model_path, repeat=repeat,
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


@bench.command("kernels")
def bench_kernels(
    shapes: Annotated[str, typer.Option(help="Models whose shapes to time, comma-separated: 135m, 1b.")] = "135m,1b",
    ops: Annotated[str, typer.Option(help="Ops to time, comma-separated; empty: all.")] = "",
    rows: Annotated[str, typer.Option(help="Numbers of rows of a call, comma-separated.")] = "1,8,32,256",
    context: Annotated[int, typer.Option(help="Number of keys that attention reads.")] = 256,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Precision of weights and KV.")] = "bfloat16",
    repeat: Annotated[int, typer.Option(help="Calls per shape.")] = 20,
    num_threads: Annotated[
        int | None, typer.Option(help="Compute threads; default: the cores that this process may use.")
    ] = None,
    output: _Output = None,
) -> None:
    """Time each kernel over the shapes of a model, in GB/s and GFLOP/s."""
    from headrace.benchmark.kernels import KernelOptions, run_kernels

    options = KernelOptions(
        shapes=_words(shapes), ops=_words(ops), rows=_counts("--rows", rows), context=context, dtype=dtype,
        repeat=repeat, num_threads=num_threads, output=output,
    )  # fmt: skip
    run_kernels(options, Console())


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


_SESSIONS, _ONE_REPLICA = "What is asked", "One replica"


@bench.command("fleet")
def bench_fleet(
    replicas: Annotated[str, typer.Option(help="Sizes of the fleets, comma-separated.")] = "10",
    policies: Annotated[
        str, typer.Option(help="Values of --load-balance-method, comma-separated.")
    ] = "round_robin,shortest_queue,cache_aware",
    num_requests: Annotated[
        int | None, typer.Option(help="Requests to each fleet; default: 100 for each replica.", metavar="N")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second for each replica (Poisson).")] = 1.0,
    failures: Annotated[
        int,
        typer.Option(help="N times a replica dies while requests arrive; others go on with its requests.", metavar="N"),
    ] = 0,
    restart_s: Annotated[
        float, typer.Option(help="Seconds until a replica that died is back, with an empty cache.")
    ] = 10.0,
    groups: Annotated[int, typer.Option(help="Number of system prompts.", rich_help_panel=_SESSIONS)] = 100,
    zipf: Annotated[
        float, typer.Option(help="System prompt number k is chosen with weight 1 / k^ZIPF.", rich_help_panel=_SESSIONS)
    ] = 1.0,
    system_tokens: Annotated[
        int, typer.Option(help="Mean length of a system prompt.", rich_help_panel=_SESSIONS)
    ] = 256,
    turns: Annotated[int, typer.Option(help="Mean number of turns of a session.", rich_help_panel=_SESSIONS)] = 4,
    turn_tokens: Annotated[
        int, typer.Option(help="Mean length of the user's text in a turn.", rich_help_panel=_SESSIONS)
    ] = 64,
    output_tokens: Annotated[int, typer.Option(help="Mean length of an answer.", rich_help_panel=_SESSIONS)] = 32,
    think_s: Annotated[
        float, typer.Option(help="Mean time from an answer to the next turn.", rich_help_panel=_SESSIONS)
    ] = 5.0,
    step_costs: Annotated[
        Path | None,
        typer.Option(
            help="Results of `headrace bench step --output`: how long steps take; default: SmolLM2 on 2 cores.",
            rich_help_panel=_ONE_REPLICA,
        ),
    ] = None,
    kv_tokens: Annotated[int, typer.Option(help="Size of the KV cache.", rich_help_panel=_ONE_REPLICA)] = 32768,
    max_running_requests: Annotated[
        int, typer.Option(help="Requests that run at a time; the others wait.", rich_help_panel=_ONE_REPLICA)
    ] = 32,
    chunked_prefill_size: Annotated[
        int, typer.Option(help="Most prompt tokens in a step.", rich_help_panel=_ONE_REPLICA)
    ] = 512,
    tokens_per_step: Annotated[
        int,
        typer.Option(
            help="Simulate N steps of decoding as one: quicker for large fleets, less exact.",
            metavar="N",
            rich_help_panel=_ONE_REPLICA,
        ),
    ] = 1,
    repeat: _Repeat = 1,
    seed: Annotated[int, typer.Option(help="Seed of sessions, arrivals and failures.")] = 1234,
    output: _Output = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot hit rates, latencies and imbalance to this .svg or .png file.")
    ] = None,
) -> None:
    """Simulate a fleet of replicas: what a balancing policy does to hit rates and latencies. Needs no model."""
    from headrace.benchmark.fleet.costs import DEFAULT_COSTS, read_costs
    from headrace.benchmark.fleet.options import FleetOptions, ReplicaOptions, WorkloadOptions, policy_names
    from headrace.benchmark.fleet.run import run_fleet

    workload = WorkloadOptions(
        groups=groups, zipf=zipf, system_tokens=system_tokens, turns=turns, turn_tokens=turn_tokens,
        output_tokens=output_tokens, think_s=think_s,
    )  # fmt: skip
    replica = ReplicaOptions(
        cost=DEFAULT_COSTS if step_costs is None else read_costs(step_costs), kv_tokens=kv_tokens,
        max_running=max_running_requests, chunk_tokens=chunked_prefill_size, tokens_per_step=tokens_per_step,
    )  # fmt: skip
    options = FleetOptions(
        replicas=_counts("--replicas", replicas), policies=policy_names(policies),
        workload=workload, replica=replica, rate=rate, num_requests=num_requests, failures=failures,
        restart_s=restart_s, repeat=repeat, seed=seed, output=output, plot=plot,
    )  # fmt: skip
    run_fleet(options, Console())


@bench.command("ratios")
def bench_ratios(
    results: Annotated[Path, typer.Argument(help="What `bench serving` with two servers has written (--output).")],
    names: Annotated[
        str, typer.Option(help="What to call the two servers, comma-separated; default: their addresses.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Plot the ratios to this .svg or .png file.")] = None,
) -> None:
    """Compare the two servers of a result, preset by preset: the second over the first. Measures nothing."""
    from headrace.benchmark.ratios import run_ratios

    run_ratios(results, _words(names), plot, Console())


# --- what commands share


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} takes comma-separated positive whole numbers, got {text!r}")
    return tuple(int(word) for word in words)


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
