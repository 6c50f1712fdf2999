"""The commands and their options.

Owns the command tree, the names of options and the one place that turns an error into a line and an exit code: 2 for what the
user can fix (HeadraceError, wrong usage). Does not own the options of a server (config.cli makes them) or what
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
from headrace.cli.arguments import DEFAULT_MODEL, EMBEDDING_MODEL, ENGINE_OPTIONS, CommandGroup, Model, with_model
from headrace.cli.bench import bench
from headrace.config.cli import ServerCommand, names_beginning, with_server_options
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError
from headrace.media_kinds import MediaKind
from headrace.processes import early
from headrace.version import VERSION

EXIT_USER_ERROR = 2

_COMPLETE = "_HEADRACE_COMPLETE"
"""Set by the shell when it asks for the words that may follow (`headrace completion`)."""


app = typer.Typer(
    name="headrace",
    cls=CommandGroup,
    help="Headrace serves large language models: a server, an engine, and tools around them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
cache = typer.Typer(
    help="List or clear the packed weights that make later starts quick (docs/operations.md).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(cache, name="cache")
kv = typer.Typer(
    help="List, pin or clear KV that is kept, in a folder or by a running server (docs/kv-cache.md).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
cache.add_typer(kv, name="kv")


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


# --- serving and generating

_MaxNewTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens to generate.", rich_help_panel="Sampling")
]
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
def serve(model: Model = None, *, server_args: ServerArgs) -> None:
    """Serve a model over HTTP: OpenAI's API, the native API and metrics."""
    args = with_model(server_args, model)
    if args.ray or args.node_rank or args.single_process:
        early.end()
    if args.ray:
        from headrace.cluster.ray_server import launch_on_ray

        raise typer.Exit(launch_on_ray(args))
    from headrace.serve import launch_server

    raise typer.Exit(launch_server(args))


@app.command(cls=ServerCommand)
@ENGINE_OPTIONS
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    max_new_tokens: _MaxNewTokens = 128,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop string, not printed; may be repeated.", rich_help_panel="Sampling"),
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="JSON schema that the output matches: a file, or the schema itself.",
            metavar="FILE|JSON",
            rich_help_panel="Sampling",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(help="Regular expression that the whole output matches.", rich_help_panel="Sampling"),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="One of the texts that the output may be; repeat it for each.", rich_help_panel="Sampling"),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file for an image token of the text; can be repeated.", metavar="FILE"),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(help="Audio file for an audio token of the text; can be repeated.", metavar="FILE"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with text, ids and counts instead of the text.", metavar=""),
    ] = False,
    *,
    server_args: ServerArgs,
) -> None:
    """Complete one prompt, without a server, and print it as it is generated."""
    from headrace.api.engine import Engine
    from headrace.cli.chat_sources import new_texts
    from headrace.cli.given import file_bytes

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    given |= _grammar(json_schema, regex, choice)
    sampling_params = {name: value for name, value in given.items() if value is not None}
    asked: dict[str, Any] = {"sampling_params": sampling_params}
    for kind, paths in ((MediaKind.IMAGE, image), (MediaKind.AUDIO, audio)):
        if paths:
            asked[kind.field] = [file_bytes(kind, path.expanduser()) for path in paths]
    asked["prompt"] = sys.stdin.read() if prompt == "-" else prompt
    with Engine(**dataclasses.asdict(server_args)) as engine:
        if as_json:
            print(json.dumps(engine.generate(**asked), ensure_ascii=False))
            return
        for piece in new_texts(engine.generate(**asked, stream=True)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


@app.command(cls=ServerCommand)
@ENGINE_OPTIONS
def embed(
    texts: Annotated[
        list[str],
        typer.Argument(help="Texts to embed; a single - reads them from standard input, one a line."),
    ],
    similarity: Annotated[
        bool,
        typer.Option(
            "--similarity", help="Print the cosine similarities of the texts instead of the embeddings.", metavar=""
        ),
    ] = False,
    *,
    server_args: ServerArgs,
) -> None:
    """Embed each text, without a server, and print it as a line of JSON. Without --model-path: minilm."""
    from headrace.api.engine import Engine

    if texts == ["-"]:
        texts = [line for line in sys.stdin.read().splitlines() if line]
        if not texts:
            raise ConfigError("standard input has no text")
    if server_args.model_path == DEFAULT_MODEL and not server_args.is_embedding:
        server_args = dataclasses.replace(server_args, model_path=EMBEDDING_MODEL)
    with Engine(**dataclasses.asdict(server_args)) as engine:
        answers = engine.encode(texts, truncate_prompt_tokens=-1)
    vectors = [answer["embedding"] for answer in answers]
    if similarity:
        _print_similarities(texts, vectors)
        return
    for vector in vectors:
        print(json.dumps(vector))


def _print_similarities(texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> None:
    """The cosine of each text with each, as a table; 0 if one of the vectors is 0."""
    import numpy as np
    from rich.table import Table

    matrix = np.array(vectors, np.float64)
    lengths = np.linalg.norm(matrix, axis=1)
    scales = np.outer(lengths, lengths)
    table = Table("text", *(str(number) for number in range(1, len(texts) + 1)))
    for number, (text, cosines) in enumerate(
        zip(texts, matrix @ matrix.T / np.where(scales, scales, 1), strict=True), 1
    ):
        shown = text if len(text) <= 40 else text[:39] + "…"
        table.add_row(f"{number} {shown}", *(f"{cosine:.3f}" for cosine in cosines))
    Console(highlight=False).print(table)


@app.command("run", cls=ServerCommand, help="Same as chat.")
@app.command(cls=ServerCommand)
@ENGINE_OPTIONS
def chat(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="One message; its reply is printed, and no other is read.")
    ] = None,
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
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file to send with the first message; can be repeated.", metavar="FILE"),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(help="Audio file to send with the first message; can be repeated.", metavar="FILE"),
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
    from headrace.cli.given import read_part, read_tools
    from headrace.cli.terminal import History, state_folder

    offered = read_tools(tools) if tools else []
    given = ((MediaKind.IMAGE, image), (MediaKind.AUDIO, audio))
    media = [read_part(kind, path.expanduser()) for kind, paths in given for path in paths or ()]
    history = History(state_folder() / "chat_history")
    sampling = ChatSampling(max_new_tokens, temperature, top_p, seed)
    console = Console(highlight=False)
    if url is not None:
        run_chat(ServerChat(url, sampling, model, api_key), console, system, offered, history, media, prompt)
        return
    with EngineChat(with_model(server_args, model), sampling) as engine:
        run_chat(engine, console, system, offered, history, media, prompt)


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
    from headrace.cli.running_servers import ServerReader
    from headrace.cli.top import run_top

    run_top(ServerReader(url, api_key), Console(highlight=False), interval, once=once)


@app.command()
def ps(
    api_key: Annotated[str | None, typer.Option(help="API key of the servers.", envvar="HEADRACE_API_KEY")] = None,
) -> None:
    """List the servers that run on this machine, and which model each has."""
    from headrace.cli.running_servers import print_servers

    print_servers(Console(), api_key)


# --- models and the machine


@app.command("list", help="Same as models.")
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
            help="A name from `headrace models`, or org/name[@revision][:FILE.gguf] of the Hugging Face Hub.",
            autocompletion=names_beginning,
        ),
    ],
) -> None:
    """Download a model and verify its checksums. Interrupted downloads continue. No other command downloads anything.

    From the Hub only safetensors or one GGUF file (with its vision encoder), configuration, tokenizer and templates are downloaded, never pickles or
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


_Kept = Annotated[str, typer.Argument(metavar="TARGET", help="The folder of --kv-cache-dir, or a server's address.")]
_ServerKey = Annotated[str | None, typer.Option(help="API key of the server.", envvar="HEADRACE_API_KEY")]


@kv.command("list")
def kv_list(target: _Kept, api_key: _ServerKey = None) -> None:
    """List what a folder has, by weights, or what a server has cached and pinned."""
    from headrace.cli.kv import run_list

    run_list(target, api_key, Console())


@kv.command("pin")
def kv_pin(
    url: Annotated[str, typer.Argument(help="The server's address.")],
    prompt: Annotated[str, typer.Argument(help="Text to keep; - reads it from the input.")],
    ttl: Annotated[float, typer.Option(help="Seconds for which it is kept.", min=1, max=86400, metavar="S")] = 300.0,
    api_key: _ServerKey = None,
) -> None:
    """Pin a prompt on a running server."""
    from headrace.cli.kv import run_pin

    run_pin(url, sys.stdin.read() if prompt == "-" else prompt, ttl, api_key, Console())


@kv.command("clear")
def kv_clear(target: _Kept, api_key: _ServerKey = None) -> None:
    """Delete the files of a folder, or flush the cache of a server."""
    from headrace.cli.kv import run_clear

    run_clear(target, api_key, Console())


@app.command()
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="A known name, org/name, a Hugging Face folder or a GGUF file.", autocompletion=names_beginning
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.")],
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
    calibrate_sparsity: Annotated[
        bool,
        typer.Option(
            "--calibrate-sparsity", help="Write the file of --ds-channel-config-path to --output instead.", metavar=""
        ),
    ] = False,
) -> None:
    """Write a quantised checkpoint of a model (docs/quantization.md)."""
    from headrace.cli.quantize import run_calibrate_sparsity, run_quantize

    if calibrate_sparsity:
        run_calibrate_sparsity(model, output, calibration, calibration_tokens, Console())
        return
    run_quantize(model, scheme, output, calibration, calibration_tokens, check_tokens, Console())


@app.command()
def doctor(
    tp_size: Annotated[
        int, typer.Option(min=1, max=64, help="Show what each of so many ranks of one model would get.")
    ] = 1,
    numa_bind: Annotated[
        bool, typer.Option("--numa-bind", help="Show what each would get with --numa-bind.", metavar="")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", metavar="")] = False,
) -> None:
    """Show the machine, which kernels and attention backends run on it, and why others do not."""
    from headrace.cli.doctor import examine, print_report

    report = examine(tp_size, numa_bind)
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


def _grammar(json_schema: str | None, regex: str | None, choice: list[str] | None) -> dict[str, Any]:
    """The sampling parameters that say what the output must match. Raises ConfigError for more than one."""
    from headrace.cli.given import read_schema

    given = {"json_schema": json_schema and read_schema(json_schema), "regex": regex, "choice": choice}
    asked = {name: value for name, value in given.items() if value}
    if len(asked) > 1:
        options = [f"--{name.replace('_', '-')}" for name in asked]
        raise ConfigError(f"{' and '.join(options)} cannot be combined; give one of them")
    return asked
