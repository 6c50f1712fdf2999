"""InternVL 2.5, 3 and 3.5 (transformers' format)."""

from typing import Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, transformer
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens, check_tiles, into_tiles
from headrace.checkpoint.preprocessor_config import ImageSettings


def _read(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("use_qk_norm", False, default=False)
    vision.must_be("use_absolute_position_embeddings", True, default=True)
    vision.must_be("norm_type", "layer_norm", "rms_norm", default="layer_norm")
    keys.must_be("vision_feature_layer", -1, default=-1)
    keys.must_be("vision_feature_select_strategy", "default", default="default")
    keys.must_be("downsample_ratio", 0.5, default=0.5)
    tower = transformer(
        vision,
        "internvl",
        act="gelu",
        eps=1e-6,
        defaults=(1024, 4096, 24, 16, 448, 14),
        rms=vision.config.get("norm_type") == "rms_norm",
        qkv_bias=vision.says("attention_bias", False),
        final_norm=not vision.says("use_mean_pooling", True),
    )
    return MediaConfig(
        family="internvl",
        image_token_id=image_token(keys, 151667),
        vision=tower,
        drops_first=True,
        projector_act=keys.act("projector_hidden_act", "gelu"),
        shuffle=2,
    )


def _tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    vision = media.vision
    check_tiles(settings, vision.image_size)
    ratio = config.get("downsample_ratio", 0.5)
    num_tokens = int((vision.image_size // vision.patch_size) ** 2 * ratio**2)
    begin, end = tokens.id("<img>"), tokens.id("</img>")

    def layout(facts: ItemFacts) -> TokenLayout:
        return tokens.layout([begin, *[tokens.row] * (num_tokens * facts.shape[0]), end])

    return KindTokens(tokens.row, layout)


FAMILY = Family(
    vision={"internvl": Vision(read=_read, tokens=_tokens, settings=into_tiles, image_processor="GotOcr2", tied=True)}
)
