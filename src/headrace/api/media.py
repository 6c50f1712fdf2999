"""Media in the arguments of `Engine` and `Runtime`: the bytes of files, as structs, as JSON, and in the parts of messages.

Does not check what else is in the arguments: the request does. Pure functions; any thread.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.messages.media import AudioRef, ImageRef, MediaKind, VideoRef

_PARTS = ("image_url", "input_audio", "audio_url", "video_url")

FIELDS: dict[str, MediaKind] = {"image_data": "image", "audio_data": "audio", "video_data": "video"}


def media_structs(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with the bytes of files in structs; the rest is checked later."""
    return given | {name: _struct(given[name], kind) for name, kind in FIELDS.items() if name in given}


def media_json(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as HTTP takes them: files in base64; the rest is checked by the server."""
    return given | {name: _json(given[name]) for name in FIELDS if name in given}


def _struct(given: object, kind: MediaKind) -> object:
    if isinstance(given, list | tuple):
        return [_struct(item, kind) for item in given]
    if kind == "video":
        if isinstance(given, Mapping) and isinstance(given.get("frames"), list | tuple):
            return {**given, "frames": [_struct(frame, "image") for frame in given["frames"]]}
        return given
    ref = AudioRef if kind == "audio" else ImageRef
    return ref(data=bytes(given)) if isinstance(given, bytes | bytearray | memoryview) else given


def _json(given: object) -> object:
    if isinstance(given, list | tuple):
        return [_json(item) for item in given]
    if isinstance(given, Mapping):
        return {name: _json(value) for name, value in given.items()}
    return msgspec.to_builtins(given) if isinstance(given, ImageRef | AudioRef | VideoRef) else _text(given)


def messages_as_json(messages: object) -> object:
    """Messages in which the URL of an image or a sound may be the bytes of a file, as chat completions take them."""
    return [_message(message) for message in messages] if isinstance(messages, list | tuple) else messages


def _message(message: object) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    assert isinstance(message, Mapping), "it has content"
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
        return part
    kind = part["type"]
    return {**part, kind: _json(part.get(kind))}


def _text(given: object) -> object:
    return b64encode(given).decode() if isinstance(given, bytes | bytearray | memoryview) else given
