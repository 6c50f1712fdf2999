"""Which class serves which architecture: our own families by Hugging Face `model_type`, transformers for the rest.

Used by the thread that loads the model.
"""

from importlib import import_module
from typing import Literal

from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.quantization_settings import stored_scheme
from headrace.errors import ModelError
from headrace.models.spec import ModelSpec
from headrace.models.transformers_backend import SPEC as FALLBACK

ModelImpl = Literal["auto", "headrace", "transformers"]

# One line a family: the module holds SPEC.
_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3")


def native_specs() -> dict[str, ModelSpec]:
    """Our own implementations by Hugging Face model_type."""
    specs = [import_module(f"headrace.models.{family}").SPEC for family in _FAMILIES]
    return {model_type: spec for spec in specs for model_type in spec.model_types}


def model_class_for(config: ModelConfig, impl: ModelImpl = "auto") -> ModelSpec:
    """The spec that serves `config`: ours where there is one (auto), else the transformers one with our attention.

    Raises ModelError when `impl` is headrace and we have none, when nothing can serve it, or when its quantisation is not supported.
    """
    stored_scheme(config.quantization)
    reasons = [f"model_type {config.model_type} has no implementation in Headrace"]
    spec = native_specs().get(config.model_type)
    if spec is not None:
        reasons = spec.unsupported(config)
    if impl != "transformers" and spec is not None and not reasons:
        return spec
    if impl == "headrace":
        raise ModelError("; ".join(reasons) + ". Try --model-impl transformers")
    unsupported = FALLBACK.unsupported(config)
    if unsupported:
        raise ModelError("; ".join([*reasons, *unsupported]))
    return FALLBACK
