"""Idefics3, SmolVLM and SmolVLM2 (images)."""

from typing import Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, transformer
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens
from headrace.checkpoint.preprocessor_config import ImageSettings
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


FAMILY = Family(vision={"idefics3": _vision("Idefics3"), "smolvlm": _vision("SmolVLM")})
