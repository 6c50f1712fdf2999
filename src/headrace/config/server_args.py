"""The user's options with their values checked, as everything else reads them, and the names that clients know the model and its adapters by.

`ServerArgs` holds the options as given; `config.resolve` combines it with the model and the device into a `Config`.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from headrace.checkpoint.files import without_part
from headrace.checkpoint.hub_cache import HubName
from headrace.config.checks import check_combinations, check_value
from headrace.config.server_options import ServerOptions, flag
from headrace.config.web import parse_hosts, parse_media_domains, parse_origins, parse_prefill_hosts, parse_proxies
from headrace.errors import ConfigError

LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs(ServerOptions):
    """Options of a server or an Engine. Raises ConfigError for what cannot be, as far as no model and no device is needed to tell."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_value(flag(field.name), getattr(self, field.name), field.type, field.metadata["bounds"])
        parse_origins(self.allow_origins)
        parse_hosts(self.allowed_hosts or "")
        parse_media_domains(self.allowed_media_domains)
        parse_prefill_hosts(self.disaggregation_prefill_hosts)
        parse_proxies(self.trusted_proxies)
        check_combinations(self)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API, at least one; without --served-model-name the last part of the model's path. Never a path."""
        names = [name.strip() for name in (self.served_model_name or "").split(",")]
        if any(names):
            return tuple(dict.fromkeys(filter(None, names)))
        hub_name = HubName.parse(self.model_path)
        path = Path(self.model_path if hub_name is None else hub_name.repo)
        return (without_part(path.stem) if path.suffix == ".gguf" else path.name or "model",)

    @property
    def tokenizer_name(self) -> str:
        """The name or path of --tokenizer-path, or of the model."""
        return self.tokenizer_path or self.model_path

    @property
    def names_mmproj(self) -> bool:
        """Whether --mmproj is a file."""
        return self.mmproj not in ("auto", "none")

    @property
    def served_name(self) -> str:
        return self.served_names[0]


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
