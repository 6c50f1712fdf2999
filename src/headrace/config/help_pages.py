"""Which options `--help`, `--help all` and `--help WORD` show of a command that has more of them than a screen has lines.

Owns the choice of the first page and the search for a word. How a page looks is typer's. Pure functions; main process.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.other_servers import Alias, Already, find
from headrace.errors import ConfigError

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
    entry = find("--" + word.replace("_", "-"))
    same = entry.sets if isinstance(entry, Alias) else ()
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
    """What an option of SGLang or vLLM is called here."""
    name = "--" + word.replace("_", "-")
    match find(name):
        case Alias() as entry:
            ours = (
                f"--{field.replace('_', '-')}{f' {value}' if value not in (None, 'true') else ''}"
                for field, value in entry.sets.items()
            )
            return f"{name} is {' '.join(ours)} here{f': {entry.says}' if entry.says else ''}."
        case Already() as entry:
            return f"{name} is accepted: {entry.says}."
        case None:
            return ""
        case entry:
            return f"{name} is not an option here: {entry.says}."
