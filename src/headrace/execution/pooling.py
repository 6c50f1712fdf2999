"""From hidden states to the results of requests that ask for a vector. Used by the thread that runs the steps."""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.layers.pooler import Pooler
from headrace.messages.requests import PoolTask
from headrace.messages.step import NewSequence

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
        """The sequence is in no later step."""
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
