"""Parts of messages that are images, sounds or videos, in the shapes of OpenAI's chat completions and of other servers.

Owns the types `image_url`, `input_audio`, and of vLLM and SGLang `audio_url` and `video_url`. Pure functions; any thread.
"""

from collections.abc import Callable

from headrace.errors import RequestError
from headrace.frontend.media import video_of_url
from headrace.messages.media import ImageRef, VideoRef
from headrace.messages.neutral import is_empty
from headrace.server.chat.conversation import Message
from headrace.server.chat.media import asks_for, audio_part, base64_audio, image_detail, image_part, video_part
from headrace.server.openai.protocol import ContentPart

SERVED = "text, image_url, input_audio, audio_url and video_url"

_OTHERS = ("text", "file", "refusal")


def media_part(where: str, part: ContentPart) -> Message | None:
    """The part as the engine takes it; None = it is of another type. Raises RequestError."""
    if (read := _READERS.get(part.type)) is None:
        return None
    for name in (*_OTHERS, *(_READERS.keys() - {part.type})):
        if not is_empty(getattr(part, name)):
            raise RequestError(f"{where}.{name} does not belong to a part of type {part.type}", f"{where}.{name}")
    return read(f"{where}.{part.type}", getattr(part, part.type))


def _image(where: str, given: object) -> Message:
    match given:
        case str(url) if url:
            return image_part(url)
        case {"url": str(url), **others} if url and asks_for(others) <= {"detail"}:
            return image_part(url, image_detail(f"{where}.detail", others.get("detail")))
        case _:
            raise RequestError(f'{where} must be a URL, or an object with "url" and "detail"', where)


def _audio(where: str, given: object) -> Message:
    match given:
        case str(url) if url:
            return audio_part(url)
        case {"url": str(url), **others} if url and not asks_for(others):
            return audio_part(url)
        case _:
            raise RequestError(f'{where} must be a URL, or an object with "url"', where)


def _video(where: str, given: object) -> Message:
    """Of frames: in one URL, or as images."""
    match given:
        case str(url) if url:
            return video_part(video_of_url(where, url))
        case {"url": str(url), **others} if url and not asks_for(others):
            return video_part(video_of_url(where, url))
        case {"frames": [*frames], **others} if asks_for(others) <= {"fps"}:
            images = tuple(_frame(f"{where}.frames[{number}]", frame) for number, frame in enumerate(frames))
            fps = others.get("fps")
            if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float)):
                raise RequestError(f"{where}.fps must be a number", f"{where}.fps")
            return video_part(VideoRef(frames=images) if fps is None else VideoRef(frames=images, fps=float(fps)))
        case _:
            raise RequestError(f'{where} must be a URL, or an object with "url", or with "frames" and "fps"', where)


def _frame(where: str, given: object) -> ImageRef:
    ref = _image(where, given)["image"]
    assert isinstance(ref, ImageRef), "a part of an image"
    return ref


_READERS: dict[str, Callable[[str, object], Message]] = {
    "image_url": _image,
    "input_audio": base64_audio,
    "audio_url": _audio,
    "video_url": _video,
}
