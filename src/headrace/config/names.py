"""The names that clients know the model and its adapters by. Pure; any process."""

from pathlib import Path

from headrace.checkpoint.hub_cache import HubName
from headrace.config.server_options import ServerOptions
from headrace.errors import ConfigError

LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""


def served_names(given: str | None, model_path: str) -> tuple[str, ...]:
    """The names of --served-model-name, at least one; without the option the last part of the model's path. Never a path."""
    names = [name.strip() for name in (given or "").split(",")]
    if any(names):
        return tuple(dict.fromkeys(filter(None, names)))
    hub_name = HubName.parse(model_path)
    path = Path(model_path if hub_name is None else hub_name.repo)
    return (path.stem if path.suffix == ".gguf" else path.name or "model",)


def spellings(name: str) -> tuple[str, str]:
    """A model's name as given, then with or without the tag `:latest`: both mean the same."""
    return name, name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST


def lora_paths(args: ServerOptions) -> list[tuple[str, str]]:
    """(name, path) in the order given; the first is the engine's adapter number 1. Raises ConfigError."""
    found: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in args.lora_paths.split(","))):
        name, equals, path = (part.strip() for part in item.partition("="))
        if not (name and equals and path):
            raise ConfigError(f"--lora-paths takes name=path, with commas between them, got {item!r:.80}")
        if name in found:
            raise ConfigError(f"--lora-paths names {name!r:.80} twice")
        found[name] = path
    if len(found) > args.max_loras:
        raise ConfigError(f"--lora-paths names {len(found)} adapters, but --max-loras is {args.max_loras}")
    return list(found.items())
