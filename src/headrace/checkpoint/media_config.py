"""What a checkpoint with eyes says of them in `config.json`: `MediaConfig`, read from the parts around the text model's config.

Owns the keys of the towers that families share; a family reads its own (`family.Vision`), with the defaults of transformers, and says why a
checkpoint is served without its eyes. Reads no weights, and imports neither torch nor transformers.
"""

from typing import Any

import msgspec

from headrace.checkpoint.families import vision
from headrace.checkpoint.media_keys import MediaKeys, NotServedError, TowerConfig
from headrace.errors import ModelError


class VisionConfig(TowerConfig, frozen=True, kw_only=True):
    """The tower: what encodes patches of an image.

    tower: its kind: clip, siglip, pixtral, or one that a family has for itself.
    image_size: pixels of a side of the (largest) image; 0 = any. patch_size: pixels of a side of a patch. temporal_patch_size: frames of a patch.
    merge_size: patches of a side that become one token. window_size: pixels of a side of a window of attention, 0 = none.
    rope_theta: of its rotary positions. out_size: elements of what it gives for each token, where it projects itself. num_positions: of a table
    that is stretched over the image. deep_layers: those whose output the text model's first layers get, too (DeepStack). places_per_second: how far
    the tokens of a video are from each other in time, 0 = one place a step (Qwen2.5-VL). rms, qkv_bias,
    final_norm: of InternVL: norms are RMSNorms; q, k and v have biases; there is a norm after the last layer.
    """

    tower: str
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

    family: the model type at the top of its config.json. image_token_id: the token that stands for each row of an image in what the model reads.
    drops_first: the tower's first token, which is of no patch, is dropped. projector_act: between the projector's layers. projector_bias: of its
    linear layers. shuffle: tokens of a side that become one (Idefics3). mm_tokens: tokens of an image of Gemma 3. rope_sections: pairs of each
    head that turn by time, height and width (M-RoPE), rope_interleaved: in turns; empty = positions are those of text. sees_ahead: tokens of an
    image see each other in both directions. pinpoints: (height, width) of the larger images of LLaVA-NeXT and LLaVA-OneVision; max_tiles: they
    have the patches of as many tiles at most, 0 = of all.
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
    inner = config.get("vision_config")
    if not isinstance(inner, dict):
        return None, ""
    own = vision().get(family) if isinstance(family, str) else None
    if own is None:
        return None, f"images of model type {family!r:.80} are not served; those of these are: {', '.join(vision())}"
    try:
        return own.read(MediaKeys(config, origin), MediaKeys(inner, f"{origin}: vision_config")), ""
    except NotServedError as reason:
        return None, str(reason)


def image_token(keys: MediaKeys, default: int | None = None) -> int:
    """The token that stands for each row of an image."""
    for name in ("image_token_id", "image_token_index"):
        token_id = keys.token(name)
        if token_id is not None:
            return token_id
    if default is None:
        raise ModelError(f"{keys.origin}: image_token_id is missing")
    return default


def numbers(keys: MediaKeys, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A key that is a list of integers."""
    value = keys.config.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ModelError(f"{keys.origin}: {name} is {value!r:.80}; expected a list of integers")
    return tuple(value)


def transformer(
    keys: MediaKeys,
    tower: str,
    *,
    act: str,
    eps: float,
    defaults: tuple[int, int, int, int, int, int],
    **more: Any,
) -> VisionConfig:
    """A tower of which the sizes are under the common names. defaults: hidden_size, intermediate_size, layers, heads, image_size, patch_size."""
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


def clip(keys: MediaKeys) -> VisionConfig:
    """A CLIP tower."""
    return transformer(keys, "clip", act="quick_gelu", eps=1e-5, defaults=(768, 3072, 12, 12, 224, 32))


def siglip(keys: MediaKeys) -> VisionConfig:
    """A SigLIP tower."""
    return transformer(keys, "siglip", act="gelu_pytorch_tanh", eps=1e-6, defaults=(768, 3072, 12, 12, 224, 16))


def pixtral(keys: MediaKeys) -> VisionConfig:
    """A Pixtral tower."""
    return transformer(
        keys,
        "pixtral",
        act="gelu",
        eps=1e-5,
        defaults=(1024, 4096, 24, 16, 1024, 16),
        norm_eps=1e-5,
        rope_theta=theta(keys),
    )


def theta(keys: MediaKeys) -> float:
    """The base of rotary positions."""
    rope = MediaKeys(keys.optional_object("rope_parameters") or {}, keys.origin)
    return rope.positive("rope_theta", keys.positive("rope_theta", 10000.0))
