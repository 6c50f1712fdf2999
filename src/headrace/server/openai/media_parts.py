"""Parts of messages that are media (`MediaKind.parts`), in the shapes of OpenAI's chat completions and of other servers.

Owns how each type is read. Pure functions; any thread.
"""

from collections.abc import Callable, Mapping

from headrace.errors import RequestError
from headrace.media_kinds import DEFAULT_FPS, PARTS, REFS, ImageRef, VideoRef
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import Message
from headrace.server.chat.media import asks_for, base64_audio, image_detail, part_of
from headrace.server.openai.protocol import ContentPart

SERVED = f"text, {', '.join(PARTS)}, and file with a text"

_OTHERS = ("text", "file", "refusal")


def media_part(where: str, part: ContentPart) -> Message | None:
    """The part as the engine takes it; None = it is of another type. Raises RequestError."""
    if (kind := PARTS.get(part.type)) is None:
        return None
    for name in (*_OTHERS, *(PARTS.keys() - {part.type})):
        if not is_empty(getattr(part, name)):
            raise RequestError(f"{where}.{name} does not belong to a part of type {part.type}", f"{where}.{name}")
    where, given = f"{where}.{part.type}", getattr(part, part.type)
    if (read := _READERS.get(part.type)) is not None:
        return read(where, given)
    return part_of(REFS[kind].of_text(where, _url(where, given)[0]))


def _image(where: str, given: object) -> ImageRef:
    url, others = _url(where, given, "detail")
    return ImageRef(url=url, detail=image_detail(f"{where}.detail", others.get("detail")))


def _video(where: str, given: object) -> Message:
    """Of frames: in one URL, or as images."""
    if not isinstance(given, Mapping) or "frames" not in given:
        url, others = _url(where, given, "fps")
        return part_of(VideoRef.of_text(where, url, _fps(where, others)).checked(where))
    _check_names(where, given, "frames", "fps")
    frames = given["frames"]
    if not isinstance(frames, list):
        raise RequestError(f"{where}.frames must be a list of images", f"{where}.frames")
    images = tuple(_image(f"{where}.frames[{number}]", frame) for number, frame in enumerate(frames))
    return part_of(VideoRef(frames=images, fps=_fps(where, given)).checked(where))


def _fps(where: str, given: Mapping[str, object]) -> float:
    fps = given.get("fps")
    if is_empty(fps):
        return DEFAULT_FPS
    if isinstance(fps, bool) or not isinstance(fps, int | float):
        raise RequestError(f"{where}.fps must be a number", f"{where}.fps")
    return float(fps)


def _url(where: str, given: object, *names: str) -> tuple[str, Mapping[str, object]]:
    """The URL of a part, and the object with it. names: other fields that the object may have. Raises RequestError."""
    found = {"url": given} if isinstance(given, str) else given
    if not isinstance(found, Mapping) or not isinstance(found.get("url"), str):
        listed = " and ".join(f'"{name}"' for name in ("url", *names))
        raise RequestError(f"{where} must be a URL, or an object with {listed}", where)
    if not found["url"]:
        raise RequestError(f"{where} is empty: it must be a URL", where)
    _check_names(where, found, "url", *names)
    return found["url"], found


def _check_names(where: str, given: Mapping[str, object], *names: str) -> None:
    """Raises RequestError for a field with another name that asks for something."""
    if unknown := sorted(map(str, asks_for(given) - set(names))):
        raise RequestError(
            f"{where}: the field {unknown[0][:50]!r} is not known here; those that are: {', '.join(names)}",
            f"{where}.{unknown[0][:50]}",
        )


_READERS: dict[str, Callable[[str, object], Message]] = {
    "image_url": lambda where, given: part_of(_image(where, given)),
    "input_audio": base64_audio,
    "video_url": _video,
}
"""Of types whose value is more than a URL."""
