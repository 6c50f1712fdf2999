"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the text models of Qwen2 and Qwen3 with positions in three parts."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.config_keys import MediaKeys, NotServedError
from headrace.checkpoint.family import Decoder, Family, Gguf, Vision
from headrace.checkpoint.media_config import MediaConfig, VisionConfig, image_token, theta
from headrace.checkpoint.media_tokens import (
    ItemFacts,
    KindTokens,
    TokenLayout,
    Tokens,
    Vocabulary,
    check_patches,
    token_of,
)
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import Projector, VisionKeys
from headrace.errors import ModelError
from headrace.families import qwen2, qwen3
from headrace.media_kinds import MediaKind

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile

_QWEN2: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention_bias": True,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}

_QWEN2_TEXT = Decoder(name="qwen2", options=qwen2.OPTIONS, sliding="upper", defaults=_QWEN2, is_inner=True)


def _tower(name: str, vision: MediaKeys, size: int, depth: int, patch_size: int, **own: Any) -> VisionConfig:
    """depth, patch_size: defaults."""
    return VisionConfig(
        tower=name,
        hidden_size=size,
        num_layers=vision.count("depth", default=depth),
        **vision.heads(size, "num_heads", 16, 4),
        norm_eps=1e-6,
        patch_size=vision.count("patch_size", default=patch_size),
        num_channels=vision.count("in_channels", default=3),
        rope_theta=theta(vision),
        temporal_patch_size=vision.count("temporal_patch_size", default=2),
        merge_size=vision.count("spatial_merge_size", default=2),
        **own,
    )


def _qwen2_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    size = vision.count("embed_dim", default=1280)
    tower = _tower(
        "qwen2_vl",
        vision,
        size,
        32,
        14,
        intermediate_size=int(size * vision.positive("mlp_ratio", 4)),
        hidden_act=vision.act("hidden_act", "quick_gelu"),
        out_size=vision.count("hidden_size", default=3584),
    )
    return MediaConfig(
        family="qwen2_vl", image_token_id=image_token(keys, 151655), vision=tower, rope_sections=_sections(keys)
    )


def _qwen2_5_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower = _tower(
        "qwen2_5_vl",
        vision,
        vision.count("hidden_size", default=3584),
        32,
        14,
        intermediate_size=vision.count("intermediate_size", default=3420),
        hidden_act=vision.act("hidden_act", "silu", gated=True),
        window_size=vision.count("window_size", default=112),
        full_layers=vision.numbers("fullatt_block_indexes", (7, 15, 23, 31)),
        places_per_second=vision.positive("tokens_per_second", 4),
        out_size=vision.count("out_hidden_size", default=3584),
    )
    return MediaConfig(
        family="qwen2_5_vl", image_token_id=image_token(keys, 151655), vision=tower, rope_sections=_sections(keys)
    )


def _qwen3_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower = _tower(
        "qwen3_vl",
        vision,
        vision.count("hidden_size", default=1152),
        27,
        16,
        intermediate_size=vision.count("intermediate_size", default=4304),
        hidden_act=vision.act("hidden_act", "gelu_pytorch_tanh"),
        out_size=vision.count("out_hidden_size", default=3584),
        num_positions=vision.count("num_position_embeddings", default=2304),
        deep_layers=vision.numbers("deepstack_visual_indexes", (8, 16, 24)),
    )
    deep, depth = tower.deep_layers, tower.num_layers
    if list(deep) != sorted(set(deep)) or any(not 0 <= layer < depth for layer in deep):
        raise NotServedError(f"deepstack_visual_indexes {list(deep)} of {depth} layers do not ascend")
    num_text_layers = (keys.optional_object("text_config") or {}).get("num_hidden_layers", 32)
    if isinstance(num_text_layers, int) and len(deep) >= num_text_layers:
        raise NotServedError(
            f"images add to {len(deep)} layers of a text model of {num_text_layers}; to the last none can be added"
        )
    return MediaConfig(
        family="qwen3_vl",
        image_token_id=image_token(keys, 151655),
        vision=tower,
        rope_sections=_sections(keys, (24, 20, 20)),
        rope_interleaved=_text_rope(keys).says("mrope_interleaved", True),
    )


def _sections(keys: MediaKeys, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Pairs of a head that turn by time, height and width."""
    sections = _text_rope(keys).numbers("mrope_section", default)
    if len(sections) != 3 or min(sections) < 0:
        raise ModelError(f"{keys.origin}: mrope_section is {list(sections)!r:.80}; expected three numbers")
    return sections


def _text_rope(keys: MediaKeys) -> MediaKeys:
    text = MediaKeys(keys.optional_object("text_config") or keys.config, keys.origin)
    rope = text.optional_object("rope_parameters") or text.optional_object("rope_scaling") or {}
    return MediaKeys(rope, keys.origin)


def _tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    check_patches(media, settings, MediaKind.IMAGE)
    merged = media.vision.merge_size**2

    def layout(facts: ItemFacts) -> TokenLayout:
        return tokens.layout([tokens.row] * (math.prod(facts.grid) // merged))

    return KindTokens(tokens.row, layout)


def _video_tokens(
    media: MediaConfig, settings: ImageSettings, vocabulary: Vocabulary, config: dict[str, Any]
) -> KindTokens:
    """All rows one after the other, or, of Qwen3-VL, those of each step in time between two tokens, after its time in seconds."""
    # Who reads a config needs neither.
    import numpy as np

    from headrace.messages.media import time_places

    tokens = Tokens(vocabulary, token_of(config, "video_token_id", 151656))
    check_patches(media, settings, MediaKind.VIDEO)
    merged = media.vision.merge_size**2
    tokens.text(tokens.row)
    if media.family != "qwen3_vl":

        def plain(facts: ItemFacts) -> TokenLayout:
            layout = tokens.layout([tokens.row] * (math.prod(facts.grid) // merged))
            last = np.array([facts.grid[0] - 1])
            num_places = int(time_places(last, media.vision.places_per_second * facts.step_s or 1.0)[0]) + 1
            return replace(layout, extra_places=max(0, num_places - layout.num_rows))

        return KindTokens(tokens.row, plain)
    begin, end = tokens.id("<|vision_start|>"), tokens.id("<|vision_end|>")

    def layout(facts: ItemFacts) -> TokenLayout:
        steps, height, width = facts.grid
        together = media.vision.temporal_patch_size
        fps = together / facts.step_s
        ids: list[int] = []
        for first in range(0, steps * together, together):
            last = min(first + together, facts.num_frames) - 1
            ids += tokens.ids(f"<{(first / fps + last / fps) / 2:.1f} seconds>")
            ids += [begin, *[tokens.row] * (height * width // merged), end]
        return tokens.layout(ids)

    return KindTokens(tokens.row, layout)


def _vision(read: Callable[[MediaKeys, MediaKeys], MediaConfig], video_processor: str, flat_text: str = "") -> Vision:
    return Vision(
        read=read,
        tokens=_tokens,
        image_processor="Qwen2VL",
        video_processor=video_processor,
        video_tokens=_video_tokens,
        flat_text=flat_text,
    )


def _gguf_rope(file: "GgufFile", config: dict[str, Any]) -> dict[str, Any]:
    sections = file.listed(f"{file.get('general.architecture')}.rope.dimension_sections", int)[:3]
    rope = {"rope_theta": config["rope_theta"], "mrope_section": sections}
    return {"rope_parameters": rope | {"mrope_interleaved": config["model_type"] == "qwen3_vl_text"}}


def _mmproj(model_type: str, architecture: str, own: Callable[[VisionKeys], dict[str, Any]]) -> Projector:
    """own: keys of its vision_config, beside those of all."""

    def config(keys: VisionKeys) -> dict[str, Any]:
        tower = keys.tower()
        shared = {
            "depth": tower["num_hidden_layers"],
            "num_heads": tower["num_attention_heads"],
            "patch_size": tower["patch_size"],
            "temporal_patch_size": _FRAMES,
            "spatial_merge_size": keys.count("spatial_merge_size", 2),
        }
        return {
            "model_type": model_type,
            "architectures": [architecture],
            "image_token_id": keys.own_token("<|image_pad|>"),
            "video_token_id": keys.own_token("<|video_pad|>"),
            "vision_config": {**shared, **own(keys)},
        }

    return Projector(
        architectures=("qwen3vl" if model_type == "qwen3_vl" else "qwen2vl",),
        output=("mm.2.weight", 0),
        config=config,
        processor=partial(_mmproj_processor, _PIXELS[model_type]),
        layers="visual.blocks.{}.",
        layer={
            "ln1": "norm1",
            "ln2": "norm2",
            "attn_qkv": "attn.qkv",
            "attn_q": "attn.qkv",
            "attn_k": "attn.qkv",
            "attn_v": "attn.qkv",
            "attn_out": "attn.proj",
            **_MLP[model_type],
        },
        names={
            "v.patch_embd.weight": "visual.patch_embed.proj.weight",
            "v.patch_embd.weight.1": "visual.patch_embed.proj.weight",
            "v.patch_embd.bias": "visual.patch_embed.proj.bias",
            **{theirs: f"visual.{ours}" for theirs, ours in _MERGER[model_type].items()},
        },
        # Older converters write a table that none of them uses.
        unused=frozenset() if model_type == "qwen3_vl" else frozenset({"v.position_embd.weight"}),
    )


def _mmproj_processor(pixels: tuple[int, int], keys: VisionKeys) -> dict[str, Any]:
    """As the published models have it; of the files only new ones have the numbers of pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": keys.count("patch_size"),
        "temporal_patch_size": _FRAMES,
        "merge_size": keys.count("spatial_merge_size", 2),
        "min_pixels": keys.count("image_min_pixels", pixels[0]),
        "max_pixels": keys.count("image_max_pixels", pixels[1]),
        **keys.statistics(),
    }


def _mmproj_qwen2(keys: VisionKeys) -> dict[str, Any]:
    tower = keys.tower()
    return {
        "embed_dim": tower["hidden_size"],
        "mlp_ratio": tower["intermediate_size"] / tower["hidden_size"],
        "hidden_act": keys.activation,
        "hidden_size": keys.rows("mm.2.weight"),
    }


def _mmproj_qwen2_5(keys: VisionKeys) -> dict[str, Any]:
    """Every so many layers tokens see the whole image. The window and the pace of videos are those of all published models."""
    tower, every = keys.tower(), keys.count("n_wa_pattern")
    return {
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "hidden_act": keys.activation,
        "window_size": keys.count("window_size", 112),
        "fullatt_block_indexes": list(range(every - 1, tower["num_hidden_layers"], every)),
        "tokens_per_second": 2,
        "out_hidden_size": keys.rows("mm.2.weight"),
    }


def _mmproj_qwen3(keys: VisionKeys) -> dict[str, Any]:
    tower = keys.tower()
    return {
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "hidden_act": "gelu_pytorch_tanh" if keys.activation == "gelu" else keys.activation,
        "out_hidden_size": keys.rows("mm.2.weight"),
        "num_position_embeddings": keys.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": [
            layer for layer in range(tower["num_hidden_layers"]) if keys.has(f"v.deepstack.{layer}.norm.weight")
        ],
    }


_FRAMES = 2  # of a patch
_PIXELS = {"qwen2_vl": (3136, 12845056), "qwen2_5_vl": (3136, 12845056), "qwen3_vl": (65536, 16777216)}
_MLP = {
    "qwen2_vl": {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "qwen2_5_vl": {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    "qwen3_vl": {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
}
_SECOND_MERGER = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_MERGER = {
    "qwen2_vl": _SECOND_MERGER,
    "qwen2_5_vl": _SECOND_MERGER,
    "qwen3_vl": {
        "v.position_embd": "pos_embed",
        "v.post_ln": "merger.norm",
        "mm.0": "merger.linear_fc1",
        "mm.2": "merger.linear_fc2",
        **{
            f"v.deepstack.{{}}.{part}": f"deepstack_merger_list.{{}}.{ours}"
            for part, ours in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))
        },
    },
}

FAMILY = Family(
    decoders={
        "qwen2_vl_text": _QWEN2_TEXT,
        "qwen2_5_vl_text": _QWEN2_TEXT,
        "qwen3_vl_text": Decoder(name="qwen3", options=qwen3.OPTIONS, sliding="upper", defaults=_QWEN3, is_inner=True),
    },
    vision={
        "qwen2_vl": _vision(_qwen2_vl, "Qwen2VL", flat_text="qwen2_vl_text"),
        "qwen2_5_vl": _vision(_qwen2_5_vl, "Qwen2VL", flat_text="qwen2_5_vl_text"),
        "qwen3_vl": _vision(_qwen3_vl, "Qwen3VL"),
    },
    gguf={
        "qwen2vl": Gguf(model_type="qwen2_vl_text", architecture="Qwen2VLForConditionalGeneration", config=_gguf_rope),
        "qwen3vl": Gguf(model_type="qwen3_vl_text", architecture="Qwen3VLForConditionalGeneration", config=_gguf_rope),
    },
    projectors={
        "qwen2vl_merger": _mmproj("qwen2_vl", "Qwen2VLForConditionalGeneration", _mmproj_qwen2),
        "qwen2.5vl_merger": _mmproj("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _mmproj_qwen2_5),
        "qwen3vl_merger": _mmproj("qwen3_vl", "Qwen3VLForConditionalGeneration", _mmproj_qwen3),
    },
)
