"""How long a step of a replica takes, from what `headrace bench step` has measured.

    seconds = token_s * tokens + attended_s * attended + row_s * sampled + step_s

The form is that of the scheduler's own estimate (`scheduler/step_cost.py`); here the four are fitted once, by non-negative least squares of the
relative error over all measured shapes (coordinate descent: Wright 2015, Mathematical Programming 151), and never change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.scheduler.step_cost import StepWork

_SWEEPS = 5000


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds for each token of a step, each position that a token attends to, each row that gives a token, and each step.

    error: the mean relative error over the shapes that these were fitted to.
    """

    token_s: float
    attended_s: float
    row_s: float
    step_s: float
    error: float = 0.0

    def of(self, work: StepWork) -> float:
        """Seconds of a step."""
        tokens, attended, sampled = work
        return self.token_s * tokens + self.attended_s * attended + self.row_s * sampled + self.step_s


DEFAULT_COSTS = StepSeconds(token_s=3.904e-4, attended_s=7.192e-7, row_s=2.155e-4, step_s=6.579e-3, error=0.0655)
"""SmolLM2-135M in bfloat16 on 2 cores of an AMD EPYC (Zen 4): bench/results/2026-11-23-step-fleet.json."""


def read_costs(path: Path) -> StepSeconds:
    """Fit the results of `headrace bench step --output`. Of each shape the best time counts, which other processes disturbed least.

    Raises ConfigError for another file, or one with too few shapes.
    """
    try:
        found = json.loads(path.read_bytes())
        if found["kind"] != "step":
            raise ConfigError(f"{path} is of `bench {found['kind']}`; step costs come from `headrace bench step`")
        return fit([(_work(shape), shape["total"]["best_s"]) for shape in found["results"]])
    except OSError as error:
        raise ConfigError(f"cannot read the step costs in {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of `headrace bench step --output`") from error


def fit(measured: Sequence[tuple[StepWork, float]]) -> StepSeconds:
    """The costs that come closest to the measured steps (what they computed, their seconds). Raises ConfigError for fewer than four."""
    if len(measured) < 4 or any(seconds <= 0 for _, seconds in measured):
        raise ConfigError(
            f"step costs need at least four measured shapes, got {len(measured)}: "
            "headrace bench step --batch 1,8,32 --context 128,1024 --prefill 128,512 --output FILE"
        )
    features = np.array([(*work, 1.0) for work, _ in measured])
    relative = features / np.array([seconds for _, seconds in measured])[:, None]
    moments, targets = relative.T @ relative, relative.sum(axis=0)
    cost = np.zeros(4)
    for _ in range(_SWEEPS):
        for i in range(4):
            if moments[i, i] > 0:
                cost[i] = max(0.0, cost[i] - (moments[i] @ cost - targets[i]) / moments[i, i])
    error = float(np.abs(relative @ cost - 1).mean())
    token_s, attended_s, row_s, step_s = (float(value) for value in cost)
    return StepSeconds(token_s, attended_s, row_s, step_s, error)


def _work(shape: dict[str, Any]) -> StepWork:
    batch, new_tokens = shape["batch"], shape["new_tokens"]
    return StepWork(batch * new_tokens, batch * new_tokens * (shape["context"] + 0.5 * new_tokens), batch)
