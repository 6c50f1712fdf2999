"""Audio files: samples as transformers and librosa read them, or a refusal in words, and no memory because a header says so."""

import base64
import io
import math
import random
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.audio_utils import load_audio

from headrace.checkpoint.preprocessor_config import AudioSettings
from headrace.child_pool.child_side import MIB
from headrace.multimodal.audio import read_audio_file
from headrace.multimodal.limits import MediaRefusedError

SETTINGS = AudioSettings()
RATE = SETTINGS.sampling_rate


def tones(num_frames: int, channels: int = 1, rate: int = RATE) -> np.ndarray:
    """Another tone in each channel, and noise."""
    times = np.arange(num_frames)[:, None] / rate
    noise = np.random.default_rng(7).standard_normal((num_frames, channels))
    return 0.4 * np.sin(2 * np.pi * (200 + 90 * np.arange(channels)) * times) + 0.05 * noise


def file_of(samples: np.ndarray, kind: str = "WAV", encoding: str | None = None, rate: int = RATE) -> bytes:
    data = io.BytesIO()
    soundfile.write(data, samples, rate, format=kind, subtype=encoding)
    return data.getvalue()


def as_librosa(data: bytes, target: int = RATE) -> np.ndarray:
    """What `librosa.load(data, sr=target, mono=True)` returns, by its steps. `soundfile.read` would seek first, which changes samples of MP3."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    mono = np.mean(samples.T, axis=0)
    if rate == target:
        return mono
    length = math.ceil(len(mono) * target / rate)
    found = soxr.resample(mono, rate, target, quality="HQ")
    return np.pad(found, (0, max(length - len(found), 0)))[:length]


def wav(
    data: bytes = bytes(3200),
    *,
    tag: int = 1,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    size: int | None = None,
    riff: int | None = None,
    before: bytes = b"",
) -> bytes:
    """A WAV file whose header says anything."""
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", tag, channels % 65536, rate, rate * block % (1 << 32), block % 65536, bits)
    size = len(data) if size is None else size
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + before + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


def id3(num_bytes: int) -> bytes:
    """An ID3 tag of padding."""
    return b"ID3\4\0\0" + bytes(num_bytes >> shift & 127 for shift in (21, 14, 7, 0)) + bytes(num_bytes)


def floats(*values: float) -> bytes:
    samples = np.zeros(1600, "<f4")
    samples[800 : 800 + len(values)] = values
    return wav(samples.tobytes(), tag=3, bits=32)


def cut(data: bytes, part: float) -> bytes:
    return data[: int(len(data) * part)]


def of_unknown_length(flac: bytes) -> bytes:
    """As of an encoder that writes to a pipe: the 36 bits of the number of samples are 0."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def two(kind: str, encoding: str, channels: int = 2, rate: int = RATE) -> bytes:
    return file_of(tones(rate // 2, channels, rate), kind, encoding, rate)


CASES = [
    *[("WAV", encoding, 1, RATE) for encoding in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
    *[("WAV", encoding, 1, 8000) for encoding in ("ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM")],
    *[("WAV", "PCM_16", channels, 44100) for channels in (1, 2, 6, 8)],
    *[("WAV", "PCM_16", 2, rate) for rate in (8000, 11025, 12000, 22050, 24000, 32000, 48000, 96000, 192000)],
    *[("WAV", "PCM_16", 1, rate) for rate in (4000, 15999, 16001, 384000)],
    ("WAVEX", "PCM_24", 6, 48000),
    ("FLAC", "PCM_S8", 1, RATE),
    ("FLAC", "PCM_16", 2, 44100),
    ("FLAC", "PCM_24", 6, 48000),
    ("OGG", "VORBIS", 1, RATE),
    ("OGG", "VORBIS", 2, 44100),
    ("OGG", "VORBIS", 6, 48000),
    ("OGG", "OPUS", 1, RATE),
    ("OGG", "OPUS", 2, 48000),
    *[("MP3", "MPEG_LAYER_III", 1, rate) for rate in (8000, RATE, 44100)],
    *[("MP3", "MPEG_LAYER_III", 2, rate) for rate in (22050, 32000, 48000)],
]
FLAC, OGG, OPUS, MP3 = two("FLAC", "PCM_16"), two("OGG", "VORBIS"), two("OGG", "OPUS"), two("MP3", "MPEG_LAYER_III")
TEN_MINUTES = file_of(np.zeros(600 * RATE, np.int16), "FLAC")
BEHIND = b"LIST\x04\0\0\0INFO" + b"PK\x03\x04" + random.Random(2).randbytes(500)

REFUSED = {
    "empty": (b"", "format", "empty"),
    "one byte": (b"R", "format", "not a known audio format"),
    "text": (b"hello, world " * 100, "format", "not a known audio format; supported formats are WAV, FLAC, MP3 and Ogg"),
    "zeros": (bytes(5000), "format", "not a known audio format"),
    "random": (random.Random(1).randbytes(5000), "format", "not a known audio format"),
    "json": (b'{"url": "x"}', "format", "JSON"),
    "html": (b"<!DOCTYPE html><html></html>", "format", "HTML"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), "format", "a PNG image"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(100), "format", "a JPEG image"),
    "webp": (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(100), "format", "a WEBP image"),
    "avi": (b"RIFF\x24\0\0\0AVI LIST" + bytes(100), "format", "an AVI video"),
    "riff of another kind": (b"RIFF\x24\0\0\0ABCDabcd" + bytes(100), "format", "a RIFF file of an unknown kind"),
    "mp4": (b"\0\0\0\x18ftypisom" + bytes(100), "format", "an MP4"),
    "m4a": (b"\0\0\0\x18ftypM4A " + bytes(100), "format", "an M4A file"),
    "webm": (b"\x1aE\xdf\xa3" + bytes(100), "format", "a WebM"),
    "aac": (b"\xff\xf1\x50\x80\x02\x1f\xfc" + random.Random(3).randbytes(2000), "format", "an AAC file"),
    "mpeg layer 2": (b"\xff\xfd\x84\x04" + bytes(2000), "format", "not a known audio format"),
    "aiff": (file_of(tones(RATE), "AIFF"), "format", "an AIFF file"),
    "au": (file_of(tones(RATE), "AU"), "format", "an AU file"),
    "caf": (file_of(tones(RATE), "CAF"), "format", r"\(CAF\)"),
    "w64": (file_of(tones(RATE), "W64"), "format", "a Wave64 file"),
    "rf64": (file_of(tones(RATE), "RF64"), "format", "an RF64 file"),
    "big endian wav": (b"RIFX" + wav()[4:], "format", "a RIFX file"),
    "aiff behind a tag": (id3(50) + file_of(tones(RATE), "AIFF"), "format", "AIFF behind an ID3 tag"),
    "wav behind a tag": (id3(50) + wav(), "format", "WAV behind an ID3 tag"),
    "gsm": (file_of(tones(RATE), "WAV", "GSM610"), "format", "kind GSM610"),
    "ogg flac": (b"OggS\0\2" + bytes(20) + b"\1\x51\x7fFLAC" + bytes(200), "format", "neither Vorbis nor Opus"),
    "ogg noise": (b"OggS" + random.Random(4).randbytes(5000), "format", "neither Vorbis nor Opus"),
    "ogg start": (b"OggS", "format", "neither Vorbis nor Opus"),
    "flac noise": (b"fLaC" + random.Random(5).randbytes(5000), "broken", "cannot be decoded"),
    "mp3 noise": (b"\xff\xfb\x90\x00" + random.Random(6).randbytes(5000), "broken", "cannot be decoded"),
    "wav noise": (b"RIFF\0\1\0\0WAVE" + random.Random(7).randbytes(5000), "broken", "no samples"),
    "png behind a tag": (id3(50) + b"\x89PNG\r\n\x1a\n" + bytes(500), "broken", "cannot be decoded"),
    "20 MB of tag": (id3(20 * MIB), "broken", "cannot be decoded"),
    "tag that lies": (b"ID3\4\0\0\x7f\x7f\x7f\x7f" + MP3, "broken", "cannot be decoded"),
    "wav start": (wav()[:12], "broken", "no samples"),
    "wav header cut": (wav()[:30], "broken", "no samples"),
    "wav without samples": (wav(b""), "length", "0 ms long; at least 40 ms"),
    "wav of 0 bytes": (wav(size=0), "length", "0 ms long"),
    "wav of one sample": (wav(b"\1\0"), "length", "0.0625 ms long"),
    "wav too short": (wav(bytes(2 * 639)), "length", "39.9 ms long; at least 40 ms"),
    "wav cut": (cut(wav(), 0.5), "broken", "3200 bytes of samples, and 1578 are there"),
    "wav of 4 billion bytes": (wav(size=0xFFFFFFF0), "broken", "4294967280 bytes of samples, and 3200 are there"),
    "wav of odd bytes": (wav(size=3199), "broken", "last sample is cut off"),
    "wav without channels": (wav(channels=0), "broken", "cannot be decoded"),
    "wav of 1024 channels": (wav(bytes(2048 * 1000), channels=1024), "channels", "1024 channels; at most 8"),
    "wav of 9 channels": (wav(bytes(18 * 1000), channels=9), "channels", "9 channels"),
    "wav of 65535 channels": (wav(channels=65535), "broken", "cannot be decoded"),
    "wav without rate": (wav(rate=0), "broken", "cannot be decoded"),
    "wav of 1 Hz": (wav(rate=1), "rate", "sample rate is 1 Hz; 4000 to 384000 Hz"),
    "wav of 2 GHz": (wav(rate=2_000_000_000), "rate", "2000000000 Hz"),
    "wav of 0 bits": (wav(bits=0), "broken", "cannot be decoded"),
    "wav of 64 bits": (wav(bits=64), "broken", "cannot be decoded"),
    "wav of no coding": (wav(tag=0), "broken", "cannot be decoded"),
    "wav with mp3": (wav(tag=0x55), "broken", "cannot be decoded"),
    "wav of a million chunks": (wav(before=b"abcd\0\0\0\0" * 1_000_000), "broken", "more than 1000 other things"),
    "nan": (floats(math.nan), "broken", "not finite"),
    "inf": (floats(math.inf), "broken", "not finite"),
    "inf and its opposite": (floats(-math.inf, math.inf), "broken", "not finite"),
    "doubles beyond float32": (wav(np.full(1600, 1e300).tobytes(), tag=3, bits=64), "broken", "not finite"),
    "far too loud": (floats(3e38), "broken", "far beyond full scale"),
    "flac header cut": (FLAC[:30], "broken", "cannot be decoded"),
    "flac cut": (cut(FLAC, 0.5), "broken", "broken or incomplete"),
    "flac that says more": (FLAC[:22] + struct.pack(">I", 9000) + FLAC[26:], "broken", "9000 samples, and 8000 are there"),
    "ogg cut": (cut(OGG, 0.9), "broken", "last page is cut off"),
    "ogg page cut": (OGG[:-1], "broken", "last page is cut off"),
    "opus cut": (cut(OPUS, 0.5), "broken", "last page is cut off"),
    "mp3 header": (MP3[:4], "broken", "cannot be decoded"),
    "wav of 31 s": (wav(bytes(31 * 2 * RATE)), "length", "31 s long; the model takes at most 30 s at a time: split it"),
    "wav of a little more": (wav(bytes(30 * 2 * RATE + RATE // 2 + 2)), "length", "30.26 s long"),
    "flac of ten minutes": (TEN_MINUTES, "length", "600 s long"),
    "flac of ten minutes that does not say it": (of_unknown_length(TEN_MINUTES), "length", "longer than 30 s"),
    "ogg of a minute": (file_of(np.zeros(60 * 8000), "OGG", rate=8000), "length", "60 s long"),
    "mp3 of a minute": (file_of(np.zeros(60 * 8000), "MP3", rate=8000), "length", "about 60 s long"),
}  # fmt: skip

TAKEN = {
    "shortest": wav(bytes(2 * 640)),
    "longest": wav(bytes(30 * 2 * RATE)),
    "longest at another rate": wav(bytes(30 * 8000), bits=8, rate=8000),
    "size of the whole is 0": wav(riff=0),
    "size of the whole is too large": wav(riff=1 << 30),
    "size of the whole is too small": wav(riff=40),
    "wav from a pipe": wav(size=0xFFFFFFFF, riff=0xFFFFFFFF),
    "wav from a pipe of sox": wav(size=0x7FFFF000, riff=0x7FFFF024),
    "wav with other things before": wav(before=b"LIST\x03\0\0\0abc\0" * 900),
    "wav with a zip behind": wav() + BEHIND,
    "wav with a million chunks behind": wav() + b"abcd\0\0\0\0" * 1_000_000,
    "flac from a pipe": of_unknown_length(FLAC),
    "flac behind a tag": id3(100) + FLAC,
    "mp3 behind a tag": id3(100) + MP3,
    "mp3 behind a tag of 20 MB": id3(20 * MIB) + MP3,
    "mp3 with a zip behind": MP3 + BEHIND,
    "mp3 that ends": cut(MP3, 0.7),
    "ogg with a zip behind": OGG + BEHIND,
    "louder than full scale": floats(1.5, -70.0, 32768.0),
}


def refusal(data: bytes) -> MediaRefusedError:
    with pytest.raises(MediaRefusedError) as error:
        read_audio_file(data, SETTINGS)
    return error.value


@pytest.mark.parametrize("kind, encoding, channels, rate", CASES)
def test_samples_are_those_of_librosa(kind, encoding, channels, rate):
    data = two(kind, encoding, channels, rate)
    found = read_audio_file(data, SETTINGS)

    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, as_librosa(data))
    assert abs(len(found) - RATE // 2) <= 128  # ADPCM ends with a whole block


@pytest.mark.parametrize("data", [FLAC, OGG, OPUS, MP3, two("WAV", "PCM_16", 6, 44100)])
def test_samples_are_those_of_transformers(data):
    expected = load_audio(base64.b64encode(data).decode(), sampling_rate=RATE, backend="soundfile")

    assert np.array_equal(read_audio_file(data, SETTINGS), expected)


@pytest.mark.parametrize("target", [8000, 22050, 48000])
def test_the_rate_is_that_of_the_settings(target):
    data = two("WAV", "PCM_16", 2, 44100)
    found = read_audio_file(data, AudioSettings(sampling_rate=target))

    assert np.array_equal(found, as_librosa(data, target))
    assert len(found) == target // 2


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_reading_in_blocks_changes_nothing(kind):
    data = file_of(tones(29 * RATE, 2), kind)

    assert np.array_equal(read_audio_file(data, SETTINGS), as_librosa(data))


def test_what_is_read_is_the_sound():
    samples = tones(RATE)[:, 0]

    assert np.abs(read_audio_file(file_of(samples), SETTINGS) - samples).max() <= 1 / 32768
    assert np.array_equal(read_audio_file(floats(1.5, -70.0, 32768.0), SETTINGS)[800:803], [1.5, -70.0, 32768.0])
    left, right = np.zeros((RATE, 2)), np.zeros((RATE, 2))
    left[:, 0], right[:, 1] = 0.5, 0.25
    assert np.allclose(read_audio_file(file_of(left + right, "WAV", "FLOAT"), SETTINGS), 0.375)


def test_the_settings_say_how_long_a_sound_may_be():
    data = wav(bytes(2 * 2 * RATE))
    assert len(read_audio_file(data, AudioSettings(chunk_seconds=2))) == 2 * RATE
    with pytest.raises(MediaRefusedError, match="2 s long; the model takes at most 1 s"):
        read_audio_file(data, AudioSettings(chunk_seconds=1))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_in_words(name):
    data, kind, words = REFUSED[name]
    error = refusal(data)

    assert error.kind == kind
    assert re.search(words, error.message), error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("name", TAKEN)
def test_a_file_is_a_sound(name):
    found = read_audio_file(TAKEN[name], SETTINGS)

    assert np.isfinite(found).all()
    assert 640 <= len(found) <= SETTINGS.chunk_samples


def test_what_is_around_a_sound_changes_nothing():
    plain = {"wav": wav(), "flac": FLAC, "mp3": MP3, "ogg": OGG}
    for name, data in TAKEN.items():
        if "behind" in name:
            assert np.array_equal(read_audio_file(data, SETTINGS), read_audio_file(plain[name.split()[0]], SETTINGS)), (
                name
            )


CHILD = """
import resource, sys
from pathlib import Path
from headrace.checkpoint.preprocessor_config import AudioSettings
from headrace.child_pool.child_side import MIB, limit_memory
from headrace.multimodal.audio import read_audio_file
from headrace.multimodal.limits import MediaRefusedError

def verdict(file):
    try:
        read_audio_file(file.read_bytes(), AudioSettings())
    except MediaRefusedError as error:
        return error.kind
    return "taken"

files = sorted(Path(sys.argv[1]).iterdir())
verdict(files[0])
limit_memory(int(sys.argv[2]) * MIB)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*(verdict(file) for file in files))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def in_child(folder, memory_mib: int) -> tuple[list[str], int]:
    """Verdicts on the files of a folder, by name, and the MiB that the process grew."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder, str(memory_mib)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )  # fmt: skip
    verdicts, grown = done.stdout.splitlines()
    return verdicts.split(), int(grown)


def test_hostile_files_take_little_memory(tmp_path):
    for number, (data, _, _) in enumerate(REFUSED.values()):
        (tmp_path / f"{number:03}").write_bytes(data)
    kinds, grown_mib = in_child(tmp_path, 160)

    assert kinds == [kind for _, kind, _ in REFUSED.values()]
    assert grown_mib < 64  # the largest file has 20 MB


def test_what_takes_too_much_memory_is_refused(tmp_path):
    (tmp_path / "0").write_bytes(wav())
    (tmp_path / "1").write_bytes(wav(bytes(30 * 384000), rate=384000, bits=8))  # 46 MB as float32

    assert in_child(tmp_path, 40)[0] == ["taken", "memory"]
    assert in_child(tmp_path, 400)[0] == ["taken", "taken"]


@settings(max_examples=150)
@given(
    st.sampled_from([wav(tones(2000).astype("<i2").tobytes()), floats(0.5), FLAC, OGG, OPUS, MP3]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.booleans(),
)
def test_spoiled_files_are_sounds_or_refused(data, changes, part, early):
    spoiled = bytearray(data)
    for where, value in changes:
        spoiled[int(where * (min(len(data), 80) if early else len(data) - 1))] = value
    try:
        found = read_audio_file(cut(bytes(spoiled), part), SETTINGS)
    except MediaRefusedError as error:
        assert error.kind in ("broken", "format", "length", "channels", "rate")  # noqa: PT017
    else:
        assert np.isfinite(found).all()
        assert 640 <= len(found) <= SETTINGS.chunk_samples


def test_a_little_more_than_is_heard_is_cut_off():
    """Encoders of MP3 add silence, so that pieces of 30 s become longer."""
    data = wav(np.arange(30 * RATE + RATE // 4, dtype="<i2").tobytes())
    assert np.array_equal(
        read_audio_file(data, SETTINGS), read_audio_file(wav(np.arange(30 * RATE, dtype="<i2").tobytes()), SETTINGS)
    )
