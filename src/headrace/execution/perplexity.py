"""Perplexity of a model on a text. Runs in the calling process, on a model that serves nothing else."""

import math
from collections.abc import Sequence

import torch

from headrace.attention.base import AttentionBackend, StepRows
from headrace.attention.select import make_backend
from headrace.checkpoint.model_config import ModelConfig
from headrace.models.spec import CausalLM, kv_shape

_PAGE = 16


class WindowRunner:
    """Runs a model over windows of at most `window` tokens, each from its first position, on CPU."""

    def __init__(
        self, model: CausalLM, config: ModelConfig, backend: str, window: int, kv_dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        self._attention: AttentionBackend = make_backend(backend)
        num_slots = -(-window // _PAGE) * _PAGE
        self._attention.make_kv_pool(kv_shape(config, kv_dtype), num_slots, _PAGE, torch.device("cpu"))

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The hidden states of all positions, [len(tokens), hidden_size]."""
        num = len(tokens)
        positions = torch.arange(num, dtype=torch.int32)
        step = StepRows(
            starts=[0],
            counts=[num],
            positions=positions,
            seq_lens=torch.tensor([num], dtype=torch.int32),
            row_starts=torch.tensor([0, num], dtype=torch.int32),
            out_slots=positions,
            slots=positions.unsqueeze(0),
        )
        self._attention.prepare(step)
        return self._model.forward(self._model.embed(torch.tensor(tokens)), positions, self._attention)

    @torch.inference_mode()
    def negative_log_likelihoods(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32[len(tokens) - 1]: of each token after the first, in nats."""
        logits = self._model.logits(self.hidden(tokens))
        return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def perplexity(runner: WindowRunner, windows: Sequence[Sequence[int]]) -> float:
    """e^(mean negative log likelihood) over all tokens except the first of each window. windows: at least two tokens each."""
    losses = torch.cat([runner.negative_log_likelihoods(window) for window in windows])
    return math.exp(float(losses.double().mean()))
