"""Which class serves which architecture: our own families by Hugging Face `model_type`, transformers for the rest.

Owns the names of a vision or audio encoder, and of the decoder beside it, in checkpoints of such models; and the heads of decoders that pool their
hidden states into vectors (Qwen3-Embedding) or scores (reward models) in place of logits, with the names in checkpoints that were written without an
output projection. Used by the thread that loads the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from headrace.checkpoint.families import all_families, code
from headrace.checkpoint.family import Decoder, DecoderOptions
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.quantized_formats import stored_scheme
from headrace.errors import ModelError
from headrace.layers.pooler import HeadLinear, Pooler
from headrace.layers.weight import NamedLayer, Placement, Weight
from headrace.models.decoder import DecoderLM
from headrace.models.encoder import Encoder, without_prefix
from headrace.models.media import MediaEncoder
from headrace.models.spec import CausalLM, EncoderSpec, ModelSpec, PooledSpec
from headrace.models.transformers_backend import SPEC as FALLBACK

ModelImpl = Literal["auto", "headrace", "transformers"]


def native_specs() -> dict[str, ModelSpec]:
    return {
        model_type: _spec(decoder, decoder.options)
        for model_type, decoder in all_families().decoders.items()
        if decoder.options
    }


def _spec(decoder: Decoder, options: DecoderOptions) -> ModelSpec:
    return ModelSpec(
        decoder.name,
        lambda config, placement: DecoderLM(config, options, placement),
        unsupported=lambda config: [reason for key, reason in decoder.refused.items() if config.raw.get(key)],
    )


def model_class_for(config: ModelConfig, impl: ModelImpl = "auto") -> ModelSpec:
    """The spec that serves `config`: ours where there is one (auto), else the transformers one with our attention. Raises ModelError when `impl` is
    headrace and we have none, when nothing can serve it, or when its quantisation is not supported."""
    if config.encoder is not None:
        raise ModelError(f"model type {config.model_type} is an encoder, which does not generate")
    stored_scheme(config.quantization)
    reasons = [f"model_type {config.model_type} has no implementation in Headrace"]
    spec = native_specs().get(config.model_type)
    if spec is not None:
        reasons = spec.unsupported(config)
    if impl != "transformers" and spec is not None and not reasons:
        return multimodal_spec(spec, config)
    if impl == "headrace":
        raise ModelError("; ".join(reasons) + ". Try --model-impl transformers")
    unsupported = FALLBACK.unsupported(config)
    if unsupported:
        raise ModelError("; ".join([*reasons, *unsupported]))
    return FALLBACK


def encoder_class_for(config: ModelConfig, pooling: PoolingConfig) -> EncoderSpec:
    """The spec of an encoder, whose model pools by `pooling`. Raises ModelError when we have none, or when its config or its quantisation is not
    supported."""
    stored_scheme(config.quantization)
    family = all_families().encoders.get(config.model_type)
    if family is None:
        raise ModelError(
            f"model type {config.model_type} is not one of our encoders: {', '.join(sorted(all_families().encoders))}"
        )
    return EncoderSpec(
        family.name,
        lambda config, placement: Encoder(config, family, pooling, placement),
        ignored=family.unused,
        renaming=without_prefix(family.prefix),
    )


def pooled_class_for(config: ModelConfig, pooling: PoolingConfig) -> PooledSpec:
    """The spec of a decoder that pools by `pooling`: of our families only. Raises ModelError when we have none, or when its config or its
    quantisation is not supported."""
    decoder = all_families().decoders.get(config.model_type)
    if decoder is None or decoder.options is None:
        raise ModelError(
            f"model type {config.model_type} is served to generate only: config.json has a model without output projection (architectures: "
            f"{', '.join(config.architectures):.80}), or the options ask for embeddings; decoders for embeddings are "
            f"{', '.join(sorted(native_specs()))}"
        )
    return pooled_spec(model_class_for(config, "headrace"), decoder.options, pooling)


_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_model.", "vision_model."),
    ("model.connector.", "connector."),
    ("model.visual.", "visual."),
    ("model.audio_tower.", "audio_tower."),
    ("model.image_newline", "image_newline"),
)
"""How transformers and others have spelled these parts, and how they are called here; one after the other."""

_MEDIA_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "vision_model.",
    "connector.",
    "visual.",
    "image_newline",
    "audio_tower.",
)
"""Parts that a text model does not need, and of which a multimodal one does not need all."""


def multimodal_spec(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """`spec` for a multimodal checkpoint, whose encoder is built unless it is not supported, or the model is split over ranks."""
    if not config.around:
        return spec

    def build(config: ModelConfig, placement: Placement) -> CausalLM:
        model = spec.build(config, placement)
        has_media = config.media is not None or config.audio is not None
        if has_media and placement.shard.is_whole and placement.stage.is_whole:
            assert isinstance(model, DecoderLM), spec.name
            # In as many bits as the output projection: towers are small, and many tokens depend on what they give.
            model.media_encoder = make_encoder(config, placement.head)
        return model

    return replace(
        spec,
        build=build,
        renaming=lambda config: _renaming(spec.renaming(config)),
        ignored=(*spec.ignored, *_MEDIA_PARTS),
    )


def make_encoder(config: ModelConfig, placement: Placement) -> MediaEncoder:
    """The encoder of a model with `ModelConfig.media` or `audio`, without weights. Raises ModelError for what its family does not have."""
    made: MediaEncoder
    if config.audio is not None:
        assert config.media is None, "one encoder is served"
        made = code(config.audio.family, "audio").encoder(config.audio, config, placement)
    else:
        assert config.media is not None, config.model_type
        made = code(config.media.family, "vision").encoder(config.media, config, placement)
    return made


def stored_name(config: ModelConfig, name: str) -> str:
    if not config.around or name.startswith("lm_head."):
        return name
    own = all_families().vision.get(config.around["model_type"])
    text = "model.language_model." if own is None else own.text_prefix
    return text + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"


def _renaming(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        for theirs, ours in _PREFIXES:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return rename(name)

    return renamed


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
