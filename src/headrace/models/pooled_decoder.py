"""A decoder of any family that does not write: its hidden states become vectors (Qwen3-Embedding) or scores (reward models).

Owns the heads of such decoders, and the names in checkpoints that were written without an output projection. Does not own the layers
(`decoder.py` and the families' files). Runs in the thread that runs the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from headrace.attention.base import OwnRows, ReadTokens, StepAttention
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.expert_counts import ExpertCounts
from headrace.layers.logits import Peaks
from headrace.layers.pooler import HeadLayer, HeadLinear, Pooler
from headrace.layers.weight import Placement, Weight
from headrace.models.decoder import DecoderLM
from headrace.models.spec import ModelSpec, PooledCausalLM, PooledSpec

_BARE_NAMES = ("embed_tokens.", "layers.", "norm.")
"""How tensors are called in a checkpoint of the model without its output projection."""


@dataclass(slots=True)
class PooledDecoder:
    """A `PooledCausalLM`. model: its layers, which have no output projection."""

    model: DecoderLM
    pooler: Pooler

    def weights(self) -> Iterator[Weight]:
        """See `CausalLM.weights`."""
        yield from self.model.weights()
        yield from self.pooler.weights()

    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        """See `CausalLM.expert_counts`."""
        return self.model.expert_counts()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.embed`."""
        return self.model.embed(token_ids)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        reads: ReadTokens | None = None,
        *,
        own: OwnRows | None = None,
        by_layer: bool = False,
    ) -> torch.Tensor:
        """See `CausalLM.forward`."""
        return self.model.forward(hidden, positions, attention, reads, own=own, by_layer=by_layer)

    def fuse(self, attention: StepAttention) -> str:
        """See `CausalLM.fuse`."""
        return self.model.fuse(attention)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """There are none."""
        raise AssertionError("an embedding model was asked for logits")

    def peaks(self, hidden: torch.Tensor) -> Peaks:
        """There are none."""
        raise AssertionError("an embedding model was asked for logits")


def pooled_spec(spec: ModelSpec, pooling: PoolingConfig) -> PooledSpec:
    """The family `spec`, pooling instead of writing."""

    def build(config: ModelConfig, placement: Placement) -> PooledCausalLM:
        model = spec.build(config, placement)
        assert isinstance(model, DecoderLM), spec.name
        model.drop_head()
        model.encoder = None  # vectors are made of text alone
        head = _head(config, pooling, placement) if pooling.task == "classify" else ()
        return PooledDecoder(model, Pooler(pooling, config.hidden_size, placement, head))

    return PooledSpec(
        f"pooled {spec.name}",
        build,
        unsupported=spec.unsupported,
        ignored=(*spec.ignored, "lm_head."),
        batch_invariant=spec.batch_invariant,
        renaming=lambda config: _with_prefix(spec.renaming(config)),
    )


def _head(config: ModelConfig, pooling: PoolingConfig, placement: Placement) -> tuple[HeadLayer, ...]:
    """`score`: one layer without a bias, and of Qwen2's reward models two layers (A. Yang et al., "Qwen2.5-Math", 2024)."""
    size, count = config.hidden_size, len(pooling.labels)
    if any(name.endswith("ForRewardModel") for name in config.architectures):
        return (
            HeadLinear("score.", "0", size, size, placement, activation="relu"),
            HeadLinear("score.", "2", size, count, placement),
        )
    return (HeadLinear("", "score", size, count, placement, bias=False),)


def _with_prefix(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        name = rename(name)
        return f"model.{name}" if name.startswith(_BARE_NAMES) else name

    return renamed
