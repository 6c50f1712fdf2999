"""What several commands take: a model, and the options of an engine."""

import dataclasses
from typing import Annotated

import typer

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


def with_model(server_args: ServerArgs, model: str | None) -> ServerArgs:
    """The options with the model of the argument. Raises ConfigError when --model-path names another one."""
    if model is None:
        return server_args
    if server_args.model_path not in (DEFAULT_MODEL, model):
        raise ConfigError(f"two models are given, {model} and --model-path {server_args.model_path}; give only one")
    return dataclasses.replace(server_args, model_path=model)
