"""Images in the arguments of `Engine` and `Runtime`: the bytes of files, as structs, as JSON, and in the parts of messages.

Does not check what else is in the arguments: the request does. Pure functions; any thread.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.messages.media import ImageRef


def image_structs(given: object) -> object:
    """`image_data` with files as structs; the rest is checked later."""
    if isinstance(given, list | tuple):
        return [image_structs(item) for item in given]
    return ImageRef(data=bytes(given)) if isinstance(given, bytes | bytearray | memoryview) else given


def image_json(given: object) -> object:
    """`image_data` as HTTP takes it: files in base64; the rest is checked by the server."""
    if isinstance(given, list | tuple):
        return [image_json(item) for item in given]
    return msgspec.to_builtins(given) if isinstance(given, ImageRef) else _text(given)


def messages_as_json(messages: object) -> object:
    """Messages in which the URL of an image may be the bytes of a file, as chat completions take them."""
    return [_message(message) for message in messages] if isinstance(messages, list | tuple) else messages


def _message(message: object) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    assert isinstance(message, Mapping), "it has content"
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return part
    image = part.get("image_url")
    shown = {**image, "url": _text(image.get("url"))} if isinstance(image, Mapping) else _text(image)
    return {**part, "image_url": shown}


def _text(given: object) -> object:
    return b64encode(given).decode() if isinstance(given, bytes | bytearray | memoryview) else given
