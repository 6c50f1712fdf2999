"""Methods for weights, pausing and memory, the same on `Engine` and `Runtime`.

Owns their names, defaults and results. The subclass sends an operation to the engine. Runs in the caller's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.frontend.weight_checks import (
    GROUP_NAME,
    GROUP_TIMEOUT_S,
    NOTHING_TO_PROCESS,
    TRUNCATE_SIZE,
    check_result,
    checked_group,
    checked_load_format,
    checked_tags,
    checked_tensors,
    checked_truncate_size,
    checking,
    nested_values,
    note_on_tags,
)
from headrace.messages.safetensors_bytes import safetensors_parts
from headrace.messages.weights import (
    CancelUpdate,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
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

Result = tuple[bool, str]
"""(success, message). After a failure nothing has changed."""


class WeightOperations(ABC):
    """See the module docstring. Every method raises ExecutionError if the engine is gone, and RequestError for invalid arguments."""

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
        """Update from the bytes of a safetensors file. bucketed: it contains a flattened bucket."""

    # -- generation

    def pause_generation(self, mode: PauseMode = "abort") -> Result:
        """Run no steps until `continue_generation`; new requests wait.

        abort: end every request with its output so far. retract: running requests go back to the queue and are computed again later.
        in_place: they keep their KV cache.
        """
        return _result(self._operate(PauseGeneration(mode)))

    def continue_generation(self) -> Result:
        """Continue after a pause."""
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
        """Replace all weights by those of the checkpoint at `model_path`, which must be of the same model."""
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
        """Like `update_weights_from_tensor`, with the result of `headrace.weight_sync.bucket.pack`: all tensors in one, and their places."""
        parts = safetensors_parts([("flattened_tensor", flattened_tensor)], {"metadata": metadata})
        return _result(self._update_from_tensors(parts, abort_all_requests, weight_version, bucketed=True))

    def cancel_weight_update(self) -> Result:
        """Cancel every update and join of a group that has not taken effect: those calls fail, and nothing has changed."""
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
        """Join the trainer's process group. The trainer is rank 0 and must join at the same time, or this times out."""
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
        """Replace the named weights by tensors that rank 0 broadcasts in this order; bucketed: as one uint8 tensor of all their bytes."""
        operation = UpdateFromDistributed(
            *checked_tensors(names, dtypes, shapes), group_name, bucketed, abort_all_requests, weight_version
        )
        return _result(self._operate(operation))

    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> Result:
        """Leave a group."""
        return _result(self._operate(DestroyGroup(group_name)))

    def get_weights_by_name(self, name: str, truncate_size: int = TRUNCATE_SIZE) -> list[Any]:
        """The first rows of a weight (elements of a vector) as lists. Raises RequestError for an unknown name."""
        return nested_values(self._operate(GetWeight(name, checked_truncate_size(truncate_size))))

    def check_weights(
        self,
        action: str = "checksum",
        *,
        allow_quant_error: bool = False,
        skip_tensor_list: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Check what updates have done to the weights. Returns `success`, `message` and for checksums `ranks`, as SGLang's route does.

        checksum: of every weight. snapshot: keep the checksums. compare: fails unless they are those of the snapshot. reset_tensors: random
        values, so that a comparison shows whether an update replaces everything. skip_tensor_list: leave out names that hold one of these.
        allow_quant_error: accepted without effect.
        """
        return check_result(self._operate(checking(action, skip_tensor_list)))

    def post_process_weights(
        self, *, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> Result:
        """Nothing: an update is complete when it has been installed."""
        return True, NOTHING_TO_PROCESS

    def save_sharded_state(self, path: str) -> Result:
        """Write the current weights to a new folder called `path` below --save-dir, from which they can be served again."""
        return _result(self._operate(SaveWeights(path)))

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = False) -> Result:
        """Set the version name of the weights, which replies have as `meta_info.weight_version` from now on."""
        return _result(self._operate(SetWeightVersion(new_version, abort_all_requests)))

    # -- memory

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Release the memory of "kv_cache", "weights" or both (None) to the system. Requests wait until all of it is resumed.

        "cuda_graph", as sent to other servers, is accepted without effect.
        """
        return self._on_memory(ReleaseMemory(checked_tags(tags)), tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Result:
        """Take released memory back."""
        return self._on_memory(ResumeMemory(checked_tags(tags)), tags)

    def _on_memory(self, operation: ReleaseMemory | ResumeMemory, tags: Sequence[str] | None) -> Result:
        note = note_on_tags(tags)
        if not operation.tags:
            return True, note
        success, message = _result(self._operate(operation))
        return success, f"{message}; {note}" if note else message


def _result(reply: WeightOpReply) -> Result:
    return reply.success, reply.message
