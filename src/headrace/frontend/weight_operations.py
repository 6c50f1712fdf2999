"""The methods by which a program steers weights, generation and memory: the same on an `Engine` and on a `Runtime`.

Owns their names, defaults and what they return. How an operation reaches the engine is the subclass's. Runs in the caller's thread.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.messages.safetensors_bytes import safetensors_parts
from headrace.messages.weights import (
    FOREIGN_TAGS,
    MEMORY_TAGS,
    CancelUpdate,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    InitGroup,
    MemoryTag,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    WeightOperation,
    WeightOpReply,
)

GROUP_NAME = "weight_update_group"
GROUP_TIMEOUT_S = 300.0
TRUNCATE_SIZE = 100

Result = tuple[bool, str]
"""(success, message). After a failure nothing has changed."""


class WeightOperations(ABC):
    """See the module's text. Every method raises ExecutionError when the engine is gone and RequestError for what makes no sense."""

    @abstractmethod
    def _operate(self, operation: WeightOperation) -> WeightOpReply:
        """Carry out one operation."""

    @abstractmethod
    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        """Update from the bytes of a safetensors file. bucketed: it holds a flattened bucket."""

    # -- generation

    def pause_generation(self, mode: PauseMode = "abort") -> Result:
        """Plan no more steps until `continue_generation`; new requests wait.

        abort: every request ends with what it has. retract: running requests go back to the queue and will be computed again.
        in_place: they stay where they are.
        """
        return _result(self._operate(PauseGeneration(mode)))

    def continue_generation(self) -> Result:
        """Go on."""
        return _result(self._operate(ContinueGeneration()))

    # -- weights

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Serve the checkpoint at `model_path` instead. It must be of the same model: only its weights are taken."""
        operation = UpdateFromDisk(model_path, checked_load_format(load_format), abort_all_requests, weight_version)
        return _result(self._operate(operation))

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]],
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Replace the named weights, all or some, by these tensors (torch or numpy). Names and shapes are Hugging Face's."""
        parts = safetensors_parts(named_tensors)
        return _result(self._update_from_tensors(parts, abort_all_requests, weight_version))

    def update_weights_from_bucket(
        self,
        flattened_tensor: Any,
        metadata: str,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """As `update_weights_from_tensor`, of what `headrace.weight_sync.bucket.pack` gives: all tensors as one, and what is where in it."""
        parts = safetensors_parts([("flattened_tensor", flattened_tensor)], {"metadata": metadata})
        return _result(self._update_from_tensors(parts, abort_all_requests, weight_version, bucketed=True))

    def cancel_weight_update(self) -> Result:
        """Give up every update, and every joining of a group, that has not taken effect: those calls fail, and nothing has changed."""
        return _result(self._operate(CancelUpdate()))

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP_NAME,
        backend: str = "gloo",
        *,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> Result:
        """Join the trainer's process group. The trainer is rank 0; it joins at the same time, or this times out."""
        return _result(
            self._operate(
                checked_group(
                    master_address, master_port, rank_offset, world_size, group_name, backend, timeout_s=timeout_s
                )
            )
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP_NAME,
        *,
        bucketed: bool = False,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
    ) -> Result:
        """Replace the named weights by what rank 0 broadcasts, in this order; bucketed: as one uint8 tensor of all their bytes."""
        operation = UpdateFromDistributed(
            *checked_tensors(names, dtypes, shapes), group_name, bucketed, abort_all_requests, weight_version
        )
        return _result(self._operate(operation))

    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> Result:
        """Leave a group."""
        return _result(self._operate(DestroyGroup(group_name)))

    def get_weights_by_name(self, name: str, truncate_size: int = TRUNCATE_SIZE) -> list[Any]:
        """The first rows of a weight (elements of a vector) as lists. Raises RequestError when there is none of that name."""
        return nested_values(self._operate(GetWeight(name, checked_truncate_size(truncate_size))))

    def save_sharded_state(self, path: str) -> Result:
        """Write the weights as they serve to a new folder called `path` below --save-dir, from which they can be served again."""
        return _result(self._operate(SaveWeights(path)))

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = False) -> Result:
        """Name the weights that are served; `meta_info.weight_version` of what ends from now on."""
        return _result(self._operate(SetWeightVersion(new_version, abort_all_requests)))

    # -- memory

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Give the memory of "kv_cache", "weights" or both (None) back to the system. Requests wait until all is resumed.

        "cuda_graph", which other servers release too, is accepted, and nothing is done for it.
        """
        return self._on_memory(ReleaseMemory(checked_tags(tags)), tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Take it again."""
        return self._on_memory(ResumeMemory(checked_tags(tags)), tags)

    def _on_memory(self, operation: ReleaseMemory | ResumeMemory, tags: Sequence[str] | None) -> Result:
        note = note_on_tags(tags)
        if not operation.tags:
            return True, note
        success, message = _result(self._operate(operation))
        return success, f"{message}; {note}" if note else message


# -- checks that every way in shares


def checked_load_format(load_format: str | None) -> Any:
    """Raises RequestError for a format that is not known."""
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
    """Raises RequestError for numbers that make no group."""
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
    if backend == "gloo":
        return InitGroup(master_address, master_port, rank_offset, world_size, group_name, "gloo", timeout_s)
    if backend == "nccl":
        return InitGroup(master_address, master_port, rank_offset, world_size, group_name, "nccl", timeout_s)
    raise RequestError(f"backend {backend!r} is not supported; known: gloo, nccl", "backend")


def checked_tensors(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Raises RequestError unless the lists fit together."""
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"names, dtypes and shapes must be lists of one length, not empty; got {len(names)}, {len(dtypes)} and {len(shapes)}",
            "names",
        )
    if any(size < 0 for shape in shapes for size in shape):
        raise RequestError("shapes: a dimension is negative", "shapes")
    plain = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return tuple(names), plain, tuple(tuple(shape) for shape in shapes)


def checked_truncate_size(truncate_size: int) -> int:
    """Raises RequestError for a negative number."""
    if truncate_size < 0:
        raise RequestError(f"truncate_size must be at least 0, got {truncate_size}", "truncate_size")
    return truncate_size


def checked_tags(tags: Sequence[str] | None) -> tuple[MemoryTag, ...]:
    """Those that name memory of this server. None or an empty list: all of them. Raises RequestError for a tag that is not known."""
    wanted = tags or MEMORY_TAGS
    unknown = [tag for tag in wanted if tag not in (*MEMORY_TAGS, *FOREIGN_TAGS)]
    if unknown:
        raise RequestError(
            f"tags: known are {', '.join((*MEMORY_TAGS, *FOREIGN_TAGS))}, got {', '.join(unknown)[:200]}", "tags"
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in wanted)


def note_on_tags(tags: Sequence[str] | None) -> str:
    """What the answer says of tags for which nothing is done."""
    foreign = [tag for tag in FOREIGN_TAGS if tag in (tags or ())]
    return (
        f"{', '.join(foreign)}: this server has no memory of that name, so nothing was done for it" if foreign else ""
    )


def nested_values(reply: WeightOpReply) -> list[Any]:
    """The values of a `GetWeight` reply, as deep as the weight. Raises RequestError when it failed."""
    if not reply.success:
        raise RequestError(reply.message, "name")
    values = [value for (value,) in struct.iter_unpack("<f", reply.values)]
    return _nested(iter(values), reply.shape)


def _nested(values: Iterator[float], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return [next(values) for _ in range(shape[0])]
    return [_nested(values, shape[1:]) for _ in range(shape[0])]


def _result(reply: WeightOpReply) -> Result:
    return reply.success, reply.message
