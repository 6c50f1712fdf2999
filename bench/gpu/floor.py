"""The least time that a step of a model can take on a device.

A floor is the bytes of the weights and of the KV cache that a step must read over the copy bandwidth, or its multiplications over the rate
of products, both as piece `rates` measured them, whichever is longer.
"""

import math
from dataclasses import dataclass

import torch

from bench.gpu.bench import Bench
from headrace.checkpoint.model_config import ModelConfig
from headrace.execution.graphs import graph_bytes
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for
from headrace.models.spec import kv_shape

_SPARE_BYTES = 3 << 30  # of a GPU, for activations and the libraries


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a step of a model, in numbers of weights.

    layers: of all layers, without experts. expert: of one expert, over all layers. head: of the
    output projection. bytes_per_weight: of those of layers and experts.
    """

    config: ModelConfig
    layers: int
    expert: int
    head: int
    bytes_per_weight: float = 2.0

    @classmethod
    def of(cls, config: ModelConfig, bytes_per_weight: float = 2.0) -> "Work":
        """The work of a model, counted from the shapes of its weights."""
        placement = Placement(torch.device("meta"), torch.bfloat16, 16)
        shapes = [(w.name, w.shape) for w in model_class_for(config).build(config, placement).weights()]
        matrices = [(name, math.prod(shape)) for name, shape in shapes if len(shape) > 1]
        experts = sum(size for name, size in matrices if ".experts." in name)
        vocabulary = config.vocab_size * config.hidden_size
        layers = sum(size for name, size in matrices if ".layers." in name) - experts
        return cls(config, layers, experts // config.moe.num_experts if config.moe else 0, vocabulary, bytes_per_weight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of the whole model in bfloat16."""
        experts = self.expert * (self.config.moe.num_experts if self.config.moe else 0)
        tables = 1 if self.config.tie_word_embeddings else 2
        return 2 * (self.layers + experts + tables * self.head)

    def fits(self, bench: Bench, num_tokens: int, batch: int, context: int) -> bool:
        """Whether the weights, a KV cache of `num_tokens` tokens and the graphs fit on the device."""
        if not bench.on_gpu:
            return True
        free = torch.cuda.mem_get_info()[0] - _SPARE_BYTES
        cache = num_tokens * kv_shape(self.config, torch.bfloat16).bytes_per_token
        graphs = graph_bytes(batch, self.config.vocab_size, self.config.hidden_size, context)
        return self.weight_bytes + cache + graphs < free

    def floor_s(self, bench: Bench, batch: int, new_tokens: int, context: int) -> float:
        """The least time of a step of `batch` rows that compute `new_tokens` each behind `context` cached ones. NaN without rates."""
        tokens = batch * new_tokens
        pairs = tokens * context + batch * new_tokens * (new_tokens + 1) // 2
        return self.step_floor_s(bench, tokens, batch, batch * context, pairs)

    def step_floor_s(self, bench: Bench, tokens: int, logits: int, cached: int, pairs: int) -> float:
        """The least time of a step of `tokens` tokens, `logits` of which are followed by one, behind `cached` cached ones of all rows. pairs: of
        a query and a key that it sees."""
        config = self.config
        read_experts = used_experts = 0.0
        if config.moe is not None:
            num, chosen = config.moe.num_experts, config.moe.num_experts_per_tok
            # How many of them are met by at least one token, when each token's are drawn evenly.
            read_experts, used_experts = num * (1 - (1 - chosen / num) ** tokens), chosen
        num_bytes = self.bytes_per_weight * (self.layers + read_experts * self.expert) + 2 * self.head
        num_bytes += cached * kv_shape(config, torch.bfloat16).bytes_per_token
        flops = 2 * tokens * (self.layers + used_experts * self.expert) + 2 * logits * self.head
        flops += 4 * config.num_layers * config.num_q_heads * config.head_dim * pairs
        memory = num_bytes / bench.figure("rates", "copy bandwidth", "bytes_per_s")
        products = flops / bench.figure("rates", "bfloat16 products", "flops_per_s")
        return max(memory, products)
