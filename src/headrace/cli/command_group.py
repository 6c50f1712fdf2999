"""The group of all commands: one that other tools have and ours has not is refused with a line that names ours."""

from typing import Any

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
