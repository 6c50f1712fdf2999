"""What a checkpoint with ears says of them in `config.json`: `AudioConfig`, read from the parts around the text model's config.

Owns the families that are served (`SERVED_AUDIO`), every spelling of their keys, and the reasons why a checkpoint is served without its ears. The
defaults are those of transformers. Reads no weights, and imports neither torch nor transformers.
"""

from typing import Any

import msgspec

from headrace.checkpoint.media_keys import MediaKeys, NotServedError, TowerConfig

SERVED_AUDIO: dict[str, str] = {"qwen2_audio": "Qwen2-Audio"}
"""Families by the model type at the top of their config.json, with what people call them."""


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ears of a model.

    family: of `SERVED_AUDIO`. audio_token_id: the token that stands for each row of a sound in what the model reads. num_mel_bins: values of a
    frame. max_positions: of the longest sound that the tower takes, each of two frames.
    """

    family: str
    audio_token_id: int
    num_mel_bins: int
    max_positions: int
    tower: TowerConfig


def read_audio(config: dict[str, Any], origin: str = "config.json") -> tuple[AudioConfig | None, str]:
    """The ears of a whole config.json, and why they are not served; (None, "") of a model without any. Raises ModelError for invalid values."""
    family = config.get("model_type")
    audio = config.get("audio_config")
    if not isinstance(audio, dict):
        return None, ""
    if not isinstance(family, str) or family not in SERVED_AUDIO:
        return (
            None,
            f"sounds of model type {family!r:.80} are not served; those of these are: {', '.join(SERVED_AUDIO)}",
        )
    try:
        return _qwen2_audio(MediaKeys(config, origin), MediaKeys(audio, f"{origin}: audio_config")), ""
    except NotServedError as reason:
        return None, str(reason)


def _qwen2_audio(keys: MediaKeys, audio: MediaKeys) -> AudioConfig:
    # scale_embedding is not read: transformers does not multiply by it either.
    size = audio.count("d_model", default=1280)
    tower = TowerConfig(
        hidden_size=size,
        num_layers=audio.count("encoder_layers", default=32),
        **audio.heads(size, "encoder_attention_heads", 20),
        intermediate_size=audio.count("encoder_ffn_dim", default=5120),
        hidden_act=audio.act("activation_function", "gelu"),
        norm_eps=1e-5,
    )
    return AudioConfig(
        family="qwen2_audio",
        audio_token_id=_audio_token(keys, 151646),
        num_mel_bins=audio.count("num_mel_bins", default=128),
        max_positions=audio.count("max_source_positions", default=1500),
        tower=tower,
    )


def _audio_token(keys: MediaKeys, default: int) -> int:
    found = (keys.token(name) for name in ("audio_token_index", "audio_token_id"))
    return next((token_id for token_id in found if token_id is not None), default)
