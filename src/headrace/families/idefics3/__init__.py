"""Idefics3, SmolVLM and SmolVLM2 (images)."""

from typing import Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, transformer
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import CLIP_LAYER, Projector, VisionKeys, clip_names
from headrace.errors import ModelError


def _read(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower = transformer(vision, "siglip", act="gelu_pytorch_tanh", eps=1e-6, defaults=(1152, 3072, 12, 16, 224, 32))
    return MediaConfig(
        family=keys.config["model_type"],
        image_token_id=image_token(keys, 128257),
        vision=tower,
        projector_bias=False,
        shuffle=keys.count("scale_factor", default=2),
    )


def _tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    vision = media.vision
    if settings.max_side > vision.image_size:
        raise ModelError(
            f"tiles have {settings.max_side} pixels of a side, more than the vision tower's {vision.image_size}"
        )
    patches = settings.max_side // vision.patch_size
    if patches % media.shuffle:
        raise ModelError(f"{patches} x {patches} patches cannot be merged by {media.shuffle}")
    num_tokens = (patches // media.shuffle) ** 2
    image = tokens.text(tokens.row) * num_tokens
    around = "<fake_token_around_image>"
    tokens.id(around)

    def layout(facts: ItemFacts) -> TokenLayout:
        _, rows, columns = facts.grid
        text = "".join(
            "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text += ("\n" if rows else "") + f"{around}<global-img>{image}{around}"
        return tokens.layout(tokens.ids(text))

    return KindTokens(tokens.row, layout)


def _vision(image_processor: str) -> Vision:
    return Vision(
        read=_read, tokens=_tokens, image_processor=image_processor, tied=False, text_prefix="model.text_model."
    )


def _mmproj_config(keys: VisionKeys) -> dict[str, Any]:
    return {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": keys.own_token("<image>"),
        "scale_factor": keys.count("projector.scale_factor", 2),
        "vision_config": {"hidden_act": "gelu_pytorch_tanh", **keys.tower()},
    }


def _mmproj_processor(keys: VisionKeys) -> dict[str, Any]:
    side = keys.count("image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": keys.count("preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
        **keys.statistics(),
    }


FAMILY = Family(
    vision={"idefics3": _vision("Idefics3"), "smolvlm": _vision("SmolVLM")},
    projectors={
        "idefics3": Projector(
            architectures=(),
            output=("mm.model.fc.weight", 0),
            config=_mmproj_config,
            processor=_mmproj_processor,
            layers="vision_model.encoder.layers.{}.",
            layer=CLIP_LAYER,
            names={**clip_names("vision_model."), "mm.model.fc": "connector.modality_projection.proj"},
        )
    },
)
