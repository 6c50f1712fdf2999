"""From mono samples to the log-mel features that Whisper's encoder takes, as transformers' `WhisperFeatureExtractor` computes them.

Owns the features and how many positions an encoder makes of them. Does not read files (`audio`) or settings (`checkpoint.audio_processors`). Runs in
a child process; `num_positions` wherever it is needed. A value depends on the samples alone: nothing here is a matrix product whose order of sums
depends on a library or on threads.

Sources: A. Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2; the mel scale and the areas of the
filters of M. Slaney, "Auditory Toolbox, Version 2" (1998).
"""

import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.audio_processors import AudioSettings

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

_FLOOR = 1e-10
"""Of the power of a mel bin: what silence has."""

_RANGE = 8.0
"""Powers of ten below the loudest value of the audio, below which nothing differs."""

_MAX_HZ = 8000.0
_BLOCK_FRAMES = 512

_LINEAR_HZ = 1000.0
_HZ_PER_MEL = 200 / 3
_LOG_STEP = np.log(6.4) / 27
"""Slaney's mel scale is linear up to 1000 Hz, and from there 27 mels are a factor of 6.4."""


def num_frames(num_samples: int, settings: AudioSettings) -> int:
    """Frames of audio that are not padding alone."""
    return min(-(-num_samples // settings.hop_length), settings.chunk_frames)


def num_positions(num_samples: int, settings: AudioSettings) -> int:
    """Positions of audio in the encoder, whose second convolution leaves out every other one. num_samples: at the model's rate, at least 1."""
    return (num_frames(num_samples, settings) - 1) // 2 + 1


def log_mel(samples: Floats, settings: AudioSettings) -> Floats:
    """The features of audio that is padded with zeros to `settings.chunk_samples`, as far as its positions depend on them.

    samples: finite float32[n], 1 <= n <= chunk_samples.
    Returns float32[frames, num_mel_bins], frames = min(2 * num_positions + 1, chunk_frames): the two convolutions of width 3 look that far.
    """
    num_samples = len(samples)
    assert 1 <= num_samples <= settings.chunk_samples, (num_samples, settings.chunk_samples)
    num_kept = min(2 * num_positions(num_samples, settings) + 1, settings.chunk_frames)
    # Frame t has the samples from t * hop - n_fft / 2. Those that have none of the audio are silence: they are not computed.
    num_sounding = min(-(-(num_samples + settings.n_fft // 2) // settings.hop_length), settings.chunk_frames)
    frames = np.lib.stride_tricks.sliding_window_view(_padded(samples, settings), settings.n_fft)
    frames = frames[:: settings.hop_length][:num_sounding]
    window = _window(settings.n_fft)
    features: Floats = np.full((max(num_kept, num_sounding), settings.num_mel_bins), np.log10(_FLOOR), np.float32)
    for start in range(0, num_sounding, _BLOCK_FRAMES):
        block = frames[start : start + _BLOCK_FRAMES]
        # As transformers with NumPy: a transform in float64, whose result is rounded to complex64.
        spectrum = np.fft.rfft(block * window).astype(np.complex64).T
        power = np.square(spectrum.real, order="C", dtype=np.float64) + np.square(
            spectrum.imag, order="C", dtype=np.float64
        )
        features[start : start + len(block)] = np.log10(np.maximum(_mel(power, settings), _FLOOR)).T
    # Silence is never louder than a frame with audio: the maximum is that of the whole chunk.
    features = np.maximum(features[:num_kept], features.max() - np.float32(_RANGE))
    features += np.float32(4)
    features /= np.float32(4)
    return features


def _padded(samples: Floats, settings: AudioSettings) -> Doubles:
    """The samples and zeros of a chunk, and half a frame before and behind it, in which the chunk is mirrored."""
    half, chunk = settings.n_fft // 2, settings.chunk_samples
    padded = np.zeros(chunk + 2 * half)
    padded[half : half + len(samples)] = samples
    padded[:half] = padded[2 * half : half : -1]
    padded[half + chunk :] = padded[half + chunk - 2 : chunk - 2 : -1]
    return padded


def _mel(power: Doubles, settings: AudioSettings) -> Doubles:
    """power: [bins of frequency, frames]. Returns [num_mel_bins, frames]. Of the filters only what is not zero is summed, one frequency at a time."""
    mel = np.zeros((settings.num_mel_bins, power.shape[1]))
    for frequency, number, weight in _filters(settings.sampling_rate, settings.n_fft, settings.num_mel_bins):
        mel[number] += weight * power[frequency]
    return mel


@functools.lru_cache(maxsize=4)
def _window(length: int) -> Doubles:
    """The periodic window of von Hann."""
    return np.hanning(length + 1)[:-1]


@functools.lru_cache(maxsize=4)
def _filters(sampling_rate: int, n_fft: int, num_mel_bins: int) -> tuple[tuple[int, int, float], ...]:
    """Triangles on Slaney's mel scale from 0 to 8000 Hz, each with the same area: (bin of frequency, mel bin, weight), where the weight is not 0."""
    edges = _hertz(np.linspace(0.0, _mels(_MAX_HZ), num_mel_bins + 2))
    frequencies = np.linspace(0, sampling_rate // 2, n_fft // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
    weights = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return tuple((int(row), int(column), float(weights[row, column])) for row, column in np.argwhere(weights))


def _mels(hertz: float) -> float:
    """hertz: at least 1000."""
    return _LINEAR_HZ / _HZ_PER_MEL + float(np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: Doubles) -> Doubles:
    first_log = _LINEAR_HZ / _HZ_PER_MEL
    return np.where(mels < first_log, mels * _HZ_PER_MEL, _LINEAR_HZ * np.exp(_LOG_STEP * (mels - first_log)))
