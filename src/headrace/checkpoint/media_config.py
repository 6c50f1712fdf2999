"""What a checkpoint with eyes says of them in `config.json`: `MediaConfig`, read from the parts around the text model's config.

Owns the families that are served (`SERVED`), every spelling of their keys, and the reasons why a checkpoint is served without its eyes. The
defaults are those of transformers. Reads no weights, and imports neither torch nor transformers.
"""

from typing import Any, Literal

import msgspec

from headrace.checkpoint.media_keys import MediaKeys, NotServedError, TowerConfig
from headrace.errors import ModelError

TowerName = Literal["clip", "siglip", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]

SERVED: dict[str, str] = {
    "llava": "LLaVA 1.5, Pixtral and others with a CLIP, SigLIP or Pixtral tower",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM, SmolVLM2 (images)",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL (dense)",
    "gemma3": "Gemma 3 from 4B on",
    "llava_next": "LLaVA 1.6 (LLaVA-NeXT)",
    "llava_onevision": "LLaVA-OneVision (images)",
    "internvl": "InternVL 2.5, 3 and 3.5 (transformers' format)",
    "mistral3": "Mistral Small 3.1 and later",
}
"""Families by the model type at the top of their config.json, with what people call them."""


class VisionConfig(TowerConfig, frozen=True, kw_only=True):
    """The tower: what encodes patches of an image.

    image_size: pixels of a side of the (largest) image; 0 = any. patch_size: pixels of a side of a patch. temporal_patch_size: frames of a patch.
    merge_size: patches of a side that become one token. window_size: pixels of a side of a window of attention, 0 = none.
    rope_theta: of its rotary positions. out_size: elements of what it gives for each token, where it projects itself. num_positions: of a table
    that is stretched over the image. deep_layers: those whose output the text model's first layers get, too (DeepStack). places_per_second: how far
    the tokens of a video are from each other in time, 0 = one place a step (Qwen2.5-VL). rms, qkv_bias,
    final_norm: of InternVL: norms are RMSNorms; q, k and v have biases; there is a norm after the last layer.
    """

    tower: TowerName
    image_size: int = 0
    patch_size: int
    num_channels: int = 3
    temporal_patch_size: int = 1
    merge_size: int = 1
    window_size: int = 0
    rope_theta: float = 10000.0
    out_size: int = 0
    num_positions: int = 0
    deep_layers: tuple[int, ...] = ()
    places_per_second: float = 0.0
    rms: bool = False
    qkv_bias: bool = True
    final_norm: bool = False


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The eyes of a model.

    family: of `SERVED`. image_token_id: the token that stands for each row of an image in what the model reads. drops_first: the tower's first
    token, which is of no patch, is dropped. projector_act: between the projector's layers. projector_bias: of its linear layers. shuffle:
    tokens of a side that become one (Idefics3). mm_tokens: tokens of an image of Gemma 3. rope_sections: pairs of each head that turn by time,
    height and width (M-RoPE), rope_interleaved: in turns; empty = positions are those of text. sees_ahead: tokens of an image see each other in
    both directions. pinpoints: (height, width) of the larger images of LLaVA-NeXT and LLaVA-OneVision; max_tiles: they have the patches of as many
    tiles at most, 0 = of all.
    """

    family: str
    image_token_id: int
    vision: VisionConfig
    drops_first: bool = False
    projector_act: str = "gelu"
    projector_bias: bool = True
    shuffle: int = 1
    mm_tokens: int = 0
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False
    sees_ahead: bool = False
    pinpoints: tuple[tuple[int, int], ...] = ()
    max_tiles: int = 0


def read_media(config: dict[str, Any], origin: str = "config.json") -> tuple[MediaConfig | None, str]:
    """The eyes of a whole config.json, and why they are not served; (None, "") of a model without any. Raises ModelError for invalid values."""
    family = config.get("model_type")
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None, ""
    if not isinstance(family, str) or family not in SERVED:
        return None, f"images of model type {family!r:.80} are not served; those of these are: {', '.join(SERVED)}"
    try:
        return _READERS[family](MediaKeys(config, origin), MediaKeys(vision, f"{origin}: vision_config")), ""
    except NotServedError as reason:
        return None, str(reason)


def _image_token(keys: MediaKeys, default: int | None = None) -> int:
    for name in ("image_token_id", "image_token_index"):
        token_id = keys.token(name)
        if token_id is not None:
            return token_id
    if default is None:
        raise ModelError(f"{keys.origin}: image_token_id is missing")
    return default


def _numbers(keys: MediaKeys, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = keys.config.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ModelError(f"{keys.origin}: {name} is {value!r:.80}; expected a list of integers")
    return tuple(value)


def _transformer(
    keys: MediaKeys,
    tower: TowerName,
    *,
    act: str,
    eps: float,
    defaults: tuple[int, int, int, int, int, int],
    **more: Any,
) -> VisionConfig:
    """defaults: hidden_size, intermediate_size, layers, heads, image_size, patch_size."""
    hidden_size, inner, layers, heads, image_size, patch_size = defaults
    hidden_size = keys.count("hidden_size", default=hidden_size)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_layers": keys.count("num_hidden_layers", default=layers),
        **keys.heads(hidden_size, "num_attention_heads", heads, 4 if tower == "pixtral" else 1),
        "intermediate_size": keys.count("intermediate_size", default=inner),
        "hidden_act": keys.act("hidden_act", act, gated=tower == "pixtral"),
        "norm_eps": keys.positive("layer_norm_eps", eps),
        "image_size": keys.side("image_size", image_size),
        "patch_size": keys.side("patch_size", patch_size),
        "num_channels": keys.count("num_channels", default=3),
    }
    if fields["image_size"] < fields["patch_size"]:
        raise ModelError(
            f"{keys.origin}: an image of {fields['image_size']} pixels has no patch of {fields['patch_size']}"
        )
    return VisionConfig(tower=tower, **(fields | more))


def _clip(keys: MediaKeys) -> VisionConfig:
    return _transformer(keys, "clip", act="quick_gelu", eps=1e-5, defaults=(768, 3072, 12, 12, 224, 32))


def _siglip(keys: MediaKeys) -> VisionConfig:
    return _transformer(keys, "siglip", act="gelu_pytorch_tanh", eps=1e-6, defaults=(768, 3072, 12, 12, 224, 16))


def _pixtral(keys: MediaKeys) -> VisionConfig:
    return _transformer(
        keys,
        "pixtral",
        act="gelu",
        eps=1e-5,
        defaults=(1024, 4096, 24, 16, 1024, 16),
        norm_eps=1e-5,
        rope_theta=_theta(keys),
    )


def _theta(keys: MediaKeys) -> float:
    rope = MediaKeys(keys.optional_object("rope_parameters") or {}, keys.origin)
    return rope.positive("rope_theta", keys.positive("rope_theta", 10000.0))


def _llava_tower(keys: MediaKeys, vision: MediaKeys) -> tuple[VisionConfig, bool]:
    """The tower as far as it is computed, and whether its first token is dropped."""
    kind = vision.name("model_type", "clip_vision_model")
    towers = {"clip_vision_model": _clip, "siglip_vision_model": _siglip, "pixtral": _pixtral}
    if kind not in towers:
        raise NotServedError(f"the vision tower {kind!r:.80} is not served; those of these are: {', '.join(towers)}")
    tower = towers[kind](vision)
    layer = keys.config.get(
        "vision_feature_layer", -2 if keys.config.get("model_type") in ("llava", "llava_next") else -1
    )
    if not isinstance(layer, int):
        raise NotServedError("vision_feature_layer names several layers; only one is served")
    # hidden_states[0] is what the first layer takes, and the last one is what the last layer gives.
    num_layers = layer if layer >= 0 else tower.num_layers + 1 + layer
    if not 0 <= num_layers <= tower.num_layers:
        raise ModelError(f"{keys.origin}: vision_feature_layer is {layer}, but the tower has {tower.num_layers} layers")
    strategy = keys.name("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelError(f"{keys.origin}: vision_feature_select_strategy is {strategy!r:.80}; expected default or full")
    drops = strategy == "default"
    if kind == "pixtral":
        drops = False
        if strategy == "default" and keys.config.get("model_type") == "llava":
            raise NotServedError("the strategy 'default' drops a patch of a Pixtral tower; only 'full' is served")
    return msgspec.structs.replace(tower, num_layers=num_layers), drops


def _llava(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower, drops = _llava_tower(keys, vision)
    return MediaConfig(
        family="llava",
        image_token_id=_image_token(keys, 32000),
        vision=tower,
        drops_first=drops,
        projector_act=keys.act("projector_hidden_act", "gelu"),
        projector_bias=keys.says("multimodal_projector_bias", True),
    )


def _llava_next(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "clip_vision_model", "siglip_vision_model", default="clip_vision_model")
    has_first = vision.name("model_type", "clip_vision_model") == "clip_vision_model"
    keys.must_be("vision_feature_select_strategy", "default" if has_first else "full", default="default")
    tower, drops = _llava_tower(keys, vision)
    sizes = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    return MediaConfig(
        family="llava_next",
        image_token_id=_image_token(keys, 32000),
        vision=tower,
        drops_first=drops,
        projector_act=keys.act("projector_hidden_act", "gelu"),
        projector_bias=keys.says("multimodal_projector_bias", True),
        pinpoints=_pinpoints(keys, tower.image_size, sizes),
    )


def _llava_onevision(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "siglip_vision_model", default="siglip_vision_model")
    keys.must_be("vision_feature_select_strategy", "full", default="full")
    tower, _ = _llava_tower(keys, vision)
    aspect = keys.name("vision_aspect_ratio", "anyres_max_9")
    digits = aspect.removeprefix("anyres_max_")
    if digits == aspect or not digits.isdecimal() or int(digits) < 1:
        raise NotServedError(f"vision_aspect_ratio is {aspect!r:.80} in {keys.origin}; only anyres_max_N is served")
    sizes = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
    return MediaConfig(
        family="llava_onevision",
        image_token_id=_image_token(keys, 151646),
        vision=tower,
        projector_act=keys.act("projector_hidden_act", "gelu"),
        projector_bias=keys.says("multimodal_projector_bias", True),
        pinpoints=_pinpoints(keys, tower.image_size, sizes),
        max_tiles=int(digits),
    )


def _pinpoints(keys: MediaKeys, side: int, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    found = keys.config.get("image_grid_pinpoints")
    if found is None:
        found = list(map(list, default))
    if not isinstance(found, list) or not found:
        raise ModelError(f"{keys.origin}: image_grid_pinpoints is {found!r:.80}; expected a list of sizes")
    for size in found:
        if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
            raise ModelError(f"{keys.origin}: image_grid_pinpoints holds {size!r:.80}; expected a height and a width")
        if any(each % side for each in size):
            raise NotServedError(f"image_grid_pinpoints holds {size}, which tiles of {side} pixels do not fill")
    return tuple((height, width) for height, width in found)


def _mistral3(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "pixtral", default="pixtral")
    tower, _ = _llava_tower(keys, vision)
    return MediaConfig(
        family="mistral3",
        image_token_id=_image_token(keys, 10),
        vision=msgspec.structs.replace(tower, merge_size=keys.count("spatial_merge_size", default=2)),
        projector_act=keys.act("projector_hidden_act", "gelu"),
        projector_bias=keys.says("multimodal_projector_bias", False),
    )


def _idefics3(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower = _transformer(vision, "siglip", act="gelu_pytorch_tanh", eps=1e-6, defaults=(1152, 3072, 12, 16, 224, 32))
    return MediaConfig(
        family=keys.config["model_type"],
        image_token_id=_image_token(keys, 128257),
        vision=tower,
        projector_bias=False,
        shuffle=keys.count("scale_factor", default=2),
    )


def _qwen2_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    size = vision.count("embed_dim", default=1280)
    tower = VisionConfig(
        tower="qwen2_vl",
        hidden_size=size,
        num_layers=vision.count("depth", default=32),
        **vision.heads(size, "num_heads", 16, 4),
        intermediate_size=int(size * vision.positive("mlp_ratio", 4)),
        hidden_act=vision.act("hidden_act", "quick_gelu"),
        norm_eps=1e-6,
        patch_size=vision.count("patch_size", default=14),
        num_channels=vision.count("in_channels", default=3),
        rope_theta=_theta(vision),
        temporal_patch_size=vision.count("temporal_patch_size", default=2),
        merge_size=vision.count("spatial_merge_size", default=2),
        out_size=vision.count("hidden_size", default=3584),
    )
    return MediaConfig(
        family="qwen2_vl", image_token_id=_image_token(keys, 151655), vision=tower, rope_sections=_sections(keys)
    )


def _qwen2_5_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    size = vision.count("hidden_size", default=3584)
    tower = VisionConfig(
        tower="qwen2_5_vl",
        hidden_size=size,
        num_layers=vision.count("depth", default=32),
        **vision.heads(size, "num_heads", 16, 4),
        intermediate_size=vision.count("intermediate_size", default=3420),
        hidden_act=vision.act("hidden_act", "silu", gated=True),
        norm_eps=1e-6,
        patch_size=vision.count("patch_size", default=14),
        num_channels=vision.count("in_channels", default=3),
        rope_theta=_theta(vision),
        temporal_patch_size=vision.count("temporal_patch_size", default=2),
        merge_size=vision.count("spatial_merge_size", default=2),
        window_size=vision.count("window_size", default=112),
        full_layers=_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        places_per_second=vision.positive("tokens_per_second", 4),
        out_size=vision.count("out_hidden_size", default=3584),
    )
    return MediaConfig(
        family="qwen2_5_vl", image_token_id=_image_token(keys, 151655), vision=tower, rope_sections=_sections(keys)
    )


def _qwen3_vl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    size = vision.count("hidden_size", default=1152)
    depth = vision.count("depth", default=27)
    deep = _numbers(vision, "deepstack_visual_indexes", (8, 16, 24))
    if list(deep) != sorted(set(deep)) or any(not 0 <= layer < depth for layer in deep):
        raise NotServedError(f"deepstack_visual_indexes {list(deep)} of {depth} layers do not ascend")
    num_text_layers = (keys.optional_object("text_config") or {}).get("num_hidden_layers", 32)
    if isinstance(num_text_layers, int) and len(deep) >= num_text_layers:
        raise NotServedError(
            f"images add to {len(deep)} layers of a text model of {num_text_layers}; to the last none can be added"
        )
    tower = VisionConfig(
        tower="qwen3_vl",
        hidden_size=size,
        num_layers=depth,
        **vision.heads(size, "num_heads", 16, 4),
        intermediate_size=vision.count("intermediate_size", default=4304),
        hidden_act=vision.act("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=1e-6,
        patch_size=vision.count("patch_size", default=16),
        num_channels=vision.count("in_channels", default=3),
        rope_theta=_theta(vision),
        temporal_patch_size=vision.count("temporal_patch_size", default=2),
        merge_size=vision.count("spatial_merge_size", default=2),
        out_size=vision.count("out_hidden_size", default=3584),
        num_positions=vision.count("num_position_embeddings", default=2304),
        deep_layers=deep,
    )
    return MediaConfig(
        family="qwen3_vl",
        image_token_id=_image_token(keys, 151655),
        vision=tower,
        rope_sections=_sections(keys, (24, 20, 20)),
        rope_interleaved=_text_rope(keys).says("mrope_interleaved", True),
    )


def _sections(keys: MediaKeys, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Pairs of a head that turn by time, height and width."""
    sections = _numbers(_text_rope(keys), "mrope_section", default)
    if len(sections) != 3 or min(sections) < 0:
        raise ModelError(f"{keys.origin}: mrope_section is {list(sections)!r:.80}; expected three numbers")
    return sections


def _text_rope(keys: MediaKeys) -> MediaKeys:
    """How the text model rotates."""
    text = MediaKeys(keys.optional_object("text_config") or keys.config, keys.origin)
    rope = text.optional_object("rope_parameters") or text.optional_object("rope_scaling") or {}
    return MediaKeys(rope, keys.origin)


def _gemma3(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "siglip_vision_model", default="siglip_vision_model")
    tower = _siglip(vision)
    tokens = keys.count("mm_tokens_per_image", default=256)
    side = tower.image_size // tower.patch_size
    if int(tokens**0.5) ** 2 != tokens or side % int(tokens**0.5):
        raise ModelError(
            f"{keys.origin}: mm_tokens_per_image is {tokens}, which does not divide {side} x {side} patches"
        )
    return MediaConfig(
        family="gemma3",
        image_token_id=_image_token(keys, 262144),
        vision=tower,
        mm_tokens=tokens,
        sees_ahead=True,
    )


def _internvl(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("use_qk_norm", False, default=False)
    vision.must_be("use_absolute_position_embeddings", True, default=True)
    vision.must_be("norm_type", "layer_norm", "rms_norm", default="layer_norm")
    keys.must_be("vision_feature_layer", -1, default=-1)
    keys.must_be("vision_feature_select_strategy", "default", default="default")
    keys.must_be("downsample_ratio", 0.5, default=0.5)
    tower = _transformer(
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
        image_token_id=_image_token(keys, 151667),
        vision=tower,
        projector_act=keys.act("projector_hidden_act", "gelu"),
        shuffle=2,
    )


_READERS = {
    "llava": _llava,
    "mistral3": _mistral3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "qwen3_vl": _qwen3_vl,
}
