"""Parts of messages as every chat API means them: media, and what is written out as text: documents, and what a vendor's own tools did (searches,
shells, programs) when its client sends it back here. The shapes in which media come are those of each API. Pure functions; any thread.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from headrace.media_kinds import AudioRef, ImageDetail, ImageRef, MediaKind, MediaRef
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import Message, refused

_OPAQUE = frozenset(
    {
        "cache_control",
        "caller",
        "call_id",
        "encrypted_content",
        "encrypted_index",
        "encrypted_stdout",
        "fingerprint",
        "id",
        "signature",
        "tool_use_id",
    }
)
"""Names of fields that say nothing to a model: ids, marks, and what only the vendor can read."""


def text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def part_of(ref: MediaRef) -> Message:
    """An item as a part of a message's content."""
    return {"type": ref.kind.value, ref.kind.value: ref}


def media_kind(part: object) -> MediaKind | None:
    """Which media a part of a message's content is; None = it is text."""
    if not isinstance(part, dict):
        return None
    return next((kind for kind in MediaKind if part.get("type") == kind), None)


def image_detail(where: str, detail: object) -> ImageDetail:
    """How closely to look at an image; None = auto. Raises RequestError."""
    match detail:
        case None | "original":
            return "auto"
        case "auto" | "low" | "high":
            return detail
        case _:
            raise refused(where, f"must be auto, low or high, got {str(detail)[:50]!r}")


def base64_image(where: str, data: object) -> Message:
    """The part of an image that is given in base64, or as a `data:` URL of it. Raises RequestError for any other URL, and unless it is a text."""
    if not isinstance(data, str) or not data or (":" in data[:32] and data[:5].lower() != "data:"):
        raise refused(where, "must be the base64 text of an image")
    return part_of(ImageRef(url=data))


def base64_audio(where: str, given: object) -> Message:
    """The part of audio that is given in base64, as `input_audio` of OpenAI. Raises RequestError."""
    data, name = (given.get("data"), given.get("format")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(given, Mapping) or not isinstance(data, str):
        raise refused(where, 'must be an object with "data", the base64 text of an audio file, and "format"')
    if unknown := sorted(map(str, asks_for(given) - {"data", "format"})):
        raise refused(where, f": the field {unknown[0][:50]!r} is not known here")
    if not data:
        raise refused(f"{where}.data", "is empty: it must be the base64 text of an audio file")
    if ":" in data[:32] and data[:5].lower() != "data:":
        raise refused(
            f"{where}.data", "must be the base64 text of an audio file; a URL goes into a part of type audio_url"
        )
    if not is_empty(name) and str(name).lower() not in MediaKind.AUDIO.formats:
        raise refused(f"{where}.format", f"must be one of {', '.join(MediaKind.AUDIO.formats)}, got {str(name)[:50]!r}")
    return part_of(AudioRef(url=data))


def asks_for(fields: Mapping[Any, object]) -> set[object]:
    return {name for name, value in fields.items() if not is_empty(value)}


def written_out(where: str, item: Mapping[str, Any], *hidden: str) -> str:
    """An item of any type as its fields in JSON, between marks with the type's name. hidden: more fields that are left out. Raises RequestError."""
    kind = item["type"]
    fields = {name: value for name, value in item.items() if name != "type" and name not in hidden}
    try:
        shown = json.dumps(_readable(fields), ensure_ascii=False)
    except RecursionError:
        raise refused(where, "is nested too deeply") from None
    return f"<{kind}>\n{shown}\n</{kind}>"


def _readable(value: Any) -> Any:
    """The value without opaque and empty fields, and without the content of files."""
    if isinstance(value, dict):
        is_file = value.get("type") == "base64"
        return {
            name: _readable(item)
            for name, item in value.items()
            if not (name in _OPAQUE or is_empty(item) or (is_file and name == "data"))
        }
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, str) and value.startswith("data:"):
        return value.partition(",")[0]
    return value


def document(kind: str, text: str, **about: object) -> str:
    """A text with what is known about it, between marks with the name of its kind."""
    lines = [f"{name}: {value}" for name, value in about.items() if isinstance(value, str) and value]
    return "\n".join([f"<{kind}>", *lines, text, f"</{kind}>"])


def file_text(name: object, data: object) -> str | None:
    """A file of a message as text. data: its data URL, or the base64 of it. None if it is no text in UTF-8."""
    if not isinstance(data, str) or not data:
        return None
    text = decoded_text(data.partition(",")[2] if data.startswith("data:") else data)
    return None if text is None else document("document", text, title=name)


def decoded_text(data: str) -> str | None:
    """The text whose base64 this is; None if it is not that of a text in UTF-8."""
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return None if "\0" in text or text.startswith("%PDF-") else text
