"""--kv-events-config: where a scheduler publishes what its prefix cache stores and evicts. The JSON is that of vLLM and SGLang."""

import importlib.util
from typing import Literal

import msgspec

from headrace.config.web import address_of
from headrace.errors import ConfigError
from headrace.plain_types import plain_reason

OPTION = "--kv-events-config"
_EXAMPLE = '{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}'


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """endpoint: tcp://ADDRESS:PORT of replica 0's events; replica r has PORT + r. replay_endpoint: the same for replays, None = none.

    topic: first frame of each message. buffer_steps: messages that are kept for replays; what came before is kept as one.
    hwm: most messages that wait for a subscriber; a slower one misses messages. max_queue_size: most that wait to be sent at all.
    """

    endpoint: str = ""
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def is_local(self) -> bool:
        hosts = [_host_and_port(text)[0] for text in (self.endpoint, self.replay_endpoint) if text]
        addresses = [address_of(host.strip("[]")) for host in hosts if host != "localhost"]
        return all(address is not None and address.is_loopback for address in addresses)


def read_kv_events(text: str | None, num_replicas: int) -> KVEventsConfig | None:
    """The value of --kv-events-config; None = events are off. Raises ConfigError."""
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{OPTION}: {plain_reason(error)}; an example: {_EXAMPLE}") from error
    if not config.is_on:
        return None
    if not config.endpoint:
        raise ConfigError(f"{OPTION} needs an endpoint, the address to listen on; an example: {_EXAMPLE}")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{OPTION}: {name} must be at least 1, got {getattr(config, name)}")
    taken: set[int] = set()
    for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
        _, port = _host_and_port(endpoint)
        if port + num_replicas - 1 > 65535:
            raise ConfigError(f"{OPTION}: each of {num_replicas} replicas needs a port, from {port} on")
        ports = set(range(port, port + num_replicas))
        if taken & ports:
            raise ConfigError(
                f"{OPTION}: replica r listens on port + r, so with {num_replicas} replicas the ports of endpoint and "
                f"replay_endpoint must be at least {num_replicas} apart"
            )
        taken |= ports
    return config


def check_pyzmq() -> None:
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError(f"{OPTION} needs pyzmq: pip install 'headrace[events]'")


def endpoint_of(endpoint: str, replica: int) -> str:
    host, port = _host_and_port(endpoint)
    return f"tcp://{host}:{port + replica}"


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{OPTION}: an endpoint must be tcp://ADDRESS:PORT, got {endpoint!r:.80}")
    return host, int(port)
