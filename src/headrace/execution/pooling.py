"""Requests that ask for a vector: the steps of an encoder, and what a decoder or an encoder makes of hidden states.

The tokens of a text in an encoder all see each other, so a text is computed whole, in the step in which it enters, and nothing of it is kept: there
is neither a KV cache nor a table of sequences. The scheduler's slots stand for no memory. Used by one thread: the worker's.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch

from headrace.attention.base import AttentionBackend
from headrace.errors import ModelError
from headrace.execution.profiler import StepClock
from headrace.garbage import give_back_free_memory
from headrace.layers.pooler import Pooler
from headrace.messages.requests import PoolTask
from headrace.messages.step import ModelWorkerBatch, NewSequence, StepResult, one_id_a_row
from headrace.models.spec import EncoderModel

NOT_FINITE = "the model gave numbers that are not finite (NaN or infinity)"


def pooled_results(
    rows: Sequence[int], tasks: Sequence[PoolTask], values: torch.Tensor
) -> tuple[dict[int, bytes], dict[int, str]]:
    """`StepResult.pooled` and `errors` of some rows of a plan. values: [len(rows), n], what the model's pooler made of them."""
    values = values.float().cpu()
    finite = torch.isfinite(values).all(1).tolist()
    pooled: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    for row, task, vector, is_finite in zip(rows, tasks, values, finite, strict=True):
        if not is_finite:
            errors[row] = NOT_FINITE
            continue
        if task.dimensions:
            # A Matryoshka embedding (Kusupati et al., 2022) is an embedding at any of its lengths, once it is normalised.
            vector = torch.nn.functional.normalize(vector[: task.dimensions], dim=0)
        pooled[row] = vector.numpy().tobytes()
    return pooled, errors


class PooledRows:
    """Sequences of a decoder that become vectors. A prompt may be computed in several steps: what its pooling needs of them is kept until the last,
    which is one row of hidden states. The mean is a sum in float64, token by token, so its bits do not depend on how the prompt was cut."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self._kept: dict[int, torch.Tensor] = {}
        self._complete: list[tuple[int, NewSequence]] = []

    def add(self, new: NewSequence) -> None:
        """A sequence enters, or enters again: it is computed from the beginning, or from the end of a cached prefix that is not needed."""
        self._kept.pop(new.seq, None)

    def leave(self, seq: int) -> None:
        self._kept.pop(seq, None)

    def take(self, row: int, new: NewSequence, hidden: torch.Tensor, num_computed: int) -> None:
        """A step has computed its first `num_computed` tokens; hidden [num_read, hidden_size], of those among them that are read."""
        if len(hidden):
            self._kept[new.seq] = self._joined(self._kept.get(new.seq), hidden)
        if num_computed == new.num_prompt_tokens:
            self._complete.append((row, new))

    def results(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """`StepResult.pooled` and `errors` of the rows whose prompt is complete since the last call."""
        complete, self._complete = self._complete, []
        if not complete:
            return {}, {}
        rows = [self._kept.pop(new.seq) for _, new in complete]
        if self._pooler.config.pooling == "mean":
            rows = [(total / new.num_prompt_tokens).float() for total, (_, new) in zip(rows, complete, strict=True)]
        # Of one token each, whatever the pooling.
        values = self._pooler(torch.stack(rows), list(range(len(rows) + 1)))
        tasks = [task for _, new in complete if isinstance(task := new.task, PoolTask)]
        return pooled_results([row for row, _ in complete], tasks, values)

    def _joined(self, before: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        """What is kept of the tokens so far, [hidden_size], and of `hidden`. A copy: the memory of a step's hidden states is used again."""
        match self._pooler.config.pooling:
            case "cls":
                return hidden[0].clone() if before is None else before
            case "last":
                return hidden[-1].clone()
            case "mean":
                rows = hidden.double().cpu().numpy()
                if before is not None:
                    rows = np.concatenate([before.numpy()[None], rows])
                # NumPy adds whole rows up one after the other along the first axis.
                return torch.from_numpy(np.add.reduce(rows, axis=0))


class NoAdapters:
    """The `Adapters` of a model that takes none."""

    def __contains__(self, lora_id: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
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
        self._clock = StepClock()
        self._has_run = False

    @torch.inference_mode()
    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
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
        ids, id_starts = one_id_a_row([-1] * len(rows))
        return StepResult(plan.step, ids, id_starts, errors=errors, pooled=pooled, forward_s=self._clock.took(begun_s))

    def idle(self, left: Iterable[int]) -> None:
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
