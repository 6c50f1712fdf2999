"""A decoder of any family that pools its hidden states into vectors (Qwen3-Embedding) or scores (reward models) in place of logits.

Owns the heads of such decoders, and the names in checkpoints that were written without an output projection. Runs in the thread that runs the model.
"""

from collections.abc import Callable, Iterator

from headrace.checkpoint.family import DecoderOptions
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import NamedLayer, Placement, Weight
from headrace.models.decoder import DecoderLM
from headrace.models.spec import ModelSpec, PooledSpec

_BARE_NAMES = ("embed_tokens.", "layers.", "norm.")
"""How tensors are called in a checkpoint of the model without its output projection."""


class PooledDecoder(DecoderLM):
    """A `PooledCausalLM`. name: of its class, for messages."""

    def __init__(
        self, name: str, config: ModelConfig, options: DecoderOptions, pooling: PoolingConfig, placement: Placement
    ) -> None:
        super().__init__(config, options, placement)
        self._name = name
        self.drop_head()
        head = _head(config, pooling, placement) if pooling.task == "classify" else ()
        self.pooler = Pooler(pooling, config.hidden_size, placement, head)

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield from self.pooler.weights()

    def compile_pieces(self, backend: str = "inductor") -> str:
        return f"the model class {self._name} has other layers"


def pooled_spec(spec: ModelSpec, options: DecoderOptions, pooling: PoolingConfig) -> PooledSpec:
    """The family `spec`, whose decoder has these options, pooling instead of generating."""
    name = f"pooled {spec.name}"
    return PooledSpec(
        name,
        lambda config, placement: PooledDecoder(name, config, options, pooling, placement),
        unsupported=spec.unsupported,
        ignored=(*spec.ignored, "lm_head."),
        batch_invariant=spec.batch_invariant,
        renaming=lambda config: _with_prefix(spec.renaming(config)),
    )


def _head(config: ModelConfig, pooling: PoolingConfig, placement: Placement) -> tuple[NamedLayer, ...]:
    """`score`: one layer without a bias, and of Qwen2's reward models two layers (A. Yang et al., "Qwen2.5-Math", 2024)."""
    size, count = config.hidden_size, len(pooling.labels)
    if any(name.endswith("ForRewardModel") for name in config.architectures):
        return (
            (HeadLinear("0", size, size, placement, activation="relu"), "score."),
            (HeadLinear("2", size, count, placement), "score."),
        )
    return ((HeadLinear("score", size, count, placement, bias=False), ""),)


def _with_prefix(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        name = rename(name)
        return f"model.{name}" if name.startswith(_BARE_NAMES) else name

    return renamed
