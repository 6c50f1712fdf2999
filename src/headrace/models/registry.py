"""Which class serves which architecture: our own families by Hugging Face `model_type`, transformers for the rest.

Used by the thread that loads the model.
"""

from typing import Literal

from headrace.checkpoint.families import decoders, encoders
from headrace.checkpoint.family import Decoder
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.quantization_settings import stored_scheme
from headrace.errors import ModelError
from headrace.models.decoder import DecoderLM
from headrace.models.encoder import Encoder, without_prefix
from headrace.models.pooled_decoder import pooled_spec
from headrace.models.senses import sensing_spec
from headrace.models.spec import EncoderSpec, ModelSpec, PooledSpec
from headrace.models.transformers_backend import SPEC as FALLBACK

ModelImpl = Literal["auto", "headrace", "transformers"]


def native_specs() -> dict[str, ModelSpec]:
    """Our own implementations by Hugging Face model_type."""
    return {model_type: _spec(decoder) for model_type, decoder in decoders().items() if decoder.options is not None}


def _spec(decoder: Decoder) -> ModelSpec:
    options = decoder.options
    assert options is not None, decoder.name
    return ModelSpec(
        decoder.name,
        lambda config, placement: DecoderLM(config, options, placement),
        unsupported=lambda config: [reason for key, reason in decoder.refused.items() if config.raw.get(key)],
    )


def model_class_for(config: ModelConfig, impl: ModelImpl = "auto") -> ModelSpec:
    """The spec that serves `config`: ours where there is one (auto), else the transformers one with our attention.

    Raises ModelError when `impl` is headrace and we have none, when nothing can serve it, or when its quantisation is not supported.
    """
    if config.encoder is not None:
        raise ModelError(f"model type {config.model_type} is an encoder, which does not generate")
    stored_scheme(config.quantization)
    reasons = [f"model_type {config.model_type} has no implementation in Headrace"]
    spec = native_specs().get(config.model_type)
    if spec is not None:
        reasons = spec.unsupported(config)
    if impl != "transformers" and spec is not None and not reasons:
        return sensing_spec(spec, config)
    if impl == "headrace":
        raise ModelError("; ".join(reasons) + ". Try --model-impl transformers")
    unsupported = FALLBACK.unsupported(config)
    if unsupported:
        raise ModelError("; ".join([*reasons, *unsupported]))
    return FALLBACK


def encoder_class_for(config: ModelConfig, pooling: PoolingConfig) -> EncoderSpec:
    """The spec of an encoder, whose model pools by `pooling`.

    Raises ModelError when we have none, or when its config or its quantisation is not supported.
    """
    stored_scheme(config.quantization)
    family = encoders().get(config.model_type)
    if family is None:
        raise ModelError(f"model type {config.model_type} is not one of our encoders: {', '.join(sorted(encoders()))}")
    return EncoderSpec(
        family.name,
        lambda config, placement: Encoder(config, family, pooling, placement),
        ignored=family.unused,
        renaming=without_prefix(family.prefix),
    )


def pooled_class_for(config: ModelConfig, pooling: PoolingConfig) -> PooledSpec:
    """The spec of a decoder that pools by `pooling`: of our families only.

    Raises ModelError when we have none, or when its config or its quantisation is not supported.
    """
    ours = native_specs()
    if config.model_type not in ours:
        raise ModelError(
            f"model type {config.model_type} is served to generate only: config.json has a model without output projection (architectures: "
            f"{', '.join(config.architectures):.80}), or the options ask for embeddings; decoders for embeddings are {', '.join(sorted(ours))}"
        )
    return pooled_spec(model_class_for(config, "headrace"), pooling)
