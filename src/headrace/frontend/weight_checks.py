"""Defaults and checks of operations on weights and memory, shared by the Python methods and the HTTP routes.

Pure functions; run in the caller's thread.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.messages.weights import (
    FOREIGN_TAGS,
    MEMORY_TAGS,
    CheckWeights,
    InitGroup,
    MemoryTag,
    UpdateFromTensors,
    WeightOperation,
    WeightOpReply,
)

GROUP_NAME = "weight_update_group"
GROUP_TIMEOUT_S = 300.0
TRUNCATE_SIZE = 100


def checked_load_format(load_format: str | None) -> Any:
    if load_format in (None, "auto", "safetensors", "gguf"):
        return load_format or "auto"
    raise RequestError(f"load_format {load_format!r} is not supported; known: auto, safetensors, gguf", "load_format")


def checked_group(
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
    *,
    timeout_s: float,
) -> InitGroup:
    if not 1 <= rank_offset < world_size:
        raise RequestError(
            f"rank_offset must be between 1 and world_size - 1 (the trainer is rank 0), got {rank_offset} of {world_size}",
            "rank_offset",
        )
    if not 1 <= master_port <= 65535:
        raise RequestError(f"master_port must be between 1 and 65535, got {master_port}", "master_port")
    if not 0 < timeout_s <= 24 * 3600:
        raise RequestError(f"timeout_s must be more than 0 and at most a day, got {timeout_s:g}", "timeout_s")
    if not group_name:
        raise RequestError("group_name is empty", "group_name")
    match backend:
        case "gloo" | "nccl":
            return InitGroup(master_address, master_port, rank_offset, world_size, group_name, backend, timeout_s)
    raise RequestError(f"backend {backend!r} is not supported; known: gloo, nccl", "backend")


def checked_tensors(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Raises RequestError unless the lists have the same length and valid shapes."""
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"names, dtypes and shapes must be non-empty lists of the same length; got {len(names)}, {len(dtypes)} and {len(shapes)}",
            "names",
        )
    if any(size < 0 for shape in shapes for size in shape):
        raise RequestError("shapes: a dimension is negative", "shapes")
    plain = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return tuple(names), plain, tuple(tuple(shape) for shape in shapes)


def checked_tags(tags: Sequence[str] | None) -> tuple[MemoryTag, ...]:
    """The tags of memory that this server has. None or an empty list: all of them. Raises RequestError for an unknown tag."""
    wanted = tags or MEMORY_TAGS
    unknown = [tag for tag in wanted if tag not in (*MEMORY_TAGS, *FOREIGN_TAGS)]
    if unknown:
        raise RequestError(
            f"tags: must be among {', '.join((*MEMORY_TAGS, *FOREIGN_TAGS))}, got {', '.join(unknown)[:200]}", "tags"
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in wanted)


def note_on_tags(tags: Sequence[str] | None) -> str:
    """A note for the reply about tags without effect."""
    foreign = ", ".join(tag for tag in FOREIGN_TAGS if tag in (tags or ()))
    return f"{foreign}: this server has no memory of that name, so nothing was done for it" if foreign else ""


NOTHING_TO_PROCESS = "nothing to do: weights are quantised and packed when an update is installed"


def checking(action: str, skipped: Sequence[str] | None) -> WeightOperation:
    """What carries out an action of SGLang's weight checker. Raises RequestError for an unknown one."""
    parts = tuple(skipped or ())
    match action:
        case "checksum" | "snapshot" | "compare":
            return CheckWeights(action, parts)
        case "reset_tensors":
            return UpdateFromTensors("", random_but=parts)
    raise RequestError(f"action must be checksum, snapshot, compare or reset_tensors, got {action[:50]!r}", "action")


def check_result(reply: WeightOpReply) -> dict[str, Any]:
    """The reply of a check in SGLang's form. The weights are whole, however many ranks there are, so they are those of one."""
    result: dict[str, Any] = {"success": reply.success, "message": reply.message}
    if reply.values:
        checksums: dict[str, str] = json.loads(reply.values)
        total = hashlib.sha256("".join(f"{name}{checksums[name]}" for name in sorted(checksums)).encode()).hexdigest()
        one = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
        ranks = [{"checksums": checksums, "per_gpu_checksum": total, "parallelism_info": one}]
        result |= {"ranks": ranks, "per_engine_checksum": total}
    return result


def nested_values(reply: WeightOpReply) -> list[Any]:
    """The values of a `GetWeight` reply as nested lists. Raises RequestError if it failed."""
    if not reply.success:
        raise RequestError(reply.message, "name")
    # A memoryview cannot be empty and have two dimensions.
    return memoryview(reply.values).cast("f", reply.shape).tolist() if reply.values else []
