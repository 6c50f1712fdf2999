"""How a checkpoint wants sounds to be prepared: `AudioSettings`, read from its `preprocessor_config.json` or `processor_config.json`.

Owns which feature extractors are known (Whisper's), with the defaults of transformers, and the limits of their settings. A setting that is not known
is refused, since it may change the values. Does not prepare anything (`multimodal.spectrogram`). Imports neither torch nor transformers.
"""

from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.json_file import read_json_object
from headrace.errors import ModelError

_KIND = "WhisperFeatureExtractor"

_MOST_FRAMES = 1 << 14

_OF_NO_EFFECT = frozenset({
    "feature_extractor_type", "processor_class", "auto_map", "device", "return_tensors", "model_input_names", "return_attention_mask",
    "mel_filters",
})  # fmt: skip
"""Settings that do not change the values of one sound. Older files list the mel filters, which transformers computes anew."""


class AudioSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the values of a sound: log-mel features, as `WhisperFeatureExtractor` of transformers computes them.

    sampling_rate: samples in a second. num_mel_bins: values of a frame. n_fft: samples of a frame, even. hop_length: samples from one frame to the
    next. chunk_seconds: the length to which a sound is padded, and that it may have at most.
    """

    sampling_rate: int = 16000
    num_mel_bins: int = 80
    n_fft: int = 400
    hop_length: int = 160
    chunk_seconds: int = 30

    @property
    def chunk_samples(self) -> int:
        """Samples of the longest sound."""
        return self.chunk_seconds * self.sampling_rate

    @property
    def chunk_frames(self) -> int:
        """Frames of the longest sound."""
        return self.chunk_samples // self.hop_length


def read_audio_settings(folder: Path) -> AudioSettings:
    """The settings of a checkpoint's folder. Raises ModelError, with the reason if sounds cannot be prepared."""
    combined = folder / "processor_config.json"
    nested = read_json_object(combined).get("feature_extractor") if combined.is_file() else None
    if isinstance(nested, dict):
        return audio_settings(nested)
    if not (folder / "preprocessor_config.json").is_file():
        raise ModelError("preprocessor_config.json is missing: it says how audio is prepared")
    return audio_settings(read_json_object(folder / "preprocessor_config.json"))


def audio_settings(config: dict[str, Any]) -> AudioSettings:
    """The settings of such a file. Raises ModelError."""
    kind = config.get("feature_extractor_type")
    if kind != _KIND:
        raise ModelError(f"audio for the feature extractor {kind!r:.80} cannot be prepared; those for {_KIND} can")
    given = {key: value for key, value in config.items() if value is not None and key not in _OF_NO_EFFECT}
    settings = AudioSettings(
        sampling_rate=_count(given, "sampling_rate", 16000, least=4000, most=96000),
        num_mel_bins=_count(given, "feature_size", 80, least=1, most=256),
        n_fft=_count(given, "n_fft", 400, least=16, most=4096),
        hop_length=_count(given, "hop_length", 160, least=16, most=4096),
        chunk_seconds=_count(given, "chunk_length", 30, least=1, most=60),
    )
    if settings.n_fft % 2 or settings.hop_length > settings.n_fft:
        raise ModelError(
            f"the feature extractor's n_fft is {settings.n_fft} and its hop_length {settings.hop_length}; expected an "
            "even n_fft that is not less than hop_length"
        )
    if settings.chunk_frames > _MOST_FRAMES:
        raise ModelError(
            f"the feature extractor makes {settings.chunk_frames} frames; at most {_MOST_FRAMES} are served"
        )
    _expect(given, "n_samples", settings.chunk_samples)
    _expect(given, "nb_max_frames", settings.chunk_frames)
    _refuse_other(given, "dither", 0)
    _refuse_other(given, "padding_value", 0)
    _refuse_other(given, "padding_side", "right")
    _refuse_other(given, "do_normalize", False)
    if given:
        raise ModelError(f"the feature extractor has a setting that is not known: {', '.join(sorted(given))!s:.200}")
    return settings


def _count(given: dict[str, Any], name: str, default: int, *, least: int, most: int) -> int:
    """Takes a whole number out of `given`. Raises ModelError."""
    value = given.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, value, f"a whole number from {least} to {most}")
    return value


def _expect(given: dict[str, Any], name: str, derived: int) -> None:
    """Takes a number out of `given` that follows from others. Raises ModelError if it contradicts them."""
    value = given.pop(name, derived)
    if isinstance(value, bool) or value != derived:
        raise _wrong(name, value, f"{derived}, which follows from its other settings")


def _refuse_other(given: dict[str, Any], name: str, served: object) -> None:
    """Takes a setting out of `given` of which only one value is served. Raises ModelError for any other."""
    value = given.pop(name, served)
    if isinstance(value, bool) != isinstance(served, bool) or value != served:
        raise ModelError(f"the feature extractor's {name} is {value!r:.80}, which is not served; {served!r} is")


def _wrong(name: str, value: object, expected: str) -> ModelError:
    return ModelError(f"the feature extractor's {name} is {value!r:.80}; expected {expected}")
