"""From the bytes of an audio file to mono samples at a model's rate, and from these to the log-mel features that Whisper's encoder takes.

Owns which formats, lengths and rates are read, and what is refused, in words for clients. The content decides what a file is, never its name or its
declared type, and what a header says is never allocated. Does not fetch. Runs in a child process, since a file may be hostile.

- WAV (PCM, float, mu-law, A-law, ADPCM), FLAC, MP3, and Ogg with Vorbis or Opus. What follows the audio in a file is ignored.
- The samples are bit by bit those of transformers' `load_audio` with soundfile, and so of `librosa.load`: the mean of the channels, resampled by
  soxr with its quality HQ. Nothing is clipped.
- A file that is cut off is refused where its format shows it: MP3 does not, and Ogg only within a page.
- Features are those of transformers' `WhisperFeatureExtractor`. A value depends on the samples alone: nothing is a matrix product whose order of sums
  depends on a library or on threads.

Sources: A. Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section 2.2; the mel scale and the areas of the
filters of M. Slaney, "Auditory Toolbox, Version 2" (1998).
"""

import functools
import io
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from headrace.checkpoint.preprocessor_config import AudioSettings
from headrace.multimodal.limits import (
    MAX_CHANNELS,
    MAX_LEVEL,
    MAX_RATE,
    MAX_WAV_CHUNKS,
    MIN_HOPS,
    MIN_RATE,
    SLACK_S,
    MediaRefusedError,
    file_name,
)

SERVED = "WAV, FLAC, MP3 and Ogg (Vorbis, Opus)"

_LINEAR_BYTES = {"PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8, "ULAW": 1, "ALAW": 1}
"""Bytes of a sample of one channel in a WAV file."""

_WAV = frozenset({*_LINEAR_BYTES, "IMA_ADPCM", "MS_ADPCM"})
_ENCODINGS = {
    "WAV": _WAV,
    "WAVEX": _WAV,
    "FLAC": frozenset({"PCM_S8", "PCM_16", "PCM_24"}),
    "MP3": frozenset({"MPEG_LAYER_III"}),
    "OGG": frozenset({"VORBIS", "OPUS"}),
}
"""By libsndfile's names of formats."""

_ID3 = b"ID3"

_NO_SIZES = (0xFFFFFFFF, 0x7FFFF000)
"""What writes to a pipe (ffmpeg, sox) cannot know the size of a WAV file, and says this."""

_MOST_FRAMES = 1 << 48
"""Of a file that says how many it has. libsndfile gives the largest number for a FLAC file that does not."""

_BLOCK_FRAMES = 1 << 14
_OUT_OF_MEMORY = 17
"""libsndfile's number of "Internal malloc () failed"."""

Samples: TypeAlias = npt.NDArray[np.float32]


class _Bytes(io.BytesIO):
    """A file that libsndfile reads. A broken one may make it seek before the start, which would be an exception in a callback: printed and lost."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is read once from start to end. soundfile would seek after each block, and MP3's samples differ after a seek."""

    def seekable(self) -> bool:
        return False


def read_audio_file(data: bytes, settings: AudioSettings) -> Samples:
    """Mono samples float32[n] at `settings.sampling_rate`, at least `MIN_HOPS` hops, at most `settings.chunk_samples`. Raises MediaRefusedError."""
    try:
        samples, rate = _decoded(*_audio_part(data), settings)
        return _resampled(samples, rate, settings)[: settings.chunk_samples]
    except MemoryError:
        raise MediaRefusedError("decoding the audio takes too much memory", "memory") from None


def _audio_part(data: bytes) -> tuple[bytes, int]:
    """The file without what libsndfile need not see, and the bytes of the samples that a WAV file says it has, else 0. Refuses unsupported formats,
    and what libsndfile would cut short without a word."""
    if not data:
        raise MediaRefusedError("the file is empty", "format")
    if data[:4] + data[8:12] == b"RIFFWAVE":
        return _wav_part(data)
    if data.startswith(b"OggS"):
        _check_ogg(data)
    elif not (data.startswith((b"fLaC", _ID3)) or _is_mp3(data)):
        raise _unsupported(file_name(data, "not a known audio format"))
    return data, 0


def _is_mp3(data: bytes) -> bool:
    """Whether the file starts with the header of a frame of MPEG 1, 2 or 2.5, layer III."""
    return len(data) > 2 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08


def _wav_part(data: bytes) -> tuple[bytes, int]:
    """A WAV file until its samples end, and their bytes, or 0. The size that it gives of itself is often wrong, and not looked at."""
    at = 12
    for _ in range(MAX_WAV_CHUNKS):
        if at + 8 > len(data):
            raise _broken("it has no samples")
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data":
            num_there = len(data) - at - 8
            if size in _NO_SIZES:
                return data, 0
            if size > num_there:
                raise _broken(f"its header says {size} bytes of samples, and {num_there} are there")
            return data[: at + 8 + size], size
        at += 8 + size + size % 2
    raise _broken(f"more than {MAX_WAV_CHUNKS} other things are before its samples")


def _check_ogg(data: bytes) -> None:
    """Refuses other codecs than Vorbis and Opus, and a file whose last page is cut off: libsndfile would leave that out (RFC 3533, section 6)."""
    packet = 27 + data[26] if len(data) > 26 else len(data)
    if not data[packet : packet + 8].startswith((b"\x01vorbis", b"OpusHead")):
        raise _unsupported("an Ogg file that starts with neither Vorbis nor Opus")
    page = data[data.rfind(b"OggS") :]
    sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
    if len(page) < 27 or len(page) < 27 + page[26] + sum(sizes):
        raise _broken("its last page is cut off")


def _decoded(data: bytes, num_wav_bytes: int, settings: AudioSettings) -> tuple[Samples, int]:
    """Mono samples at the file's rate, and that."""
    try:
        with _Stream(_Bytes(data)) as file:
            _check_header(file, behind_tag=data.startswith(_ID3))
            if num_wav_bytes % (_LINEAR_BYTES.get(file.subtype, 1) * file.channels):
                raise _broken("its last sample is cut off")
            samples = _read(file, settings)
            if file.format == "FLAC" and len(samples) < file.frames < _MOST_FRAMES:
                raise _broken(f"its header says {file.frames} samples, and {len(samples)} are there")
            return samples, file.samplerate
    except (MemoryError, MediaRefusedError):
        raise
    except Exception as error:  # libsndfile's errors, and whatever a hostile header makes of soundfile
        if isinstance(error, soundfile.LibsndfileError) and error.code == _OUT_OF_MEMORY:
            raise MemoryError from None
        raise _broken("it cannot be decoded") from None


def _check_header(file: _Stream, *, behind_tag: bool) -> None:
    """Refuses what need not be decoded to be refused. behind_tag: the file starts with an ID3 tag, which libsndfile skips before any format."""
    encodings = _ENCODINGS.get(file.format)
    if encodings is None or (behind_tag and file.format not in ("MP3", "FLAC")):
        raise _unsupported(f"a file of the format {file.format}{' behind an ID3 tag' if behind_tag else ''}")
    if file.subtype not in encodings:
        raise _unsupported(f"{file.format} with samples of the kind {file.subtype}")
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise MediaRefusedError(
            f"the audio has {file.channels} channels; at most {MAX_CHANNELS} are supported", "channels"
        )
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise MediaRefusedError(
            f"the sample rate is {file.samplerate} Hz; {MIN_RATE} to {MAX_RATE} Hz are supported", "rate"
        )


def _read(file: _Stream, settings: AudioSettings) -> Samples:
    """The mean of the channels, block by block, and no more blocks than show that the audio is too long."""
    most = int((settings.chunk_seconds + SLACK_S) * file.samplerate)
    # An MP3 file without a count gives a guess, from the size of its first frame.
    if file.format != "MP3" and most < file.frames < _MOST_FRAMES:
        raise _too_long(file, settings)
    blocks: list[Samples] = []
    num_frames = 0
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        with np.errstate(all="ignore"):  # of samples that are not finite
            mono = block.T.mean(axis=0) if file.channels > 1 else block[:, 0]
            if not np.abs(mono).max() <= MAX_LEVEL:
                raise _broken("it has samples that are not finite, or far beyond full scale")
        blocks.append(mono)
        num_frames += len(mono)
        if num_frames > most:
            raise _too_long(file, settings)
    return np.concatenate(blocks) if blocks else np.empty(0, np.float32)


def _resampled(samples: Samples, rate: int, settings: AudioSettings) -> Samples:
    num_samples = math.ceil(len(samples) * settings.sampling_rate / rate)
    if num_samples < MIN_HOPS * settings.hop_length:
        least = MIN_HOPS * settings.hop_length / settings.sampling_rate
        raise MediaRefusedError(
            f"the audio is {len(samples) / rate * 1000:.3g} ms long; at least {least * 1000:g} ms are needed", "length"
        )
    if rate != settings.sampling_rate:
        samples = soxr.resample(samples, rate, settings.sampling_rate, quality="soxr_hq")[:num_samples]
        samples = np.pad(samples, (0, num_samples - len(samples)))
    return np.ascontiguousarray(samples, np.float32)


def _unsupported(name: str) -> MediaRefusedError:
    return MediaRefusedError(
        f"it is {name}; supported formats are {SERVED}: convert it, e.g. ffmpeg -i FILE audio.wav", "format"
    )


def _broken(why: str) -> MediaRefusedError:
    return MediaRefusedError(f"the audio is broken or incomplete: {why}", "broken")


def _too_long(file: _Stream, settings: AudioSettings) -> MediaRefusedError:
    length = f"longer than {settings.chunk_seconds} s"
    if settings.chunk_seconds * file.samplerate < file.frames < _MOST_FRAMES:
        seconds = math.ceil(file.frames / file.samplerate * 100) / 100
        length = f"{'about ' if file.format == 'MP3' else ''}{seconds:g} s long"
    return MediaRefusedError(
        f"the audio is {length}; the model takes at most {settings.chunk_seconds} s at a time: split it", "length"
    )


Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

_FLOOR = 1e-10  # of the power of a mel bin: what silence has
_RANGE = 8.0  # powers of ten below the loudest value of the audio, below which nothing differs
_MAX_HZ = 8000.0
_SPECTRUM_FRAMES = 512

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


def log_mel(samples: Samples, settings: AudioSettings) -> Samples:
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
    features: Samples = np.full((max(num_kept, num_sounding), settings.num_mel_bins), np.log10(_FLOOR), np.float32)
    for start in range(0, num_sounding, _SPECTRUM_FRAMES):
        block = frames[start : start + _SPECTRUM_FRAMES]
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


def _padded(samples: Samples, settings: AudioSettings) -> Doubles:
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
