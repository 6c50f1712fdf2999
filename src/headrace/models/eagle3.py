"""The head of EAGLE-3, which drafts tokens from what a model has computed (Y. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large
Language Models via Training-Time Test", 2025).

    streams of the target at position t, of three layers -> fc -> feature         embedding of the token at t + 1
                                                                 \\                 /
                                                  norms -> attention over both, feed-forward layer -> the token at t + 2
                                                                 |
                                    the output is the feature of t + 1, as long as the target has not computed that

Owns the head's layers and its names in published checkpoints. Its embedding is the target's. Runs in the thread that runs the model.
"""

from collections.abc import Callable, Iterator

import torch

from headrace.attention.base import StepAttention
from headrace.checkpoint.family import DecoderOptions
from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMlp
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rotary
from headrace.layers.weight import Placement, Weight
from headrace.models.decoder import Attention
from headrace.models.spec import CausalLM, ModelSpec

NUM_STREAMS = 3


class EagleHead:
    """config: of the head. embed: the target's embedding. Its vocabulary is a part of the target's, whose ids it gives."""

    def __init__(
        self, config: ModelConfig, placement: Placement, embed: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
    ) -> None:
        size = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, placement)

        self._embed = embed
        self._vocab_size = vocab_size
        self._num_ids = int(config.raw.get("draft_vocab_size") or vocab_size)
        self._fc = Linear(NUM_STREAMS * size, {"fc": size}, placement)
        self._embedding_norm, self._feature_norm, self._mlp_norm, self._norm = norm(), norm(), norm(), norm()
        rotary = Rotary(config.rope_for(0), config.head_dim, config.max_position_embeddings, placement)
        self._attention = Attention(config, 0, DecoderOptions(), rotary, placement, in_size=2 * size)
        self._mlp = GatedMlp(size, config.intermediate_size, config.hidden_act, placement, bias=config.mlp_bias)
        self._head = Linear(size, {"lm_head": self._num_ids}, placement.head)
        self._ids = torch.arange(self._num_ids, device=placement.device)

    def weights(self) -> Iterator[Weight]:
        yield from self._fc.weights("")
        yield from self._embedding_norm.weights("midlayer.input_layernorm")
        yield from self._feature_norm.weights("midlayer.hidden_norm")
        yield from self._attention.weights("midlayer.self_attn")
        yield from self._mlp_norm.weights("midlayer.post_attention_layernorm")
        yield from self._mlp.weights("midlayer.mlp")
        yield from self._norm.weights("norm")
        yield from self._head.weights("")
        if self._num_ids < self._vocab_size:
            yield Weight("d2t", (self._num_ids,), self._load_offsets, self._offsets, init="zeros", itemsize=8)

    def features(self, streams: list[torch.Tensor]) -> torch.Tensor:
        """Of what the target computed, [num_tokens, hidden_size] for each of the three layers."""
        return self._fc(torch.cat(streams, 1))

    def forward(
        self, features: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """features: [num_tokens, hidden_size] at these positions, next_ids: the tokens one position further. Returns the features of those, as the
        head predicts them."""
        embeddings = self._embedding_norm(self._embed(next_ids))
        x = self._attention(torch.cat((embeddings, self._feature_norm(features)), 1), positions, attention)
        residual = features.clone()
        return residual + self._mlp(self._mlp_norm(x, residual))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """float32[rows, the target's vocabulary] after features that `forward` gave; -inf where the head has no id."""
        own = self._head(self._norm(features)).float()
        logits = torch.full((len(own), self._vocab_size), -torch.inf, device=own.device)
        logits[:, self._ids] = own
        return logits

    def _offsets(self) -> torch.Tensor:
        return self._ids.cpu() - torch.arange(self._num_ids)

    def _load_offsets(self, offsets: torch.Tensor) -> None:
        ids = offsets.long().cpu() + torch.arange(self._num_ids)
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise ModelError(f"d2t gives ids that the model's {self._vocab_size} tokens do not have")
        self._ids = ids.to(self._ids.device)


def _no_model(config: ModelConfig, placement: Placement) -> CausalLM:
    raise ModelError("an EAGLE-3 head is no model: give it to --speculative-draft-model-path")


SPEC = ModelSpec("eagle3", _no_model, ignored=("t2d", "embed_tokens", "rotary_emb.inv_freq"))
