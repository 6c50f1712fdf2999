"""What is told of the engine: the /server_info object and loads, with the names that SGLang's clients expect; the sums over replicas.

Owns which options are secret and which name files.
"""

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.messages.control import InternalState, ReadyInfo
from headrace.version import VERSION

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
        tier=_sum([state.tier for state in states]),
        transfer=_sum([state.transfer for state in states]),
        pins=_sum([state.pins for state in states]),
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


SECRETS = frozenset({"api_key", "admin_api_key", "otlp_traces_endpoint", "dist_init_addr"})
MASK = "***"
_NAMED_INSTEAD = frozenset({"lora_paths"})
_NOT_PATHS = frozenset({"served_model_name", "json_model_override_args", "allow_origins", "kv_events_config"})
_GIB = float(1 << 30)


def describe_server(
    args: ServerArgs, ready: ReadyInfo, lora_adapters: Sequence[str], states: Sequence[InternalState]
) -> dict[str, Any]:
    """Options and resolved settings; if both have the same name, the resolved value is given.

    Secrets are masked, and files are named without their folders. Counts of tokens and requests are those of one replica.
    """
    options = {field.name: _shown(field.name, getattr(args, field.name)) for field in dataclasses.fields(args)}
    engine = {name: value for name, value in msgspec.to_builtins(ready).items() if name != "decisions"}
    return {
        "version": VERSION,
        **{name: value for name, value in options.items() if name not in _NAMED_INSTEAD},
        **engine,
        "served_model_name": args.served_name,
        "lora_adapters": list(lora_adapters),
        "pp_size": 1,
        "max_total_num_tokens": ready.max_total_tokens,
        "internal_states": [_state(state, ready) for state in states],
    }


def model_name_of(path: str) -> str:
    """The last part of a model's path. The folder is not shown to clients."""
    return PurePath(path).name if os.sep in path else path


def _state(state: InternalState, ready: ReadyInfo) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(state),
        "last_gen_throughput": state.gen_throughput,
        "effective_max_running_requests_per_dp": ready.max_running_requests,
        "memory_usage": {
            "weight": round(ready.weight_bytes / _GIB, 3),
            "kvcache": round(ready.kv_bytes / _GIB, 3),
            "token_capacity": ready.max_total_tokens,
        },
    }


def _shown(name: str, value: Any) -> Any:
    if value is None or not isinstance(value, str):
        return value
    if name in SECRETS:
        return MASK
    return value if name in _NOT_PATHS else model_name_of(value)


def _used_tokens(state: InternalState) -> int:
    return state.pool.total_tokens - state.pool.free_tokens - state.pool.evictable_tokens


def describe_short_load(state: InternalState) -> dict[str, int]:
    """The load of a replica as SGLang's routers read it. num_reqs: running or waiting. num_tokens: in use or waiting."""
    return {
        "dp_rank": state.replica,
        "num_reqs": state.num_running + state.num_waiting + state.num_grammar_queue,
        "num_waiting_reqs": state.num_waiting,
        "num_tokens": _used_tokens(state) + state.waiting_tokens,
    }


def describe_load(state: InternalState) -> dict[str, Any]:
    total, used = state.pool.total_tokens, _used_tokens(state)
    return {
        "dp_rank": state.replica,
        "num_running_reqs": state.num_running,
        "num_waiting_reqs": state.num_waiting,
        "num_grammar_queue_reqs": state.num_grammar_queue,
        "num_waiting_tokens": state.waiting_tokens,
        "num_used_tokens": used,
        "max_total_tokens": total,
        "token_usage": used / total if total else 0.0,
        "cache_hit_rate": state.cached_tokens / state.prefix_query_tokens if state.prefix_query_tokens else 0.0,
        "gen_throughput": state.gen_throughput,
    }
