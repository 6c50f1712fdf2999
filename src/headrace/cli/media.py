"""Media of the terminal: files of the user, as parts of a message of a chat, or for a prompt.

Owns which files are sent, and how a part is shown. The commands read them themselves, so the server needs no permission to read files.
"""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import open_regular
from headrace.errors import ConfigError, ModelError
from headrace.media_kinds import DEFAULT_FILE_BYTES, PARTS, MediaKind

_STARTS = {
    MediaKind.IMAGE: ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp")),
    MediaKind.AUDIO: ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")),
}
"""How files of a format begin."""

_RIFF = {MediaKind.IMAGE: (b"WEBP", "webp"), MediaKind.AUDIO: (b"WAVE", "wav")}


def read_part(kind: MediaKind, path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises ConfigError for one that cannot be read, is too large or is of another kind."""
    data = file_bytes(kind, path)
    name, coded = _format_of(kind, data), b64encode(data).decode()
    if kind is MediaKind.AUDIO:
        return {"type": "input_audio", "input_audio": {"data": coded, "format": name}}
    part = kind.parts[0]
    return {"type": part, part: {"url": f"data:{kind}/{name};base64,{coded}"}}


def file_bytes(kind: MediaKind, path: Path) -> bytes:
    """The bytes of a file. Raises ConfigError as `read_part` does."""
    try:
        with open_regular(path) as file:
            data = file.read(DEFAULT_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the {kind} file {path} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise ConfigError(f"the {kind} file {path} cannot be read: {error.message}") from None
    # A server takes no larger one unless it is started with --max-image-bytes or --max-audio-bytes.
    if len(data) > DEFAULT_FILE_BYTES:
        raise ConfigError(f"the {kind} file {path} is larger than {DEFAULT_FILE_BYTES} bytes")
    if _format_of(kind, data) is None:
        formats = [name.upper() for name in kind.formats if name != "opus"]
        raise ConfigError(f"{path} is not an {kind} file: {', '.join(formats[:-1])} and {formats[-1]} can be sent")
    return data


def shown(content: str | list[dict[str, Any]] | None) -> str:
    """The content of a message as text, with a word for each item."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else f"[{PARTS[part['type']]}]" for part in content)


def number_of(parts: Sequence[dict[str, Any]]) -> str:
    """E.g. "1 image and 2 audio clips"; "" of no parts."""
    kinds = [PARTS[part["type"]] for part in parts]
    return " and ".join(kind.amount(kinds.count(kind)) for kind in MediaKind if kind in kinds)


def _format_of(kind: MediaKind, data: bytes) -> str | None:
    mark, name = _RIFF[kind]
    if data[:4] + data[8:12] == b"RIFF" + mark:
        return name
    # The header of a frame of layer III. A text in UTF-16 begins with its first 11 bits, too.
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08
    if kind is MediaKind.AUDIO and is_frame:
        return "mp3"
    return next((name for start, name in _STARTS[kind] if data.startswith(start)), None)
