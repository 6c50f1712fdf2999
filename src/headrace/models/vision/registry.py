"""Which family of models that see has which encoder."""

from headrace.checkpoint.model_config import ModelConfig
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder
from headrace.models.vision.llava import LlavaEncoder


def make_encoder(config: ModelConfig, placement: Placement) -> MediaEncoder:
    """The encoder of a model with `ModelConfig.media`, without weights. Raises ModelError for what its family does not have."""
    media = config.media
    assert media is not None, config.model_type
    match media.family:
        case "llava" | "mistral3":
            return LlavaEncoder(media, config.hidden_size, config.rms_norm_eps, placement)
        case family:
            raise AssertionError(f"{family} is served, but has no encoder")
