"""Images of the terminal chat: files of the user, as parts of a message.

Owns which files are sent, and how a part is shown. The chat reads them itself, so the server needs no permission to read files.
"""

from base64 import b64encode
from pathlib import Path
from typing import Any

from headrace.checkpoint.regular_file import open_regular
from headrace.errors import ConfigError, ModelError

MAX_IMAGE_BYTES = 20_000_000
"""Largest file; servers take no larger one unless they are started with --max-image-bytes."""

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def read_image(path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises ConfigError for one that cannot be read, is too large or no image."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the image {path} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise ConfigError(f"the image {path} cannot be read: {error.message}") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigError(f"the image {path} is larger than {MAX_IMAGE_BYTES} bytes")
    kind = _kind(data)
    if kind is None:
        raise ConfigError(f"{path} is no image: PNG, JPEG, WEBP, GIF and BMP can be sent")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{b64encode(data).decode()}"}}


def shown(content: str | list[dict[str, Any]] | None) -> str:
    """The content of a message as text, with a word for each image."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else "[image]" for part in content)


def number_of(count: int) -> str:
    """E.g. "2 images"."""
    return "1 image" if count == 1 else f"{count} images"


def _kind(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _STARTS if data.startswith(start)), None)
