"""Perplexity of a model on a text. Runs in the calling process, on a model that serves nothing else."""

import math
from collections.abc import Sequence

import torch

from headrace.attention.base import AttentionBackend, StepRows
from headrace.attention.select import make_backend
from headrace.checkpoint.model_config import ModelConfig
from headrace.models.spec import CausalLM, kv_shape

PAGE = 16
"""Tokens of a page of the KV cache of a window."""


def window_rows(num_tokens: int) -> StepRows:
    """The step of one sequence from its first position, in the slots 0, 1, ... of its own KV cache, on CPU."""
    positions = torch.arange(num_tokens, dtype=torch.int32)
    return StepRows(
        starts=[0],
        counts=[num_tokens],
        positions=positions,
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        row_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        out_slots=positions,
        slots=positions.unsqueeze(0),
    )


class WindowRunner:
    """Runs a model over windows of at most `window` tokens, each from its first position, on CPU."""

    def __init__(
        self, model: CausalLM, config: ModelConfig, backend: str, window: int, kv_dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        self._attention: AttentionBackend = make_backend(backend)
        num_slots = -(-window // PAGE) * PAGE
        self._attention.make_kv_pool(kv_shape(config, kv_dtype), num_slots, PAGE, torch.device("cpu"))

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The hidden states of all positions, [len(tokens), hidden_size]."""
        rows = window_rows(len(tokens))
        self._attention.prepare(rows)
        return self._model.forward(self._model.embed(torch.tensor(tokens)), rows.positions, self._attention)

    @torch.inference_mode()
    def negative_log_likelihoods(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32[len(tokens) - 1]: of each token after the first, in nats."""
        logits = self._model.logits(self.hidden(tokens))
        return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def perplexity(runner: WindowRunner, windows: Sequence[Sequence[int]]) -> float:
    """e^(mean negative log likelihood) over all tokens except the first of each window. windows: at least two tokens each."""
    losses = torch.cat([runner.negative_log_likelihoods(window) for window in windows])
    return math.exp(float(losses.double().mean()))
