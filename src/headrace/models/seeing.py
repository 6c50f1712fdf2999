"""Families of text models that see: the decoder of a family, and the encoder of its images.

Owns the names of both in the checkpoints of models that see. Does not own the layers of either (`decoder.py`, `vision/`). Used by the thread that
loads the model.
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.decoder import DecoderLM
from headrace.models.spec import CausalLM, ModelSpec
from headrace.models.vision.registry import make_encoder

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
    ("model.image_newline", "image_newline"),
)
"""How transformers and others have spelled these parts, and how they are called here; one after the other."""

_EYES = ("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.", "visual.", "image_newline")
"""Parts that a model without eyes does not need, and of which one with eyes does not need all."""


def seeing_spec(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """`spec` for a checkpoint that has eyes, which are built unless they are not served, or the model is split over ranks."""
    if config.media is None and not config.blind:
        return spec

    def build(config: ModelConfig, placement: Placement) -> CausalLM:
        model = spec.build(config, placement)
        if config.media is not None and placement.shard.is_whole and placement.stage.is_whole:
            assert isinstance(model, DecoderLM), spec.name
            # In as many bits as the output projection: towers are small, and many tokens depend on what they give.
            model.encoder = make_encoder(config, placement.head)
        return model

    return replace(
        spec,
        build=build,
        renaming=lambda config: _renaming(spec.renaming(config)),
        ignored=(*spec.ignored, *_EYES),
    )


def stored_name(config: ModelConfig, name: str) -> str:
    """The name of a tensor of the model in a checkpoint of its family, as transformers 5 spells it."""
    if not config.around or name.startswith("lm_head."):
        return name
    text = "model.text_model." if config.around["model_type"] in ("idefics3", "smolvlm") else "model.language_model."
    return text + name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"


def _renaming(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        for theirs, ours in _PREFIXES:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        return rename(name)

    return renamed
