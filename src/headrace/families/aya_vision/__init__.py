"""Aya Vision: a SigLIP tower over square tiles of an image, before Cohere2."""

from typing import Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, siglip
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens, check_tiles, into_tiles
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.errors import ModelError


def _read(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "siglip_vision_model", default="siglip_vision_model")
    keys.must_be("vision_feature_layer", -1, default=-1)
    keys.must_be("vision_feature_select_strategy", "full", default="full")
    tower, shuffle = siglip(vision), keys.count("downsample_factor", default=2)
    side = tower.image_size // tower.patch_size
    if side % shuffle:
        raise ModelError(f"{keys.origin}: {side} x {side} patches cannot be merged by downsample_factor {shuffle}")
    projector_sizes(keys, 2)
    return MediaConfig(family="aya_vision", image_token_id=image_token(keys, 255036), vision=tower, shuffle=shuffle)


def projector_sizes(keys: MediaKeys, hidden_size: int) -> tuple[int, float]:
    """Elements between the projector's layers, and the epsilon of its norm. hidden_size: of the text model. Raises ModelError."""
    inner = keys.count("alignment_intermediate_size", default=hidden_size)
    if inner % 2:
        raise ModelError(f"{keys.origin}: alignment_intermediate_size is {inner}; expected an even number")
    return inner, keys.positive("adapter_layer_norm_eps", 1e-6)


def _tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    """Each tile after its number, the whole image last."""
    vision = media.vision
    check_tiles(settings, vision.image_size)
    image = tokens.text(tokens.row) * (vision.image_size // vision.patch_size // media.shuffle) ** 2
    begin, end = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    tokens.id(begin), tokens.id(end)

    def layout(facts: ItemFacts) -> TokenLayout:
        tiles = "".join(f"TILE_{number}{image}" for number in range(1, facts.shape[0]))
        return tokens.layout(tokens.ids(f"{begin}{tiles}TILE_GLOBAL{image}{end}"))

    return KindTokens(tokens.id("<image>"), layout)


FAMILY = Family(
    vision={"aya_vision": Vision(read=_read, tokens=_tokens, settings=into_tiles, image_processor="GotOcr2", tied=True)}
)
