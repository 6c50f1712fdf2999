"""Families of text models that see or hear: the decoder of a family, and the encoder of its images or sounds.

Owns the names of both in the checkpoints of such models. Does not own the layers of either (`decoder.py`, `headrace.families`). Used by the thread
that loads the model.
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.checkpoint.families import code, vision
from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import DecoderLM
from headrace.models.media import MediaEncoder
from headrace.models.spec import CausalLM, ModelSpec

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

_SENSES = (
    "vision_tower.",
    "multi_modal_projector.",
    "vision_model.",
    "connector.",
    "visual.",
    "image_newline",
    "audio_tower.",
)
"""Parts that a model without senses does not need, and of which one with them does not need all."""


def sensing_spec(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """`spec` for a checkpoint that has eyes or ears, which are built unless they are not served, or the model is split over ranks."""
    if not config.around:
        return spec

    def build(config: ModelConfig, placement: Placement) -> CausalLM:
        model = spec.build(config, placement)
        has_senses = config.media is not None or config.audio is not None
        if has_senses and placement.shard.is_whole and placement.stage.is_whole:
            assert isinstance(model, DecoderLM), spec.name
            # In as many bits as the output projection: towers are small, and many tokens depend on what they give.
            model.encoder = make_encoder(config, placement.head)
        return model

    return replace(
        spec,
        build=build,
        renaming=lambda config: _renaming(spec.renaming(config)),
        ignored=(*spec.ignored, *_SENSES),
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
    """The name of a tensor of the model in a checkpoint of its family, as transformers 5 spells it."""
    if not config.around or name.startswith("lm_head."):
        return name
    own = vision().get(config.around["model_type"])
    text = "model.language_model." if own is None else own.text_prefix
    return text + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"


def _renaming(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        for theirs, ours in _PREFIXES:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return rename(name)

    return renamed
