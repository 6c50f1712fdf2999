"""The vision and audio encoders of models as `config.json` has them: `MediaConfig`, `AudioConfig`, and readers of the towers that families share.

A family reads its own keys (`family.Vision`, `family.Audio`), with the defaults of transformers, and says why a checkpoint is served without its
encoder. Imports neither torch nor transformers.
"""

from typing import Any

import msgspec

from headrace.checkpoint.config_keys import MediaKeys
from headrace.errors import ModelError


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of an encoder.

    num_layers: those that are computed. norm_eps: of its LayerNorms or RMSNorms. full_layers: of a tower whose tokens see those of their window only,
    the layers in which they see the whole item.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    norm_eps: float
    full_layers: tuple[int, ...] = ()


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
    """The vision encoder of a model.

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


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The audio encoder of a model.

    family: the model type at the top of its config.json. audio_token_id: the token that stands for each row of a sound in what the model reads.
    num_mel_bins: values of a frame. max_positions: of the longest sound that the tower takes, each of two frames.
    """

    family: str
    audio_token_id: int
    num_mel_bins: int
    max_positions: int
    tower: TowerConfig


def image_token(keys: MediaKeys, default: int | None = None) -> int:
    for name in ("image_token_id", "image_token_index"):
        token_id = keys.token(name)
        if token_id is not None:
            return token_id
    if default is None:
        raise ModelError(f"{keys.origin}: image_token_id is missing")
    return default


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
    return transformer(keys, "clip", act="quick_gelu", eps=1e-5, defaults=(768, 3072, 12, 12, 224, 32))


def siglip(keys: MediaKeys) -> VisionConfig:
    return transformer(keys, "siglip", act="gelu_pytorch_tanh", eps=1e-6, defaults=(768, 3072, 12, 12, 224, 16))


def pixtral(keys: MediaKeys) -> VisionConfig:
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
    rope = MediaKeys(keys.optional_object("rope_parameters") or {}, keys.origin)
    return rope.positive("rope_theta", keys.positive("rope_theta", 10000.0))
