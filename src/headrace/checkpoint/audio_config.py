"""The audio encoder in a checkpoint's `config.json`: `AudioConfig`, read from the parts around the text model's config.

A family reads its own keys (`family.Audio`), and says why a checkpoint is served without audio. Reads no weights, and imports neither torch nor
transformers.
"""

from typing import Any

import msgspec

from headrace.checkpoint.families import audio
from headrace.checkpoint.media_keys import MediaKeys, NotServedError, TowerConfig


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


def read_audio(config: dict[str, Any], origin: str = "config.json") -> tuple[AudioConfig | None, str]:
    """The audio encoder of a whole config.json, and why it is not supported; (None, "") without one. Raises ModelError for invalid values."""
    family = config.get("model_type")
    inner = config.get("audio_config")
    if not isinstance(inner, dict):
        return None, ""
    own = audio().get(family) if isinstance(family, str) else None
    if own is None:
        return None, f"audio of model type {family!r:.80} is not supported; supported: {', '.join(audio())}"
    try:
        return own.read(MediaKeys(config, origin), MediaKeys(inner, f"{origin}: audio_config")), ""
    except NotServedError as reason:
        return None, str(reason)
