"""Which class serves which architecture: our own families by Hugging Face `model_type`, transformers for the rest.

Used by the thread that loads the model.
"""

from importlib import import_module
from typing import Literal

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.quantization_settings import stored_scheme
from headrace.errors import ModelError
from headrace.models.pooled_decoder import pooled_spec
from headrace.models.senses import sensing_spec
from headrace.models.spec import EncoderSpec, ModelSpec, PooledSpec
from headrace.models.transformers_backend import SPEC as FALLBACK

ModelImpl = Literal["auto", "headrace", "transformers"]

# One line a family: the module holds SPEC.
_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3")

# One line a family of encoders: the module holds MODEL_TYPES and spec().
_ENCODERS = ("bert", "roberta", "distilbert", "modernbert")


def native_specs() -> dict[str, ModelSpec]:
    """Our own implementations by Hugging Face model_type."""
    specs = [import_module(f"headrace.models.{family}").SPEC for family in _FAMILIES]
    return {model_type: spec for spec in specs for model_type in spec.model_types}


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


def encoder_types() -> dict[str, str]:
    """Our encoders: the module of `models/` by Hugging Face model_type."""
    return {
        model_type: name for name in _ENCODERS for model_type in import_module(f"headrace.models.{name}").MODEL_TYPES
    }


def encoder_class_for(config: ModelConfig, pooling: PoolingConfig) -> EncoderSpec:
    """The spec of an encoder, whose model pools by `pooling`.

    Raises ModelError when we have none, or when its config or its quantisation is not supported.
    """
    stored_scheme(config.quantization)
    types = encoder_types()
    if config.model_type not in types:
        raise ModelError(f"model type {config.model_type} is not one of our encoders: {', '.join(sorted(types))}")
    spec: EncoderSpec = import_module(f"headrace.models.{types[config.model_type]}").spec(pooling)
    if reasons := spec.unsupported(config):
        raise ModelError("; ".join(reasons))
    return spec


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
