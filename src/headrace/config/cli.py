"""The command-line spelling of `ServerArgs`: one option per field, made from the field itself.

Owns how a field becomes an option (name, type, default, help, panel), how parsed options become a `ServerArgs`, and which options `--help`,
`--help all` and `--help WORD` show; how a page looks is typer's.
Does not own the options (server_options.py), those of other servers (other_servers.py) or the commands (headrace.cli). Runs in the main process,
before anything else.
"""

import copy
import glob
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from headrace import log
from headrace.config.other_servers import check_unless, find, translate
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import flag
from headrace.config.settings import PREFIX, Settings, from_environment, from_file
from headrace.errors import ConfigError

logger = log.get_logger(__name__)

# Read from the environment as well, so that a key need not show in the list of processes.
ENV_VARS = {"api_key": "HEADRACE_API_KEY", "admin_api_key": "HEADRACE_ADMIN_API_KEY"}

# Other spellings of an option.
ALIASES = {"model_path": ("--model", "-m")}

# Options whose value is a model.
MODEL_FIELDS = ("model_path", "tokenizer_path", "speculative_draft_model_path")

_SETTINGS = "headrace.settings"

# Options of the commands that run an engine of their own, without HTTP.
ENGINE_GROUPS = ("Model", "Adapters", "Memory and schedule", "Kernels")
ENGINE_FIELDS = frozenset(
    [f.name for f in fields(ServerArgs) if f.metadata["group"] in ENGINE_GROUPS] + ["single_process", "log_level"]
)

HELP = ("--help", "-h")
ALL = "all"

FIRST = (
    "model_path",
    "config",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "context_length",
    "quantization",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "num_threads",
    "max_total_tokens",
    "max_running_requests",
    "log_level",
)
"""The options of ServerArgs that matter first. Those that only one command has are on its first page, too."""


def names_beginning(incomplete: str) -> list[str]:
    """The models whose names begin so, for the shell: known names, those of the Hugging Face cache, folders and GGUF files."""
    from headrace.checkpoint.hub_cache import list_cached
    from headrace.checkpoint.names import KNOWN_MODELS

    names = [name for name in (*KNOWN_MODELS, *(model.name for model in list_cached())) if name.startswith(incomplete)]
    paths = glob.glob(glob.escape(incomplete) + "*") if incomplete else []
    return names + [
        f"{path}/" if os.path.isdir(path) else path for path in paths if path.endswith(".gguf") or os.path.isdir(path)
    ]


class ServerCommand(TyperCommand):
    """A command with the options of ServerArgs, which are also read from the environment and from --config.

    It takes options as SGLang and vLLM write them, too. The command line wins over the environment, and that over the file.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises ConfigError for options of other servers that are not supported, and for wrong variables."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        params = self.get_params(ctx)
        own = {
            name: not getattr(param, "is_flag", False)
            for param in params
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        }
        if (word := asked_page(args, own)) is not None:
            self._show_help(ctx, word)
        offered = {param.name for param in params}
        settings = from_environment({name: os.environ[name] for name in os.environ if name.startswith(PREFIX)}, offered)
        takes_word = any(param.param_type_name == "argument" for param in params)
        translation = translate(args, own, takes_word and "model_path" not in settings.values)
        ctx.meta[_SETTINGS] = settings
        ctx.default_map = dict(settings.values)
        rest: list[str] = super().parse_args(ctx, translation.words)
        settings.notes += translation.notes
        check_unless(translation.unless, ctx.params)
        check_unless(settings.unless, {name: ctx.params[name] for name in settings.origins if _is_set_there(ctx, name)})
        return rest

    def _show_help(self, ctx: Any, word: str) -> None:
        view = copy.copy(self)
        names = [name for f in fields(ServerArgs) for name in (f.name, f"no_{f.name}")]
        view.params, view.epilog = page(self.get_params(ctx), names, word)
        typer.echo(view.get_help(ctx), color=ctx.color)
        ctx.exit()

    def invoke(self, ctx: Any) -> Any:
        """Run the command; first log what was accepted without effect, or has another meaning here."""
        settings: Settings = ctx.meta[_SETTINGS]
        if settings.notes:
            log.configure(ctx.params["log_level"], "main", ctx.params.get("log_format", "text"))
            for note in settings.notes:
                logger.info("%s", note)
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            blamed = [
                f"{flag(name)} is set by {origin}"
                for name, origin in settings.origins.items()
                if _is_set_there(ctx, name) and re.search(rf"{flag(name)}(?![\w-])", error.message)
            ]
            if not blamed:
                raise
            raise ConfigError(f"{error.message} ({', '.join(blamed)})") from error


def _is_set_there(ctx: Any, name: str) -> bool:
    """Whether an option has its value from the environment or the file, not from the command line."""
    return bool(ctx.get_parameter_source(name).name in ("DEFAULT_MAP", "ENVIRONMENT"))


def _read_config(ctx: typer.Context, path: str | None) -> str | None:
    """Callback of --config, before the other options are read: what the environment does not set comes from the file."""
    if path is not None and not ctx.resilient_parsing:
        settings: Settings = ctx.meta[_SETTINGS]
        read = from_file(Path(path))
        ctx.default_map = read.values | settings.values
        settings.origins = read.origins | settings.origins
        settings.notes += read.notes
        settings.unless += read.unless
    return path


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            help="A .toml or .yaml file of options. The command line and the environment win over it.",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
        ),
    ],
)


def with_server_options(
    names: Collection[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: give a typer command (of class `ServerCommand`) the options of ServerArgs and hand it a ServerArgs.

    names: fields to offer; default: all, and --config. defaults: values that differ from those of ServerArgs.
    The command must have a keyword parameter `server_args`; its other parameters stay as they are.
    """
    defaults = defaults or {}
    offered = [f for f in fields(ServerArgs) if names is None or f.name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "server_args"]
        options = [p for f in offered for p in _parameters(f, defaults.get(f.name, f.default))]

        if names is None:
            own.append(_CONFIG)

        def run(**given: Any) -> None:
            if names is None:
                del given[_CONFIG.name]
            chosen: dict[str, Any] = {f.name: given.pop(f.name) for f in offered}
            chosen |= {f.name: False for f in offered if is_on(f) and given.pop(f"no_{f.name}")}
            command(**given, server_args=ServerArgs(**chosen))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
        # typer reads both: the signature for the order and the defaults, the annotations for the types.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def parse(argv: Sequence[str]) -> ServerArgs:
    """`ServerArgs` from the options of `headrace serve`, e.g. `parse(["--port", "0", "--disable-metrics"])`.

    Raises typer's usage error for an unknown option or a value of the wrong kind, ConfigError for values that cannot work.
    """
    parsed: list[ServerArgs] = []

    def collect(*, server_args: ServerArgs) -> None:
        parsed.append(server_args)

    app = typer.Typer(add_completion=False)
    app.command(cls=ServerCommand)(with_server_options()(collect))
    app(args=list(argv), standalone_mode=False)
    return parsed[0]


def _parameters(f: Field[Any], default: Any) -> list[inspect.Parameter]:
    """One option. A switch that is on by default has two flags: the one that turns it off is shown, the other is only accepted."""
    choices = choices_of(f.type)
    one_of = f" One of: {', '.join(choices)}." if choices else ""
    shown = typer.Option(
        flag(f.name),
        *ALIASES.get(f.name, ()),
        help=f.metadata["help"] + one_of,
        rich_help_panel=f.metadata["group"],
        envvar=ENV_VARS.get(f.name),
        metavar=metavar_of(f.type),
        show_default=default not in (None, "", False),
        hidden=is_on(f),
        autocompletion=names_beginning if f.name in MODEL_FIELDS else None,
    )
    parameters = [_keyword(f.name, f.type, default, shown)]
    if is_on(f):
        name, text = f"no_{f.name}", str(f.metadata["help"])
        off = typer.Option(
            flag(name),
            help=f"Do not {text[0].lower()}{text[1:]}",
            rich_help_panel=f.metadata["group"],
            metavar="",
            show_default=False,
        )
        parameters.append(_keyword(name, bool, False, off))
    return parameters


def _keyword(name: str, annotation: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def is_on(f: Field[Any]) -> bool:
    """Whether the field is a switch that is on by default."""
    return f.type is bool and f.default is True


def choices_of(annotation: Any) -> list[str]:
    return [str(choice) for choice in get_args(annotation)] if get_origin(annotation) is Literal else []


def metavar_of(annotation: Any) -> str:
    if annotation is bool:
        return ""
    if get_origin(annotation) is Literal:
        return "NAME"
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    return {str: "TEXT", int: "N", float: "X"}[kinds[0]]


def asked_page(words: Sequence[str], own: Mapping[str, bool]) -> str | None:
    """What a command line asks help for: a word, "all", "" for the first page; None if it asks for none.

    own: the command's options as typed, and whether each takes a value, which is never a request for help.
    """
    rest = iter(words)
    for word in rest:
        if word == "--":
            return None
        if word in HELP:
            return next(rest, "").lstrip("-")
        if own.get(word.replace("_", "-")):
            next(rest, None)
    return None


def page(params: Sequence[Any], server_options: Sequence[str], word: str) -> tuple[list[Any], str]:
    """The parameters of a page, and the line below it. Raises ConfigError if no option has the word.

    params: click's, of which that of --help itself is left out. server_options: names of those that come from ServerArgs.
    """
    shown = [param for param in params if not getattr(param, "hidden", False) and param.name != "help"]
    if word == ALL:
        return shown, ""
    num_options = sum(param.param_type_name == "option" for param in shown)
    below = f"`--help all` shows all {num_options} options, `--help WORD` those that a word fits, e.g. `--help cache`."
    if word == "":
        known = sorted((param for param in shown if param.name in FIRST), key=lambda param: FIRST.index(param.name))
        own = [param for param in shown if param.name not in (*FIRST, *server_options)]
        return [_without_panel(param) for param in known + own], below
    entry = find(flag(word))
    same = entry.sets if entry is not None else ()
    found = [param for param in shown if param.name in same or _fits(param, word)]
    if note := _of_other_servers(word):
        below = f"{note} {below}"
    elif not found:
        raise ConfigError(f"no option has the word {word!r:.80}; --help all shows all {num_options} options")
    return found, below


def _fits(param: Any, word: str) -> bool:
    flags = " ".join(param.opts)
    texts = (
        flags,
        flags.replace("-", "_"),
        getattr(param, "help", None) or "",
        getattr(param, "rich_help_panel", None) or "",
    )
    return any(word.lower() in text.lower() for text in texts)


def _without_panel(param: Any) -> Any:
    plain = copy.copy(param)
    plain.rich_help_panel = None
    return plain


def _of_other_servers(word: str) -> str:
    name = flag(word)
    entry = find(name)
    if entry is None:
        return ""
    if entry.refused:
        return f"{name} is not an option here: {entry.refused}."
    if entry.already:
        return f"{name} is accepted: {entry.already}."
    ours = (f"{flag(field)}{f' {value}' if value not in (None, 'true') else ''}" for field, value in entry.sets.items())
    return f"{name} is {' '.join(ours)} here{f': {entry.says}' if entry.says else ''}."
