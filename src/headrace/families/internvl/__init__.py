"""InternVL 2.5, 3 and 3.5 (transformers' format)."""

from typing import Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, transformer
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens, check_tiles, into_tiles
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import Projector, VisionKeys


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


def _mmproj_config(keys: VisionKeys) -> dict[str, Any]:
    has_bias = keys.has("v.blk.0.ln1.bias")
    tower = {
        "hidden_act": "gelu" if keys.activation == "gelu" else keys.activation,
        "norm_type": "layer_norm" if has_bias else "rms_norm",
        "use_qk_norm": keys.has("v.blk.0.attn_q_norm.weight"),
        "attention_bias": keys.has("v.blk.0.attn_q.bias"),
        "use_mean_pooling": not keys.has("v.post_ln.weight"),
    }
    return {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": keys.own_token("<IMG_CONTEXT>"),
        "downsample_ratio": 1 / keys.count("projector.scale_factor", 2),
        "vision_config": {**tower, **keys.tower()},
    }


def _mmproj_processor(keys: VisionKeys) -> dict[str, Any]:
    side = keys.count("image_size")
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "min_patches": keys.count("preproc_min_tiles", 1),
        "max_patches": keys.count("preproc_max_tiles", 12),
        **keys.statistics(),
    }


_LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1.weight": "lambda_1",
    "ls2.weight": "lambda_2",
}

FAMILY = Family(
    vision={"internvl": Vision(read=_read, tokens=_tokens, settings=into_tiles, image_processor="GotOcr2", tied=True)},
    projectors={
        "internvl": Projector(
            architectures=(),
            output=("mm.model.mlp.3.weight", 0),
            config=_mmproj_config,
            processor=_mmproj_processor,
            layers="vision_tower.encoder.layer.{}.",
            layer=_LAYER,
            names={
                "v.class_embd": "vision_tower.embeddings.cls_token",
                "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
                "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
                "v.post_ln": "vision_tower.layernorm",
                "mm.model.mlp.0": "multi_modal_projector.layer_norm",
                "mm.model.mlp.1": "multi_modal_projector.linear_1",
                "mm.model.mlp.3": "multi_modal_projector.linear_2",
            },
            three_dimensions=frozenset({"v.class_embd", "v.position_embd.weight"}),
        )
    },
)
