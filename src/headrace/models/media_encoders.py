"""Which family of models that see or hear has which encoder."""

from headrace.checkpoint.audio_config import AudioConfig
from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.weight import Placement
from headrace.models.audio.qwen2_audio import Qwen2AudioEncoder
from headrace.models.media import MediaEncoder
from headrace.models.vision.gemma3 import Gemma3Encoder
from headrace.models.vision.idefics3 import Idefics3Encoder
from headrace.models.vision.internvl import InternVlEncoder
from headrace.models.vision.llava import LlavaEncoder
from headrace.models.vision.llava_onevision import LlavaOnevisionEncoder
from headrace.models.vision.qwen_vl import QwenVlEncoder


def make_encoder(config: ModelConfig, placement: Placement) -> MediaEncoder:
    """The encoder of a model with `ModelConfig.media` or `audio`, without weights. Raises ModelError for what its family does not have."""
    if config.audio is not None:
        assert config.media is None, "one encoder is served"
        return _ears(config.audio, config, placement)
    assert config.media is not None, config.model_type
    return _eyes(config.media, config, placement)


def _ears(audio: AudioConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    match audio.family:
        case "qwen2_audio":
            return Qwen2AudioEncoder(audio, config.hidden_size, placement)
        case family:
            raise AssertionError(f"{family} is served, but has no encoder")


def _eyes(media: MediaConfig, config: ModelConfig, placement: Placement) -> MediaEncoder:
    match media.family:
        case "llava" | "mistral3":
            return LlavaEncoder(media, config.hidden_size, config.rms_norm_eps, placement)
        case "llava_next" | "llava_onevision":
            return LlavaOnevisionEncoder(media, config.hidden_size, config.rms_norm_eps, placement)
        case "idefics3" | "smolvlm":
            return Idefics3Encoder(media, config.hidden_size, placement)
        case "gemma3":
            return Gemma3Encoder(media, config.hidden_size, placement)
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
            if media.vision.out_size != config.hidden_size:
                raise ModelError(
                    f"the vision tower gives {media.vision.out_size} elements, but the text model takes {config.hidden_size}"
                )
            return QwenVlEncoder(media, placement)
        case "internvl":
            return InternVlEncoder(media, config.hidden_size, placement)
        case family:
            raise AssertionError(f"{family} is served, but has no encoder")
