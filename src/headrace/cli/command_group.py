"""The group of all commands.

Owns the refusal of commands that other tools have and ours has not, with a line that names ours, and the words for a value of the wrong kind.
"""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.errors import ConfigError

OTHER_COMMANDS = {
    "show": "`headrace models` lists what is at hand; /model_info of a running server tells about its model",
    "rm": "`headrace models` says where each model is; delete its folder there (`headrace cache clear` deletes packed weights)",
    "stop": "Ctrl-C, or `kill PID`, ends a server, which first lets its requests end; `headrace ps` lists them",
    "create": "a model is served as it is: `headrace serve FOLDER`, or with --lora-paths, --chat-template",
    "cp": "`headrace serve --served-model-name NAME` gives a model another name",
    "push": "models are downloaded only: `headrace pull`",
    "signin": "HF_TOKEN gives `headrace pull` a token",
    "login": "HF_TOKEN gives `headrace pull` a token",
    "start": "`headrace serve` starts a server",
    "complete": "`headrace generate` continues a text",
    "run-batch": "examples/batch.py generates from a file",
    "collect-env": "`headrace doctor` shows the machine",
}
"""Commands of Ollama and vLLM that are not ours, and what to use."""


class CommandGroup(TyperGroup):
    """See the module docstring."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises ConfigError for a command of `OTHER_COMMANDS`."""
        if args and args[0] in OTHER_COMMANDS:
            raise ConfigError(f"there is no command {args[0]}: {OTHER_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what typer's library says of a value is said in our words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            if isinstance(error.__cause__, ValidationError):
                error.message = "; ".join(wrong_value(found) for found in error.__cause__.errors(include_url=False))
            raise


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "more than"),
    "less_than": ("lt", "less than"),
}


def wrong_value(found: Mapping[str, Any]) -> str:
    """One of the errors that pydantic describes: "it must be a whole number, got 'abc'"."""
    kind, _, _ = found["type"].partition("_")
    if found["type"] in _BOUNDS:
        key, words = _BOUNDS[found["type"]]
        must = f"it must be {words} {found['ctx'][key]}"
    elif kind in _KINDS:
        must = f"it must be {_KINDS[kind]}"
    else:
        return str(found["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be")
    return f"{must}, got {found['input']!r:.80}"
