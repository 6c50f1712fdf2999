"""Runs the steps of an encoder: texts in, one vector each out.

The tokens of a text all see each other, so a text is computed whole, in the step in which it enters, and nothing of it is kept: there is
neither a KV cache nor a table of sequences. The scheduler's slots stand for no memory. Used by one thread: the worker's.
"""

import time
from collections.abc import Callable, Iterable
from itertools import accumulate

import numpy as np
import torch

from headrace.attention.base import AttentionBackend
from headrace.errors import ModelError
from headrace.execution.pooling import pooled_results
from headrace.garbage import give_back_free_memory
from headrace.messages.requests import PoolTask
from headrace.messages.step import ModelWorkerBatch, NewSequence, StepResult, one_id_a_row
from headrace.models.spec import EncoderModel


class NoAdapters:
    """The `Adapters` of a model that takes none."""

    def __contains__(self, lora_id: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
        """Raises ModelError."""
        raise ModelError("encoders take no LoRA adapters")

    def unload(self, lora_id: int) -> None:
        """There is none."""


class EmbeddingRunner:
    """See the module docstring. device: of the model."""

    def __init__(self, model: EncoderModel, attention: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self._attention = attention
        self.adapters = NoAdapters()
        self._device = device
        self._finished_s = 0.0
        self._has_run = False

    @torch.inference_mode()
    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
        """Run one step; see `ModelRunner.run`."""
        begun_s = time.perf_counter()
        entered = {new.seq: new for new in plan.new}
        rows = [entered[seq] for seq in plan.seqs.tolist()]
        token_ids, positions, token_types, row_starts = _inputs(rows)
        place = self._device
        on_layers()
        hidden = self.model.forward(
            token_ids.to(place),
            positions.to(place),
            None if token_types is None else token_types.to(place),
            row_starts,
            self._attention,
        )
        values = self.model.pooler(hidden, row_starts.tolist())
        tasks = [task for new in rows if isinstance(task := new.task, PoolTask)]
        pooled, errors = pooled_results(range(len(rows)), tasks, values)
        self._has_run = True
        # Time that the step before was still running is that step's.
        since_s, self._finished_s = max(begun_s, self._finished_s), time.perf_counter()
        ids, id_starts = one_id_a_row([-1] * len(rows))
        return StepResult(plan.step, ids, id_starts, errors=errors, pooled=pooled, forward_s=self._finished_s - since_s)

    def idle(self, left: Iterable[int]) -> None:
        """See `Worker.idle`."""
        if self._has_run:
            self._has_run = False
            give_back_free_memory()


def _inputs(rows: list[NewSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The arguments of `EncoderModel.forward`, on the CPU, for texts one after the other."""
    lengths = [len(new.token_ids) for new in rows]
    token_ids = torch.from_numpy(np.concatenate([new.token_ids for new in rows]).astype(np.int64))
    positions = torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]))
    token_types = None
    if any(new.content.token_types for new in rows):
        types = [new.content.token_types or bytes(length) for new, length in zip(rows, lengths, strict=True)]
        token_types = torch.from_numpy(np.frombuffer(b"".join(types), np.uint8).astype(np.int32))
    row_starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return token_ids, positions, token_types, row_starts
