"""Media in the arguments of `Engine` and `Runtime`: the bytes of files, as structs, as JSON, and in the parts of messages.

Does not check what else is in the arguments: the request does. Pure functions; any thread.
"""

from base64 import b64encode
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from headrace.errors import RequestError
from headrace.media_kinds import PARTS, REFS, FileRef, ImageRef, MediaKind, VideoRef


def media_structs(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with files in structs; the rest is checked later. Raises RequestError for what is no file."""
    return given | {
        kind.field: _struct(kind.field, given[kind.field], kind) for kind in MediaKind if kind.field in given
    }


def media_json(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as HTTP takes them: files in base64; the rest is checked by the server. Raises RequestError for what is no file."""
    return given | {kind.field: _json(kind.field, given[kind.field]) for kind in MediaKind if kind.field in given}


def _struct(name: str, given: object, kind: MediaKind) -> object:
    if isinstance(given, list | tuple):
        return [_struct(name, item, kind) for item in given]
    if isinstance(given, VideoRef):
        given = {"frames": given.frames, "fps": given.fps}
    ref = REFS[kind]
    if ref is VideoRef and isinstance(given, Mapping) and isinstance(given.get("frames"), list | tuple):
        return {**given, "frames": [_struct(name, frame, MediaKind.IMAGE) for frame in given["frames"]]}
    data = _file_bytes(name, given)
    if data is None:
        return given
    if not issubclass(ref, FileRef):
        raise RequestError(f'{name}: a video is given by its frames: {{"frames": [...], "fps": 2}}', name)
    return ref(data=data)


def _json(name: str, given: object) -> object:
    if isinstance(given, list | tuple):
        return [_json(name, item) for item in given]
    if isinstance(given, Mapping):
        return {key: _json(name, value) for key, value in given.items()}
    if isinstance(given, VideoRef):
        return {"frames": _json(name, given.frames), "fps": given.fps}
    if isinstance(given, FileRef):
        detail = {"detail": given.detail} if isinstance(given, ImageRef) else {}
        return {"url": given.url or b64encode(given.data).decode()} | detail
    data = _file_bytes(name, given)
    return given if data is None else b64encode(data).decode()


def _file_bytes(name: str, given: object) -> bytes | None:
    """The bytes of a file that is given as such, or by its path; None of anything else that may be sent. Raises RequestError for arrays."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, PathLike):
        try:
            return Path(given).read_bytes()
        except OSError as error:
            raise RequestError(f"{name}: {given} cannot be read: {error.strerror}", name) from None
    if hasattr(given, "__array_interface__") or hasattr(given, "__array__"):
        raise RequestError(
            f"{name} has {'an image of Pillow' if hasattr(given, 'getbands') else 'an array'}: give the bytes of a file, or its Path",
            name,
        )
    return None


def messages_as_json(messages: object) -> object:
    """Messages in which the URL of an item may be the bytes of a file, as chat completions take them."""
    return [_message(message) for message in messages] if isinstance(messages, list | tuple) else messages


def _message(message: object) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    assert isinstance(message, Mapping), "it has content"
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in PARTS:
        return part
    kind = part["type"]
    return {**part, kind: _json(kind, part.get(kind))}
