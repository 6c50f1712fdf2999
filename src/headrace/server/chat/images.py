"""Images in the messages of a conversation: as a part of a message's content, and as what a chat template reads.

Owns the part (`image_part`), and what stands for it in a template that reads text alone. Does not own the shapes of images in each API. Pure
functions; any thread.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.messages.media import ImageDetail, ImageRef
from headrace.messages.neutral import is_empty
from headrace.server.chat.conversation import Message
from headrace.text.tokenizers import RenderedPrompt, Segment

_PRIVATE_USE = range(0x100000, 0x10FFFE)


def image_part(url: str, detail: ImageDetail = "auto") -> Message:
    """A part of a message's content that is an image. url: see `ImageRef.url`."""
    return {"type": "image", "image": ImageRef(url=url, detail=detail)}


def image_detail(where: str, detail: object) -> ImageDetail:
    """How closely to look at an image; None = auto. Raises RequestError."""
    match detail:
        case None | "auto" | "original":
            return "auto"
        case "low":
            return "low"
        case "high":
            return "high"
        case _:
            raise RequestError(f"{where} must be auto, low or high, got {str(detail)[:50]!r}", where)


def base64_image(where: str, data: object) -> Message:
    """The part of an image that is given in base64, or as a `data:` URL of it. Raises RequestError for any other URL, and unless it is a text."""
    if not isinstance(data, str) or not data or (":" in data[:32] and data[:5].lower() != "data:"):
        raise RequestError(f"{where} must be the base64 text of an image", where)
    return image_part(data)


def asks_for(fields: Mapping[object, object]) -> set[object]:
    """The names of the fields that ask for something."""
    return {name for name, value in fields.items() if not is_empty(value)}


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") == "image"


def images_in(messages: Iterable[Message]) -> list[ImageRef]:
    """The images of messages, in their order."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if is_image(part):
                image = part["image"]
                assert isinstance(image, ImageRef), "made by `image_part`"
                found.append(image)
    return found


def without_values(messages: Sequence[Message]) -> list[Message]:
    """The messages with images as templates read them: `{"type": "image"}`."""

    def shown(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message
        return message | {"content": [{"type": "image"} if is_image(part) else part for part in content]}

    return [shown(message) for message in messages]


@dataclass(frozen=True, slots=True)
class ImageMark:
    """A character that occurs in no text, in place of images. token: the text of the token that stands for an image."""

    character: str
    token: str

    @classmethod
    def beside(cls, messages: Sequence[Message], token: str) -> "ImageMark":
        """A mark that is not in these messages. Raises RequestError if they use all characters that could be one."""
        used = set().union(*map(set, _texts(list(messages))))
        for code in _PRIVATE_USE:
            if chr(code) not in used:
                return cls(chr(code), token)
        raise RequestError("the messages use up the private-use characters of Unicode", "messages")

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with parts of text in place of images."""

        def shown(message: Message) -> Message:
            content = message.get("content")
            if not isinstance(content, list):
                return message
            mark = {"type": "text", "text": self.character}
            return message | {"content": [mark if is_image(part) else part for part in content]}

        return [shown(message) for message in messages]

    def replaced(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """A prompt with the token in place of the marks, as if the template had written it."""
        segments: list[Segment] = []
        for segment in rendered.segments:
            first, *others = segment.text.split(self.character)
            segments.append(Segment(first, segment.template))
            for text in others:
                segments += [Segment(self.token, template=True), Segment(text, segment.template)]
        shown = tuple(segment for segment in segments if segment.text)
        return RenderedPrompt("".join(segment.text for segment in shown), shown)


def images_renamed(error: RequestError) -> RequestError:
    """An error of the engine about `image_data`, as one about the images of messages; any other as it is."""
    if error.param == "image_data":
        error.param = "messages"
        error.message = re.sub(
            r"^image_data\[(\d+)\]", lambda found: f"image {int(found[1]) + 1} of the messages", error.message
        )
        error.message = re.sub(r"^image_data\b", "messages", error.message)
    return error


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
