"""Makes the `ModelWeights` of a loaded model. Runs once at start, in the process that runs the model."""

from dataclasses import replace
from functools import partial

import msgspec

from headrace.attention.base import AttentionBackend, KvPool
from headrace.checkpoint.pooling import read_pooling
from headrace.config.resolve import override_model
from headrace.errors import ModelError
from headrace.execution.load_weights import load_model
from headrace.execution.released import DraftMemory
from headrace.execution.save_weights import WeightSaver
from headrace.execution.setup import Setup, check_unchanged, fingerprint_of, open_model
from headrace.execution.update_weights import LoadFormat, ModelWeights, check_same_model
from headrace.models.multimodal import stored_name
from headrace.models.spec import Model


def updatable_weights(
    setup: Setup, model: Model, attention: AttentionBackend, pool: KvPool, draft: DraftMemory | None = None
) -> ModelWeights:
    """The weights of `model`, for updates and saving. The arguments are those of `ModelWeights`."""
    args, spec, model_config = setup.args, setup.spec, setup.model_config

    def load(model_path: str, load_format: LoadFormat) -> tuple[Model, str]:
        other = open_model(replace(args, model_path=model_path, load_format=load_format))
        before = fingerprint_of(other)
        theirs = override_model(other.config, args.json_model_override_args)
        if not model_config.tie_word_embeddings:  # their output projection may be a copy of their embedding
            theirs = msgspec.structs.replace(theirs, tie_word_embeddings=False)
        check_same_model(model_config, theirs)
        if read_pooling(other.path, theirs, args.is_embedding) != setup.pooling:
            raise ModelError(
                "the checkpoint makes something else of its hidden states than the served model (modules.json, labels)"
            )
        model = load_model(other, spec, setup.placement, config=model_config)
        check_unchanged(other, before)
        return model, before

    rename = spec.renaming(model_config)
    weights = ModelWeights(model, attention, pool, rename, spec.ignored, load, draft=draft)
    # transformers changes the default dtype of the whole process while it builds a model. On a CPU that is the usual one.
    weights.holds_steps = spec.name == "transformers" and not setup.is_cpu
    stored = partial(stored_name, model_config)
    weights.saver = WeightSaver(args.save_dir, model_config.as_file(), setup.config.quantization, stored)
    return weights
