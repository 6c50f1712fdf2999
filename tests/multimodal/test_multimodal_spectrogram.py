"""Log-mel features: those of transformers' `WhisperFeatureExtractor`, of which only the frames that the encoder needs are computed."""

import functools

import numpy as np
import pytest
import transformers

from headrace.checkpoint.preprocessor_config import AudioSettings, audio_settings
from headrace.multimodal.audio import log_mel, num_frames, num_positions

TORCH_TOLERANCE = 2e-4
"""transformers computes in float32 with torch: a transform has an error of about 1e-7 of the loudest frequency, and the quietest value that is
kept has 1e-4 of its amplitude. That is 1e-3 of its own amplitude, 2 * 1e-3 / ln(10) / 4 = 2e-4 as a feature. Seen: 6e-5, beside a loud sine."""

NUMPY_TOLERANCE = 1e-6
"""transformers' other implementation computes in float64, as ours does, and adds the frequencies of a filter in another order: an ulp or two of a
float32 of 1 to 4. Seen: 0."""

LENGTHS = (1600, 1601, 12345, 16000, 79999, 80000, 479681, 479840, 479841, 480000)


def speech(num_samples: int) -> np.ndarray:
    """Voiced syllables of a pitch that moves, with pauses of faint noise."""
    times = np.arange(num_samples) / 16000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * times)) / 16000
    voice = sum(np.sin(number * phase) / number**1.2 for number in range(1, 13))
    return 0.1 * voice * np.clip(np.sin(2 * np.pi * 2 * times), 0, 1) + 1e-4 * noise(num_samples)


def noise(num_samples: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(num_samples)


SOUNDS = {
    "speech": speech,
    "noise": lambda num_samples: 0.1 * noise(num_samples),
    "faint noise": lambda num_samples: 1e-5 * noise(num_samples),
    "silence": np.zeros,
    "sine": lambda num_samples: np.sin(0.3 * np.arange(num_samples)),
    "full scale": lambda num_samples: np.sign(noise(num_samples)),
    "far beyond full scale": lambda num_samples: 1e12 * np.sign(noise(num_samples)),
    "click": lambda num_samples: np.eye(1, num_samples, num_samples - 1)[0],
}


@functools.cache
def extractor(**options: int) -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(**options)


def sound(name: str, num_samples: int) -> np.ndarray:
    return SOUNDS[name](num_samples).astype(np.float32)


def with_torch(samples: np.ndarray, theirs: transformers.WhisperFeatureExtractor) -> np.ndarray:
    """[frames, bins] of the whole chunk."""
    found = theirs(samples, sampling_rate=theirs.sampling_rate, return_tensors="np")
    return found["input_features"][0].T


def with_numpy(samples: np.ndarray, theirs: transformers.WhisperFeatureExtractor) -> np.ndarray:
    """[frames, bins] of the whole chunk."""
    padded = np.pad(samples, (0, theirs.n_samples - len(samples)))
    return theirs._np_extract_fbank_features(padded[None], "cpu")[0].T


@pytest.mark.parametrize(("name", "bins"), [*((name, 128) for name in SOUNDS), ("speech", 80)])
def test_features_are_those_of_transformers(name, bins):
    """Of speech with every length, of other sounds with some."""
    theirs = extractor(feature_size=bins)
    for num_samples in LENGTHS if name == "speech" else (1601, 12345, 480000):
        samples = sound(name, num_samples)
        found = log_mel(samples, audio_settings(theirs.to_dict()))
        expected = with_torch(samples, theirs)[: len(found)]

        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        assert found.shape[1] == bins
        assert np.abs(found - expected).max() <= TORCH_TOLERANCE, num_samples


@pytest.mark.parametrize("name", SOUNDS)
def test_features_are_those_of_transformers_without_torch(name):
    theirs = extractor(feature_size=128)
    for num_samples in (1600, 33333, 480000) if name == "speech" else (1600, 33333):
        samples = sound(name, num_samples)
        found = log_mel(samples, AudioSettings(num_mel_bins=128))

        assert np.abs(found - with_numpy(samples, theirs)[: len(found)]).max() <= NUMPY_TOLERANCE, num_samples


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_rate": 22050, "chunk_length": 3, "feature_size": 40},
        {"n_fft": 512, "hop_length": 512, "chunk_length": 4, "feature_size": 40},
        {"n_fft": 1024, "hop_length": 99, "chunk_length": 2},
    ],
)
def test_other_settings_give_features_of_transformers(options):
    theirs = extractor(**options)
    ours = audio_settings(theirs.to_dict())
    for num_samples in (4 * ours.hop_length, ours.sampling_rate, ours.chunk_samples - 1, ours.chunk_samples):
        samples = sound("speech", num_samples)
        found = log_mel(samples, ours)

        assert np.abs(found - with_numpy(samples, theirs)[: len(found)]).max() <= NUMPY_TOLERANCE, num_samples


def test_positions_are_those_of_the_mask_of_transformers():
    settings, theirs = AudioSettings(), extractor(feature_size=80)
    for num_samples in (1, 160, 161, 320, 321, 16000, *LENGTHS):
        found = theirs(np.zeros(num_samples, np.float32), sampling_rate=16000, return_attention_mask=True)
        num_valid = int(found["attention_mask"].sum())

        assert num_frames(num_samples, settings) == num_valid
        assert num_positions(num_samples, settings) == (num_valid - 1) // 2 + 1


def test_frames_are_those_that_the_positions_need():
    """A position of the second convolution sees frames 2 * position - 2 .. 2 * position + 2 of the features."""
    settings = AudioSettings()
    for num_samples in (1, 159, 160, 161, 320, 321, 640, 16000, 16001, 479520, 479521, 480000):
        positions = num_positions(num_samples, settings)
        found = log_mel(np.zeros(num_samples, np.float32), settings)

        assert len(found) == min(2 * (positions - 1) + 3, 3000)
    assert num_positions(480000, settings) == 1500


def test_features_depend_on_the_samples_alone():
    settings = AudioSettings(num_mel_bins=128)
    for num_samples in (640, 16000, 480000):
        samples = sound("speech", num_samples)
        first = log_mel(samples, settings)
        log_mel(sound("full scale", 480000), settings)
        log_mel(sound("noise", 777), AudioSettings(n_fft=512, sampling_rate=8000))

        assert np.array_equal(log_mel(samples, settings), first)
        assert np.array_equal(log_mel(samples.copy(), settings), first)
        assert np.array_equal(samples, sound("speech", num_samples))


def test_a_frame_is_the_same_wherever_it_is():
    """Frames of the same samples are equal to the bit, whatever block they are computed in."""
    settings = AudioSettings()
    period = sound("noise", 160 * 7)
    found = log_mel(np.tile(period, 200), settings)

    assert np.array_equal(found[7:14], found[700:707])
    assert np.array_equal(found[7:14], found[1386:1393])


def test_zeros_at_the_end_change_no_frame():
    settings = AudioSettings()
    samples = sound("speech", 20000)
    short, long = log_mel(samples, settings), log_mel(np.pad(samples, (0, 60000)), settings)

    assert np.array_equal(short, long[: len(short)])


def test_silence_is_what_silence_is():
    assert np.array_equal(log_mel(np.zeros(16000, np.float32), AudioSettings()), np.full((101, 80), -1.5, np.float32))
