"""Media in the messages of a conversation: as a part of a message's content, and as what a chat template reads.

Owns the parts (`part_of`), and what stands for them in a template that takes text only. Does not own the shapes of media in each API. Pure functions;
any thread.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.errors import RequestError
from headrace.media_kinds import AudioRef, ImageDetail, ImageRef, MediaKind, MediaRef, MediaRefs
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import Message
from headrace.text.tokenizers import RenderedPrompt, Segment

_PRIVATE_USE = range(0x100000, 0x10FFFE)


def part_of(ref: MediaRef) -> Message:
    """An item as a part of a message's content."""
    return {"type": ref.kind.value, ref.kind.value: ref}


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
    return part_of(ImageRef(url=data))


def base64_audio(where: str, given: object) -> Message:
    """The part of audio that is given in base64, as `input_audio` of OpenAI. Raises RequestError."""
    data, name = (given.get("data"), given.get("format")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(given, Mapping) or not isinstance(data, str):
        raise RequestError(
            f'{where} must be an object with "data", the base64 text of an audio file, and "format"', where
        )
    if unknown := sorted(map(str, asks_for(given) - {"data", "format"})):
        raise RequestError(f"{where}: the field {unknown[0][:50]!r} is not known here", where)
    if not data:
        raise RequestError(f"{where}.data is empty: it must be the base64 text of an audio file", f"{where}.data")
    if ":" in data[:32] and data[:5].lower() != "data:":
        raise RequestError(
            f"{where}.data must be the base64 text of an audio file; a URL goes into a part of type audio_url",
            f"{where}.data",
        )
    if not is_empty(name) and str(name).lower() not in MediaKind.AUDIO.formats:
        raise RequestError(
            f"{where}.format must be one of {', '.join(MediaKind.AUDIO.formats)}, got {str(name)[:50]!r}",
            f"{where}.format",
        )
    return part_of(AudioRef(url=data))


def asks_for(fields: Mapping[Any, object]) -> set[object]:
    """The names of the fields that ask for something."""
    return {name for name, value in fields.items() if not is_empty(value)}


def is_media(part: object) -> bool:
    """Whether a part of a message's content is media."""
    return _kind_of(part) is not None


def _kind_of(part: object) -> MediaKind | None:
    if not isinstance(part, dict):
        return None
    return next((kind for kind in MediaKind if part.get("type") == kind), None)


def media_in(messages: Iterable[Message]) -> MediaRefs:
    """The media of messages, each kind in its order."""
    contents = (content for message in messages if isinstance(content := message.get("content"), list))
    return MediaRefs.by_kind(part[kind] for content in contents for part in content if (kind := _kind_of(part)))


def without_values(messages: Sequence[Message]) -> list[Message]:
    """The messages with media as templates read them, `{"type": KIND}`."""
    return _replaced(messages, lambda kind: {"type": kind.value})


def _replaced(messages: Sequence[Message], shown: Callable[[MediaKind], Message]) -> list[Message]:
    """The messages with other parts in place of media."""

    def of_part(part: Message) -> Message:
        kind = _kind_of(part)
        return part if kind is None else shown(kind)

    def of_message(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_media, content)):
            return message
        return message | {"content": [of_part(part) for part in content]}

    return [of_message(message) for message in messages]


@dataclass(frozen=True, slots=True)
class MediaMarks:
    """Characters that occur in no text, in place of media. tokens: of each kind the character, and the text of the token that stands for an item."""

    tokens: Mapping[MediaKind, tuple[str, str]]

    @classmethod
    def beside(cls, messages: Sequence[Message], tokens: Mapping[MediaKind, str]) -> "MediaMarks":
        """Marks that are not in these messages. Raises RequestError if they use all characters that could be one."""
        used = set().union(*map(set, _texts(list(messages))))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        marks = list(islice(free, len(tokens)))
        if len(marks) < len(tokens):
            raise RequestError("the messages use up the private-use characters of Unicode", "messages")
        return cls({kind: (mark, token) for mark, (kind, token) in zip(marks, tokens.items(), strict=True)})

    def as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with parts of text in place of media."""
        return _replaced(messages, lambda kind: {"type": "text", "text": self.tokens[kind][0]})

    def replaced(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """A prompt with the tokens in place of the marks, as if the template had written them."""
        tokens = dict(self.tokens.values())
        pattern = re.compile(f"([{''.join(tokens)}])")
        segments: list[Segment] = []
        for segment in rendered.segments:
            for text in filter(None, pattern.split(segment.text)):
                is_mark = text in tokens
                segments.append(Segment(tokens[text] if is_mark else text, is_mark or segment.template))
        return RenderedPrompt("".join(segment.text for segment in segments), tuple(segments))


def media_renamed(error: RequestError) -> RequestError:
    """An error of the engine about `image_data` and so on, as one about the media of messages; any other as it is."""
    for kind in MediaKind:
        if error.param == kind.field:
            error.param = "messages"
            error.message = re.sub(
                rf"^{kind.field}\[(\d+)\]",
                lambda found, one=kind.one: f"{one} {int(found[1]) + 1} of the messages",  # type: ignore[misc]
                error.message,
            )
            error.message = re.sub(rf"^{kind.field}\b", "messages", error.message)
            break
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
