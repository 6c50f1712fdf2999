"""Qwen2-Audio: Whisper's encoder before Qwen2."""

from headrace.checkpoint.config_keys import MediaKeys
from headrace.checkpoint.family import Audio, Family
from headrace.checkpoint.media_config import AudioConfig, TowerConfig
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens


def _read(keys: MediaKeys, audio: MediaKeys) -> AudioConfig:
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


def _tokens(audio: AudioConfig, tokens: Tokens) -> KindTokens:
    def layout(facts: ItemFacts) -> TokenLayout:
        """Two neighbouring positions are one row."""
        return tokens.layout([tokens.row] * (facts.grid[0] // 2))

    return KindTokens(tokens.row, layout)


FAMILY = Family(audio={"qwen2_audio": Audio(read=_read, tokens=_tokens)})
