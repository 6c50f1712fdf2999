"""What --enable-dp-attention can be combined with."""

from headrace.errors import ConfigError

_OPTION = "--enable-dp-attention"


def check_dp_attention(tp_size: int, dp_size: int, pp_size: int, lora_paths: str) -> None:
    """Raises ConfigError if the values of these options do not go with --enable-dp-attention."""
    if tp_size == 1:
        raise ConfigError(f"{_OPTION} needs --tp-size: the ranks that requests are dealt to")
    if dp_size != tp_size:
        raise ConfigError(
            f"{_OPTION}: --dp-size is the number of ranks here, not of replicas: it must be the value of --tp-size, {tp_size}, got {dp_size}"
        )
    if pp_size > 1:
        raise ConfigError(f"{_OPTION} cannot be combined with --pp-size: use --tp-size alone")
    if lora_paths:
        raise ConfigError(f"{_OPTION} cannot be combined with --lora-paths: adapters are not supported with it")
