"""What a model is to the runner: `CausalLM`, `PooledCausalLM` and `EncoderModel`, and how a family's is built: `FamilySpec`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from headrace.attention.base import KvShape, OwnRows, ReadTokens, StepAttention
from headrace.checkpoint.model_config import ModelConfig
from headrace.distributed.base import ALL_LAYERS, WHOLE, Shard, Stage, head_share
from headrace.layers.logits import Peaks
from headrace.layers.mlp import ExpertCounts
from headrace.layers.pooler import Pooler
from headrace.layers.weight import Placement, Weight


class Model(Protocol):
    """What any model is to those who load, replace and release its weights."""

    def weights(self) -> Iterator[Weight]:
        """Every tensor it wants from a checkpoint, each once."""

    def fuse(self, attention: StepAttention) -> str:
        """Run all layers as one native call from now on when the attention is this backend, whose pool is made. Returns "" or the reason why that
        cannot be; `forward` gives the same bits either way. Again after weights were loaded anew."""

    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        """By layer, what its routers choose; empty when nothing is routed, or not where it can be seen."""


class CausalLM(Model, Protocol):
    """A decoder-only language model over paged attention."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int[num_tokens] -> what the first layer takes, [num_tokens, hidden_size], a fresh tensor."""

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
        """Run all layers of this stage over `hidden` [num_tokens, hidden_size], which it may overwrite.

        positions: int32[num_tokens]. attention: prepared for this step. reads: None = all tokens. own: given with `Placement.whole_attention`:
        positions and attention are those of these rows, and the other ranks call this with the others. by_layer: call each linear layer, even
        where `fuse` found a quicker way, with the same bits: adapters add to their outputs. Returns the hidden states after the final norm
        of the tokens that are read, [num_read, hidden_size]; keys and values are written of all tokens. A stage that is not the last reads
        all tokens, and returns what the next stage takes.
        """

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [rows, hidden_size], after the final norm -> float32[rows, vocab_size].

        out: memory that the result may be in, of its shape, on the CPU.
        """

    def peaks(self, hidden: torch.Tensor) -> Peaks:
        """hidden: as for `logits`, of which these are the largest. Ranks tell each other no more than they need for that."""


class PooledCausalLM(CausalLM, Protocol):
    """A decoder with a `pooler` for its hidden states, and without logits."""

    pooler: Pooler


class EncoderModel(Model, Protocol):
    """A model whose tokens all see each other (or those within a window), so that a text is computed whole, and without a KV cache. pooler: what
    makes a vector of the hidden states of a text."""

    pooler: Pooler

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        row_starts: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Run all layers over texts that lie one after the other, without padding. On the CPU the bits of a text do not depend on the others.

        token_ids: int64[num_tokens]. positions: int32[num_tokens], from 0 in each text. token_types: int32[num_tokens], None = all 0.
        row_starts: int32[num_texts + 1], on the CPU; text i is tokens row_starts[i] .. row_starts[i + 1] - 1, at least one. attention: any
        backend; it needs no pool. Returns [num_tokens, hidden_size].
        """


M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class FamilySpec(Generic[M]):
    """One family: how to build it and what it does not do.

    unsupported: reasons why a config cannot be served; empty when it can.
    ignored: parts of names of tensors that checkpoints of the family may carry and the model does not need.
    check: run once the weights are loaded; raises ModelError when the model does not work after all.
    batch_invariant: whether a row has the same bits in any batch and chunk (on a GPU with deterministic kernels).
    renaming: gives the function from a checkpoint's name of a tensor to the model's, for checkpoints that spell it in another way.
    """

    name: str
    build: Callable[[ModelConfig, Placement], M]
    unsupported: Callable[[ModelConfig], list[str]] = lambda config: []
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    batch_invariant: bool = True
    renaming: Callable[[ModelConfig], Callable[[str], str]] = lambda config: str
    check: Callable[[M], None] = lambda model: None


ModelSpec = FamilySpec[CausalLM]
PooledSpec = FamilySpec[PooledCausalLM]
EncoderSpec = FamilySpec[EncoderModel]


def kv_shape(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS) -> KvShape:
    """The KV cache that a rank of a model of this config fills. Raises ModelError if there are more ranks than heads or layers."""
    num_heads = head_share(shard, config.num_q_heads, config.num_kv_heads).num_kv
    return KvShape(len(stage_layers(config, stage)), num_heads, config.head_dim, dtype)


def stage_layers(config: ModelConfig, stage: Stage) -> range:
    """The layers of a stage: each stage reads about as many weights for a token. Raises ModelError if there are fewer layers than stages."""
    attention = 2 * config.hidden_size * config.head_dim * (config.num_q_heads + config.num_kv_heads)
    moe = config.moe
    width = config.intermediate_size if moe is None else moe.num_experts_per_tok * moe.intermediate_size
    layer = attention + 3 * config.hidden_size * width
    return stage.split(config.num_layers, config.hidden_size * config.vocab_size / layer)[stage.index]
