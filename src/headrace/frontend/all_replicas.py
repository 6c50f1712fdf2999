"""Properties and counters of all replicas together (--dp-size)."""

from collections.abc import Sequence

import msgspec

from headrace.errors import ConfigError
from headrace.messages.control import InternalState, PoolState, ReadyInfo


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
    pools = [state.pool for state in states]
    totals = {
        name: sum(getattr(pool, name) for pool in pools) for name in PoolState.__struct_fields__ if name != "consistent"
    }
    pool = PoolState(**totals, consistent=all(pool.consistent for pool in pools))
    plain = {
        name: sum(getattr(state, name) for state in states)
        for name in InternalState.__struct_fields__
        if isinstance(getattr(states[0], name), int | float) and name not in ("new_token_ratio", "replica")
    }
    ratio = sum(state.new_token_ratio for state in states) / len(states)
    return msgspec.structs.replace(states[0], pool=pool, new_token_ratio=ratio, replica=0, **plain)
