"""What commands share: the argument that names a model, the options of an engine, and the group that they are in.

The group owns the refusal of commands that other tools have and ours has not, with a line that names ours, and the words for a value of
the wrong kind.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace.config.cli import ENGINE_FIELDS, names_beginning, with_server_options
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

ENGINE_OPTIONS = with_server_options(ENGINE_FIELDS, {"log_level": "warning"})

DEFAULT_MODEL = next(f.default for f in dataclasses.fields(ServerArgs) if f.name == "model_path")
"""What is served if no model is named."""

EMBEDDING_MODEL = "minilm"
"""What makes embeddings if no model is named."""

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Same as --model-path: a known name, org/name, a Hugging Face folder or a GGUF file.",
        autocompletion=names_beginning,
    ),
]

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
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "more than"),
    "less_than": ("lt", "less than"),
}


def with_model(server_args: ServerArgs, model: str | None) -> ServerArgs:
    """The options with the model of the argument. Raises ConfigError when --model-path names another one."""
    if model is None:
        return server_args
    if server_args.model_path not in (DEFAULT_MODEL, model):
        raise ConfigError(f"two models are given, {model} and --model-path {server_args.model_path}; give only one")
    return dataclasses.replace(server_args, model_path=model)


class CommandGroup(TyperGroup):
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
