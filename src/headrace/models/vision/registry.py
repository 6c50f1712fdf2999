"""Which family of models that see has which encoder."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.vision.gemma3 import Gemma3Encoder
from headrace.models.vision.idefics3 import Idefics3Encoder
from headrace.models.vision.internvl import InternVlEncoder
from headrace.models.vision.llava import LlavaEncoder
from headrace.models.vision.llava_onevision import LlavaOnevisionEncoder
from headrace.models.vision.qwen_vl import QwenVlEncoder


def make_encoder(config: ModelConfig, placement: Placement) -> MediaEncoder:
    """The encoder of a model with `ModelConfig.media`, without weights. Raises ModelError for what its family does not have."""
    media = config.media
    assert media is not None, config.model_type
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
