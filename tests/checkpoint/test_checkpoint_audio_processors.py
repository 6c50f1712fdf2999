"""Settings for sounds: those that transformers writes are read, and what is not served, or makes no sense, is refused in words."""

import json
import math

import pytest
import transformers

from headrace.checkpoint.preprocessor_config import AudioSettings, audio_settings, read_audio_settings
from headrace.errors import ModelError

QWEN2_AUDIO = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "processor_class": "Qwen2AudioProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
}
WHISPER = {"feature_extractor_type": "WhisperFeatureExtractor"}


def test_the_file_of_qwen2_audio_is_read(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN2_AUDIO))
    settings = read_audio_settings(tmp_path)

    assert settings == AudioSettings(num_mel_bins=128)
    assert (settings.chunk_samples, settings.chunk_frames) == (480000, 3000)


def test_defaults_are_those_of_transformers():
    extractor = transformers.WhisperFeatureExtractor()
    settings = audio_settings(WHISPER)

    assert settings == AudioSettings() == audio_settings(extractor.to_dict())
    assert (settings.chunk_samples, settings.chunk_frames) == (extractor.n_samples, extractor.nb_max_frames)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_size": 128, "return_attention_mask": True},
        {"sampling_rate": 22050, "chunk_length": 7, "hop_length": 99, "n_fft": 512, "feature_size": 40},
    ],
)
def test_what_transformers_saves_is_read(tmp_path, options):
    extractor = transformers.WhisperFeatureExtractor(**options)
    extractor.save_pretrained(tmp_path)
    settings = read_audio_settings(tmp_path)

    assert settings.num_mel_bins == extractor.feature_size
    assert settings.sampling_rate == extractor.sampling_rate
    assert (settings.n_fft, settings.hop_length) == (extractor.n_fft, extractor.hop_length)
    assert (settings.chunk_samples, settings.chunk_frames) == (extractor.n_samples, extractor.nb_max_frames)


def test_settings_in_the_file_of_the_whole_processor_come_first(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN2_AUDIO))
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"processor_class": "Qwen2AudioProcessor", "feature_extractor": {**WHISPER, "feature_size": 40}})
    )
    assert read_audio_settings(tmp_path).num_mel_bins == 40

    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2AudioProcessor"}))
    assert read_audio_settings(tmp_path).num_mel_bins == 128


def test_null_is_the_default_and_lists_of_filters_are_not_looked_at():
    assert (
        audio_settings({**WHISPER, "hop_length": None, "dither": None, "mel_filters": [[0.0] * 80]}) == AudioSettings()
    )


def test_without_a_file_sounds_cannot_be_prepared(tmp_path):
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        read_audio_settings(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_audio_settings(tmp_path)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"dither": 0.1}, "dither is 0.1, which is not served"),
        ({"dither": math.nan}, "dither is nan, which is not served"),
        ({"dither": False}, "dither is False, which is not served"),
        ({"padding_value": 1.0}, "padding_value is 1.0, which is not served"),
        ({"padding_side": "left"}, "padding_side is 'left', which is not served"),
        ({"do_normalize": True}, "do_normalize is True, which is not served"),
        ({"do_normalize": 0}, "do_normalize is 0, which is not served"),
        ({"preemphasis": 0.97}, "not known: preemphasis"),
        ({"x" * 500: 1}, "not known"),
        ({"feature_extractor_type": "SeamlessM4TFeatureExtractor"}, "'SeamlessM4TFeatureExtractor' cannot be prepared"),
        ({"feature_extractor_type": None}, "None cannot be prepared"),
        ({"feature_extractor_type": ["WhisperFeatureExtractor"]}, "cannot be prepared"),
        ({"n_samples": 480001}, "n_samples is 480001; expected 480000"),
        ({"n_samples": True}, "n_samples is True"),
        ({"nb_max_frames": 1500}, "nb_max_frames is 1500; expected 3000"),
        ({"nb_max_frames": "3000"}, "nb_max_frames is '3000'"),
        ({"chunk_length": 60}, "n_samples is 480000; expected 960000"),
        ({"chunk_length": 61}, "chunk_length is 61; expected a whole number from 1 to 60"),
        ({"chunk_length": 0}, "chunk_length is 0"),
        ({"chunk_length": 29.5}, "chunk_length is 29.5"),
        ({"sampling_rate": 3999}, "sampling_rate is 3999"),
        ({"sampling_rate": 10**30}, "sampling_rate is 1000"),
        ({"sampling_rate": "16000"}, "sampling_rate is '16000'"),
        ({"feature_size": 257}, "feature_size is 257"),
        ({"feature_size": 0}, "feature_size is 0"),
        ({"feature_size": True}, "feature_size is True"),
        ({"n_fft": 8192}, "n_fft is 8192"),
        ({"n_fft": 401}, "n_fft is 401 and its hop_length 160; expected an even n_fft"),
        ({"n_fft": 100}, "n_fft is 100 and its hop_length 160"),
        ({"hop_length": 0}, "hop_length is 0"),
        ({"hop_length": -160}, "hop_length is -160"),
        ({"hop_length": 16}, "makes 30000 frames; at most 16384 are served"),
        ({"hop_length": math.inf}, "hop_length is inf"),
    ],
)
def test_what_is_not_served_is_refused_in_words(changed, words):
    with pytest.raises(ModelError, match=words) as error:
        audio_settings({**QWEN2_AUDIO, **changed})
    assert len(str(error.value)) < 400


def test_every_value_of_every_setting_is_read_or_refused():
    values = (None, True, False, 0, -1, 1, 400, 1 << 80, 0.5, math.nan, "", "right", [], [1], {}, {"a": 1})
    for name in (*QWEN2_AUDIO, "dither", "do_normalize", "other"):
        for value in values:
            try:
                settings = audio_settings({**QWEN2_AUDIO, name: value})
            except ModelError:
                continue
            assert settings.chunk_frames <= 1 << 14
