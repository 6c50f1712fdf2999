"""The user's options with their values checked, as everything else reads them.

`ServerArgs` holds the options as given; `config.resolve` combines it with the model and the device into a `Config`.
"""

from dataclasses import dataclass, fields

from headrace.config.checks import check_combinations, check_processes, check_speculation
from headrace.config.media_args import parse_media_domains
from headrace.config.names import served_names
from headrace.config.option import check_option
from headrace.config.server_options import ServerOptions
from headrace.config.web import parse_hosts, parse_origins
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs(ServerOptions):
    """Options of a server or an Engine. Raises ConfigError for what cannot be, as far as no model and no device is needed to tell."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names in the API; never a path."""
        return served_names(self.served_model_name, self.model_path)

    @property
    def served_name(self) -> str:
        """The model's name in replies and metrics."""
        return self.served_names[0]

    def __post_init__(self) -> None:
        for field_ in fields(self):
            option = "--" + field_.name.replace("_", "-")
            check_option(option, getattr(self, field_.name), field_.type, field_.metadata["bounds"])
        parse_origins(self.allow_origins)
        parse_hosts(self.allowed_hosts or "")
        parse_media_domains(self.allowed_media_domains)
        check_processes(self)
        check_speculation(self)
        for field_ in fields(self) if not self.ray else ():
            if field_.metadata["group"] == "Ray" and getattr(self, field_.name) != field_.default:
                raise ConfigError(f"--{field_.name.replace('_', '-')} needs --ray")
        check_combinations(self)
