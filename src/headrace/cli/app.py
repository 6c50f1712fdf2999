"""The commands and their options.

Owns the command tree, the names of options and the one place that turns an error into a line and an exit code: 2 for what the
user can fix (HeadraceError, wrong usage), 130 for Ctrl-C. Does not own the options of a server (config.cli makes them) or what
a command does. Runs in the main process; imports neither torch nor any room that is slow to import.
"""

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from headrace.checkpoint.weight_formats import StoredScheme
from headrace.config.cli import ENGINE_FIELDS, ServerCommand, with_server_options
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError
from headrace.version import VERSION

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_COMPLETE = "_HEADRACE_COMPLETE"
"""Set by the shell when it asks for the words that may follow (`headrace completion`)."""

_QUIET = {"log_level": "warning"}
_ENGINE_OPTIONS = with_server_options(ENGINE_FIELDS, _QUIET)

app = typer.Typer(
    name="headrace",
    help="Headrace serves large language models: a server, an engine, and tools around them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Measure a server, an engine, its steps or its kernels (docs/benchmarking.md, docs/performance.md).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")
cache = typer.Typer(
    help="List or clear the packed weights that make later starts quick (docs/operations.md).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(cache, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", metavar="", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Headrace serves large language models: a server, an engine, and tools around them."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit. argv: without the program's name; default: the process's own."""
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app(args=None if argv is None else list(argv), prog_name="headrace")
    except HeadraceError as error:
        Console(stderr=True).print(
            f"[bold red]headrace:[/bold red] {escape(error.message)}", highlight=False, soft_wrap=True
        )
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


# --- serving and generating

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Same as --model-path: a known name, org/name, a Hugging Face folder or a GGUF file."
    ),
]
_MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens of a reply.", rich_help_panel="Sampling")]
_Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature, 0 = greedy; default: the model's own.", rich_help_panel="Sampling"),
]
_TopP = Annotated[
    float | None, typer.Option(help="Nucleus sampling threshold; default: the model's own.", rich_help_panel="Sampling")
]
_Seed = Annotated[int | None, typer.Option(help="Seed for sampling.", rich_help_panel="Sampling")]


@app.command(cls=ServerCommand)
@with_server_options()
def serve(model: _Model = None, *, server_args: ServerArgs) -> None:
    """Serve a model over HTTP: OpenAI's API, the native API and metrics."""
    from headrace.serve import launch_server

    raise typer.Exit(launch_server(with_model(server_args, model)))


@app.command(cls=ServerCommand)
@_ENGINE_OPTIONS
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: _MaxNewTokens = 128,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text; may be given several times.", rich_help_panel="Sampling"),
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="Make the output JSON that matches this schema: a file, or the schema itself.",
            metavar="FILE|JSON",
            rich_help_panel="Sampling",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(help="Make the whole output match this regular expression.", rich_help_panel="Sampling"),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="Make the output one of these texts; give it once for each.", rich_help_panel="Sampling"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with text, ids and counts instead of the text.", metavar=""),
    ] = False,
    *,
    server_args: ServerArgs,
) -> None:
    """Continue a text once, without a server, and print it as it comes."""
    from headrace.api.engine import Engine
    from headrace.cli.chat_sources import new_texts

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    given |= _grammar(json_schema, regex, choice)
    sampling_params = {name: value for name, value in given.items() if value is not None}
    text = sys.stdin.read() if prompt == "-" else prompt
    with Engine(**dataclasses.asdict(server_args)) as engine:
        if as_json:
            print(json.dumps(engine.generate(prompt=text, sampling_params=sampling_params), ensure_ascii=False))
            return
        for piece in new_texts(engine.generate(prompt=text, sampling_params=sampling_params, stream=True)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


@app.command(cls=ServerCommand)
@_ENGINE_OPTIONS
def chat(
    model: _Model = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to a running OpenAI-compatible server instead of loading a model here.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server at --url.", envvar="HEADRACE_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message to start with.")] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            help="File with a JSON list of tools (or the list) that the model may call; you are asked for the results."
        ),
    ] = None,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    *,
    server_args: ServerArgs,
) -> None:
    """Chat in the terminal. /help lists the commands; Ctrl-C stops a reply. When input is a pipe, every line is one message."""
    from headrace.cli.chat import run_chat
    from headrace.cli.chat_sources import ChatSampling, EngineChat, ServerChat
    from headrace.cli.tools import read_tools
    from headrace.cli.typed_input import History, state_folder

    offered = read_tools(tools) if tools else []
    history = History(state_folder() / "chat_history")
    sampling = ChatSampling(max_new_tokens, temperature, top_p, seed)
    console = Console(highlight=False)
    if url is not None:
        with ServerChat(url, sampling, model, api_key) as server:
            run_chat(server, console, system, offered, history)
        return
    with EngineChat(with_model(server_args, model), sampling) as engine:
        run_chat(engine, console, system, offered, history)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(help="API key of the server; the admin key shows most.", envvar="HEADRACE_API_KEY")
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Time between two readings, in seconds.", min=0.1, metavar="SECONDS")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one view and end, as when the output is no terminal.", metavar="")
    ] = False,
) -> None:
    """Watch a running server in the terminal: its load, latencies and requests. q quits."""
    from headrace.cli.top import run_top
    from headrace.cli.top_reader import ServerReader

    run_top(ServerReader(url, api_key), Console(highlight=False), interval, once=once)


# --- models and the machine


@app.command()
def models() -> None:
    """List the models known by name, and those of the Hugging Face cache."""
    from headrace.cli.pull import run_models

    run_models(Console())


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `headrace models`, or org/name[@revision][:FILE.gguf] of the Hugging Face Hub."
        ),
    ],
) -> None:
    """Download a model and verify its checksums. Interrupted downloads continue. No other command downloads anything.

    From the Hub only safetensors or one GGUF file, configuration, tokenizer and templates are downloaded, never pickles or
    code, into the cache of Hugging Face's own tools. HF_TOKEN gives a token, HF_ENDPOINT another Hub, HF_HUB_CACHE
    another cache.
    """
    from headrace.cli.pull import run_pull

    run_pull(name, Console())


@cache.command("list")
def cache_list() -> None:
    """List the files, most recently used first."""
    from rich.filesize import decimal
    from rich.table import Column, Table

    from headrace.benchmark.tables import print_table
    from headrace.checkpoint import weight_cache

    files = weight_cache.cached_files()
    table = Table("model", "precision", Column("size", justify="right"), "last used", Column("file", overflow="fold"))
    for file in files:
        used = datetime.datetime.fromtimestamp(file.used_s).strftime("%Y-%m-%d %H:%M")
        table.add_row(file.model, file.precision, decimal(file.num_bytes), used, file.path.name)
    if files:
        print_table(Console(), table)
    Console().print(
        f"{decimal(sum(file.num_bytes for file in files))} in {weight_cache.folder()}", highlight=False, soft_wrap=True
    )


@cache.command("clear")
def cache_clear() -> None:
    """Delete all files. Running servers are not affected; the next start of each model packs its weights again."""
    from rich.filesize import decimal

    from headrace.checkpoint import weight_cache

    Console().print(f"freed {decimal(weight_cache.clear())}", highlight=False)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A known name, org/name, a Hugging Face folder or a GGUF file.")],
    output: Annotated[Path, typer.Option(help="Folder to write; new or empty.")],
    scheme: Annotated[StoredScheme, typer.Option(help="Format of the weights; int4 is calibrated on a text.")] = "int4",
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text file to calibrate on, similar to what the model will see; default: the Python reference."
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="Calibrate on the first N tokens of the text.", min=1, metavar="N")
    ] = 16384,
    check_tokens: Annotated[
        int,
        typer.Option(help="Afterwards, compare perplexities on N tokens of other text; 0 = skip.", min=0, metavar="N"),
    ] = 4096,
) -> None:
    """Write a quantised checkpoint of a model (docs/quantization.md)."""
    from headrace.cli.quantize import run_quantize

    run_quantize(model, scheme, output, calibration, calibration_tokens, check_tokens, Console())


@app.command()
def doctor(
    tp_size: Annotated[
        int, typer.Option(min=1, max=64, help="Show what each of so many ranks of one model would get.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", metavar="")] = False,
) -> None:
    """Show the machine, which kernels and attention backends run on it, and why others do not."""
    from headrace.cli.doctor import examine, print_report

    report = examine(tp_size)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(Console(), report)


@app.command()
def version() -> None:
    """Print the version."""
    print(VERSION)


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to print it for.")],
) -> None:
    """Print the completion of commands and options for a shell, e.g. for bash: source <(headrace completion bash)."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(get_completion_script(prog_name="headrace", complete_var=_COMPLETE, shell=shell))


# --- benchmarks

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
@_ENGINE_OPTIONS
def bench_offline(
    model: _Model = None,
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
@_ENGINE_OPTIONS
def bench_step(
    model: _Model = None,
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
@_ENGINE_OPTIONS
def bench_quality(
    model: _Model = None,
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


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} takes comma-separated positive whole numbers, got {text!r}")
    return tuple(int(word) for word in words)


def with_model(server_args: ServerArgs, model: str | None) -> ServerArgs:
    """The options with the model of the argument. Raises ConfigError when --model-path names another one."""
    if model is None:
        return server_args
    default = next(f.default for f in dataclasses.fields(ServerArgs) if f.name == "model_path")
    if server_args.model_path not in (default, model):
        raise ConfigError(f"two models are given, {model} and --model-path {server_args.model_path}; give only one")
    return dataclasses.replace(server_args, model_path=model)


def _grammar(json_schema: str | None, regex: str | None, choice: list[str] | None) -> dict[str, Any]:
    """The sampling parameters that say what the output must match. Raises ConfigError for more than one."""
    from headrace.cli.schema import read_schema

    given = {"json_schema": json_schema and read_schema(json_schema), "regex": regex, "choice": choice}
    asked = {name: value for name, value in given.items() if value}
    if len(asked) > 1:
        options = [f"--{name.replace('_', '-')}" for name in asked]
        raise ConfigError(f"{' and '.join(options)} cannot be combined; give one of them")
    return asked


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
