"""The adapters that --lora-paths names. Pure; the front end and the process that computes read the same list."""

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError


def lora_paths(args: ServerArgs) -> list[tuple[str, str]]:
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
