"""Gemma 1 and 2, which run transformers' code. Gemma 3: local and global layers with their own rotation, norms on both sides of each part, scaled
embeddings, and from 4B on with images."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Decoder, DecoderOptions, Family, Gguf, Vision
from headrace.checkpoint.media_config import MediaConfig, image_token, siglip
from headrace.checkpoint.media_tokens import KindTokens, Tokens, check_side, token_of
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import CLIP_LAYER, Projector, VisionKeys, clip_names
from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile


_ALL: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_SECOND: dict[str, Any] = _ALL | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}


def _gguf_config(file: "GgufFile", config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp scales queries by head_dim, except in the 27B (62 layers), by hidden_size / heads. Its local layers rotate
    # with base 10000 and every sixth layer is global; files state these only where they differ.
    wide = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    pattern = file.get("gemma3.attention.sliding_window_pattern", 6)
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.count("gemma3.attention.sliding_window"),
        "rope_local_base_freq": file.decimal("gemma3.rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping"),
        "attn_logit_softcapping": file.get("gemma3.attn_logit_softcapping"),
    }
    if isinstance(pattern, list):
        fields["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        fields["sliding_window_pattern"] = pattern
    return fields


def _read(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "siglip_vision_model", default="siglip_vision_model")
    tower = siglip(vision)
    tokens = keys.count("mm_tokens_per_image", default=256)
    side = tower.image_size // tower.patch_size
    if int(tokens**0.5) ** 2 != tokens or side % int(tokens**0.5):
        raise ModelError(
            f"{keys.origin}: mm_tokens_per_image is {tokens}, which does not divide {side} x {side} patches"
        )
    return MediaConfig(
        family="gemma3",
        image_token_id=image_token(keys, 262144),
        vision=tower,
        mm_tokens=tokens,
        sees_ahead=True,
    )


def _tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    check_side(settings, media.vision.image_size)
    begin, end = (
        token_of(config, name, default) for name, default in (("boi_token_index", 255999), ("eoi_token_index", 256000))
    )
    apart = tokens.ids("\n\n")
    layout = tokens.layout([*apart, begin, *[tokens.row] * media.mm_tokens, end, *apart])
    tokens.text(end)
    return KindTokens(begin, lambda facts: layout)


def _mmproj_config(keys: VisionKeys) -> dict[str, Any]:
    tower = keys.tower()
    side, factor = tower["image_size"] // tower["patch_size"], keys.count("projector.scale_factor", 4)
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": keys.row_token("<image_soft_token>"),
        "boi_token_index": keys.own_token("<start_of_image>"),
        "eoi_token_index": keys.own_token("<end_of_image>"),
        "mm_tokens_per_image": (side // factor) ** 2,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", **tower},
    }


def _mmproj_processor(keys: VisionKeys) -> dict[str, Any]:
    side = keys.count("image_size")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        **keys.statistics(),
    }


FAMILY = Family(
    decoders={
        "gemma": Decoder(
            defaults=_ALL
            | {
                "vocab_size": 256000,
                "hidden_size": 3072,
                "intermediate_size": 24576,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
            }
        ),
        "gemma2": Decoder(
            sliding="even", defaults=_SECOND | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        ),
        "gemma3_text": Decoder(
            name="gemma3",
            options=DecoderOptions(qk_norm=True, sandwich_norms=True, norm_offset=1.0, scales_embeddings=True),
            sliding="pattern",
            refused={"use_bidirectional_attention": "bidirectional attention is not supported"},
            defaults=_SECOND
            | {
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "sliding_window_pattern": 6,
            },
        ),
    },
    vision={"gemma3": Vision(read=_read, tokens=_tokens, image_processor="Gemma3", tied=True, joins_line_ends=True)},
    gguf={
        "gemma3": Gguf(
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            # There is a norm before and after each half of the layer, so ffn_norm is another one than llama's.
            layer_names={
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            config=_gguf_config,
            norms_plus_one=True,
        )
    },
    projectors={
        "gemma3": Projector(
            architectures=("gemma3",),
            output=("mm.input_projection.weight", 1),
            config=_mmproj_config,
            processor=_mmproj_processor,
            layers="vision_tower.encoder.layers.{}.",
            layer=CLIP_LAYER,
            names={
                **clip_names("vision_tower."),
                "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
                "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            },
            norms_plus_one=frozenset({"mm.soft_emb_norm.weight"}),
        )
    },
)
