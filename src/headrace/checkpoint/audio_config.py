"""What a checkpoint with ears says of them in `config.json`: `AudioConfig`."""

from typing import Any

import msgspec

SERVED_AUDIO = {"qwen2_audio": "Qwen2-Audio"}


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ears of a model."""

    family: str
    audio_token_id: int
    num_mel_bins: int
    max_positions: int


def read_audio(config: dict[str, Any], origin: str = "config.json") -> tuple[AudioConfig | None, str]:
    """The ears of a whole config.json, and why they are not served."""
    return None, ""
