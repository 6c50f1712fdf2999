"""The /server_info object: options, memory plan and state in one flat object, with the names that SGLang's clients expect.

Owns which options are secret and which name files. Used by /server_info and `Engine.get_server_info`.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.messages.control import InternalState, ReadyInfo
from headrace.version import VERSION

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
    engine = {name: value for name, value in msgspec.structs.asdict(ready).items() if name != "decisions"}
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


def describe_short_load(state: InternalState) -> dict[str, int]:
    """The load of a replica as SGLang's routers read it. num_reqs: running or waiting. num_tokens: in use or waiting."""
    pool = state.pool
    used = pool.total_tokens - pool.free_tokens - pool.evictable_tokens
    return {
        "dp_rank": state.replica,
        "num_reqs": state.num_running + state.num_waiting + state.num_grammar_queue,
        "num_waiting_reqs": state.num_waiting,
        "num_tokens": used + state.waiting_tokens,
    }


def describe_load(state: InternalState) -> dict[str, Any]:
    """A replica's load, for routers: requests, tokens, throughput."""
    pool = state.pool
    used = pool.total_tokens - pool.free_tokens - pool.evictable_tokens
    return {
        "dp_rank": state.replica,
        "num_running_reqs": state.num_running,
        "num_waiting_reqs": state.num_waiting,
        "num_grammar_queue_reqs": state.num_grammar_queue,
        "num_waiting_tokens": state.waiting_tokens,
        "num_used_tokens": used,
        "max_total_tokens": pool.total_tokens,
        "token_usage": used / pool.total_tokens if pool.total_tokens else 0.0,
        "cache_hit_rate": state.cached_tokens / state.prefix_query_tokens if state.prefix_query_tokens else 0.0,
        "gen_throughput": state.gen_throughput,
    }
