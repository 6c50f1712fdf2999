"""Properties and counters of all replicas together (--dp-size)."""

from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from headrace.errors import ConfigError
from headrace.messages.control import InternalState, ReadyInfo

_Counts = TypeVar("_Counts", bound=msgspec.Struct)


def of_all_replicas(infos: Sequence[ReadyInfo]) -> ReadyInfo:
    """The properties of all replicas together: a prompt must fit into each, and all of them run requests.

    Raises ConfigError if they differ.
    """
    first = infos[0]
    if len({info.device for info in infos}) > 1:
        raise ConfigError("--dp-size: there are fewer GPUs than replicas; use --device cpu, or fewer replicas")
    if len({(info.fingerprint, info.lora_fingerprints) for info in infos}) > 1:
        raise ConfigError(
            "the checkpoint or an adapter changed while the replicas read it, so they would differ; start again"
        )
    if len({info.kv_cache_dtype for info in infos}) > 1:
        raise ConfigError(
            f"the replicas measured differently what {first.kv_cache_dtype} costs the model; name one by --kv-cache-dtype"
        )
    return msgspec.structs.replace(
        first,
        max_total_tokens=min(info.max_total_tokens for info in infos),
        context_length=min(info.context_length for info in infos),
        max_running_requests=sum(info.max_running_requests for info in infos),
        weight_bytes=sum(info.weight_bytes for info in infos),
        kv_bytes=sum(info.kv_bytes for info in infos),
        load_s=max(info.load_s for info in infos),
    )


def sum_of_states(states: Sequence[InternalState]) -> InternalState:
    """Counters and gauges of all replicas together; `new_token_ratio` is the mean. What was asked of all is as the first one has it."""
    if len(states) == 1:
        return states[0]
    return msgspec.structs.replace(
        _sum(states, ("new_token_ratio", "replica")),
        pool=msgspec.structs.replace(
            _sum([state.pool for state in states], ("consistent",)),
            consistent=all(state.pool.consistent for state in states),
        ),
        grammars=_sum([state.grammars for state in states]),
        encodings=_sum([state.encodings for state in states]),
        speculation=_sum([state.speculation for state in states]),
        new_token_ratio=sum(state.new_token_ratio for state in states) / len(states),
        replica=0,
    )


def _sum(parts: Sequence[_Counts], but: Collection[str] = ()) -> _Counts:
    """The first, with the sums of all numbers but those."""
    first = parts[0]
    names = [
        name for name in first.__struct_fields__ if isinstance(getattr(first, name), int | float) and name not in but
    ]
    return msgspec.structs.replace(first, **{name: sum(getattr(part, name) for part in parts) for name in names})
