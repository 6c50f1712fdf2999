"""The bytes of a file of media as a client gives it: in the request, or in a file below the folder that the operator allows. Runs in threads."""

import base64
import binascii
import os
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from headrace.checkpoint.files import open_regular
from headrace.errors import ModelError
from headrace.media_kinds import FileRef
from headrace.multimodal.limits import MediaRefusedError

Form = Literal["inline", "file", "web"]


class FileLimit(NamedTuple):
    num_bytes: int
    option: str


_LEAST_BYTES = 26  # no file of media is smaller
_PIECE = 1 << 20
_WHITESPACE = b" \t\r\n"
_ESCAPED = (
    ("%2B", "+"),
    ("%2b", "+"),
    ("%2F", "/"),
    ("%2f", "/"),
    ("%3D", "="),
    ("%3d", "="),
    ("%0A", ""),
    ("%0a", ""),
)
"""What encoders of URLs make of the letters of base64."""


def form_of(ref: FileRef) -> Form:
    """Where the bytes of an item are. Raises MediaRefusedError for a URL of another scheme."""
    if not ref.url:
        return "inline"
    start = ref.url[:16].lower()
    if start.startswith("data:"):
        return "inline"
    if start.startswith(("http:", "https:")):
        return "web"
    if start.startswith("file:"):
        return "file"
    scheme, found, _ = ref.url[:32].partition(":")
    if found:
        raise MediaRefusedError(f"URLs of the scheme {scheme!r:.40} are not read; use data:, https: or base64", "url")
    return "inline"


def inline_bytes(ref: FileRef, limit: FileLimit) -> bytes:
    """The bytes that the request itself has. Raises MediaRefusedError."""
    if not ref.url:
        data = ref.data
    elif ref.url[:5].lower() == "data:":
        data = _of_data_uri(ref.url, limit)
    else:
        data = _of_base64(ref.url, limit)
        if len(data) < _LEAST_BYTES:  # the letters of a path can be those of base64
            raise _no_base64()
    if len(data) > limit.num_bytes:
        raise too_large(limit)
    return data


def file_bytes(url: str, folder: Path | None, limit: FileLimit) -> bytes:
    """The bytes of a `file:` URL. folder: what it must be below, without links in its path. Raises MediaRefusedError."""
    if folder is None:
        raise MediaRefusedError(
            "this server reads no files (--allowed-local-media-path): send the file itself, in base64", "url"
        )
    # The same words for whatever is wrong, so that nobody learns which files there are.
    refused = MediaRefusedError("there is no such file below --allowed-local-media-path that can be read", "url")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise refused
        path = Path(os.path.realpath(unquote(parts.path)))
        if not path.is_relative_to(folder):
            raise refused
        with open_regular(path) as file:
            # A link may have come into the path since it was looked at.
            if not Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(folder):
                raise refused
            data = file.read(limit.num_bytes + 1)
    except (OSError, ValueError, ModelError):
        raise refused from None
    if len(data) > limit.num_bytes:
        raise too_large(limit)
    return data


def too_large(limit: FileLimit) -> MediaRefusedError:
    return MediaRefusedError(f"the file is larger than {limit.num_bytes} bytes ({limit.option})", "bytes")


def _of_data_uri(url: str, limit: FileLimit) -> bytes:
    head, found, text = url.partition(",")
    if not found:
        raise MediaRefusedError("the data: URL has no comma, after which its data should be", "url")
    if not head.lower().endswith(";base64"):
        raise MediaRefusedError("the data: URL is not in base64", "url")
    for escaped, letter in _ESCAPED:
        text = text.replace(escaped, letter)
    return _of_base64(text, limit)


def _of_base64(text: str, limit: FileLimit) -> bytes:
    """Piece by piece, so that other threads run in between."""
    if len(text) > 2 * limit.num_bytes + 1024:  # with room for line ends; the bytes are counted once decoded
        raise too_large(limit)
    data = bytearray()
    rest, is_over = b"", False
    try:
        for start in range(0, len(text), _PIECE):
            rest += text[start : start + _PIECE].encode("ascii").translate(None, _WHITESPACE)
            is_last = start + _PIECE >= len(text)
            whole = rest + b"=" * (-len(rest) % 4) if is_last else rest[: len(rest) // 4 * 4]
            if whole and is_over:
                raise _no_base64()
            is_over = is_over or whole.endswith(b"=")
            data += base64.b64decode(whole, validate=True)
            rest = rest[len(whole) :]
    except (UnicodeEncodeError, binascii.Error):
        raise _no_base64() from None
    return bytes(data)


def _no_base64() -> MediaRefusedError:
    return MediaRefusedError(
        "it is neither a URL nor base64; give an https: or data: URL, or the base64 text of a file", "url"
    )
