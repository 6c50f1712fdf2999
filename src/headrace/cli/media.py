"""Images and audio of the terminal: files of the user, as parts of a message of a chat, or for a prompt.

Owns which files are sent, and how a part is shown. The commands read them themselves, so the server needs no permission to read files.
"""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.checkpoint.regular_file import open_regular
from headrace.errors import ConfigError, ModelError

MediaWord = Literal["image", "audio file"]
"""What the user calls a part of a message."""

MAX_FILE_BYTES = 20_000_000
"""Largest file; servers take no larger one unless they are started with --max-image-bytes or --max-audio-bytes."""

WORDS: dict[str, MediaWord] = {"image_url": "image", "input_audio": "audio file", "audio_url": "audio file"}
"""By the type of a part."""

_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)
_AUDIO = ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3"))


def read_image(path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises ConfigError for one that cannot be read, is too large or no image."""
    data = image_bytes(path)
    return {"type": "image_url", "image_url": {"url": f"data:{_image_type(data)};base64,{b64encode(data).decode()}"}}


def read_audio(path: Path) -> dict[str, Any]:
    """The same for audio."""
    data = audio_bytes(path)
    return {"type": "input_audio", "input_audio": {"data": b64encode(data).decode(), "format": _audio_format(data)}}


def image_bytes(path: Path) -> bytes:
    """The bytes of a file. Raises ConfigError as `read_image` does."""
    data = _read(path, "image")
    if _image_type(data) is None:
        raise ConfigError(f"{path} is not an image: PNG, JPEG, WEBP, GIF and BMP can be sent")
    return data


def audio_bytes(path: Path) -> bytes:
    """The same for audio."""
    data = _read(path, "audio file")
    if _audio_format(data) is None:
        raise ConfigError(f"{path} is not an audio file: WAV, FLAC, OGG and MP3 can be sent")
    return data


def shown(content: str | list[dict[str, Any]] | None) -> str:
    """The content of a message as text, with a word for each image and audio file."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else f"[{WORDS[part['type']]}]" for part in content)


def number_of(parts: Sequence[dict[str, Any]]) -> str:
    """E.g. "1 image and 2 audio files"; "" of no parts."""
    words = [WORDS[part["type"]] for part in parts]
    counts = {word: words.count(word) for word in dict.fromkeys(WORDS.values())}
    return " and ".join(f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if count)


def _read(path: Path, word: MediaWord) -> bytes:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the {word} {path} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise ConfigError(f"the {word} {path} cannot be read: {error.message}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the {word} {path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _image_type(data: bytes) -> str | None:
    if data[:4] + data[8:12] == b"RIFFWEBP":
        return "image/webp"
    return next((kind for start, kind in _IMAGES if data.startswith(start)), None)


def _audio_format(data: bytes) -> str | None:
    if data[:4] + data[8:12] == b"RIFFWAVE":
        return "wav"
    # The header of a frame of layer III. A text in UTF-16 begins with its first 11 bits, too.
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08:
        return "mp3"
    return next((name for start, name in _AUDIO if data.startswith(start)), None)
