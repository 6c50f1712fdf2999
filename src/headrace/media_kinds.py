"""The kinds of media that a prompt may have beside text: image, audio, video.

Owns all that differs by kind, for every room: names in each API, error codes, words of messages, limits, and what a client gives (`ImageRef` and so
on). One more kind is a member of `MediaKind`, its reference class, a field of `MediaRefs`, `MediaFields` and `MediaParts`, and its decoder
(`multimodal/media_child.py`). No torch, no numpy.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace

from headrace.errors import RequestError

DEFAULT_FILE_BYTES = 20_000_000  # most bytes of one file, unless the options say another number
ImageDetail = Literal["auto", "low", "high"]


class MediaKind(StrEnum):
    """A kind of media. Its value is its name on the wire, in keys and in the labels of metrics.

    one: an item in messages. noun: the kind in messages, as in "does not support images". default_limit: items in a prompt. parts: types of parts of
    OpenAI's messages, each also the name of the field of its value. formats: of files that are read, by name.
    """

    one: str
    noun: str
    default_limit: int
    parts: tuple[str, ...]
    formats: tuple[str, ...]

    IMAGE = "image", "image", "images", 8, ("image_url",), ("png", "jpeg", "webp", "gif", "bmp")
    AUDIO = "audio", "audio clip", "audio", 8, ("input_audio", "audio_url"), ("wav", "mp3", "flac", "ogg", "opus")
    VIDEO = "video", "video", "videos", 2, ("video_url",), ()

    def __new__(
        cls, value: str, one: str, noun: str, default_limit: int, parts: tuple[str, ...], formats: tuple[str, ...]
    ) -> Self:
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.one, kind.noun, kind.default_limit, kind.parts, kind.formats = one, noun, default_limit, parts, formats
        return kind

    @property
    def many(self) -> str:
        return f"{self.one}s"

    @property
    def plural(self) -> str:
        """Its field of `MediaRefs`, and the last word of its options."""
        return f"{self}s"

    @property
    def field(self) -> str:
        """Its field of native requests."""
        return f"{self}_data"

    @property
    def tokens_field(self) -> str:
        """Its count of tokens in the usage of replies."""
        return f"{self}_tokens"

    @property
    def limit_option(self) -> str:
        """The option that bounds its items in a prompt."""
        return f"--max-{self.plural}"

    def limit_of(self, args: object) -> int:
        limit: int = getattr(args, f"max_{self.plural}")
        return limit

    @property
    def max_bytes_option(self) -> str:
        """The option that bounds one file."""
        return f"--max-{self}-bytes"

    def max_bytes_of(self, args: object) -> int:
        most: int = getattr(args, f"max_{self}_bytes")
        return most

    @property
    def unsupported_code(self) -> str:
        return f"unsupported_{self.noun}"

    @property
    def invalid_code(self) -> str:
        return f"invalid_{self}"

    def amount(self, number: int) -> str:
        """E.g. "2 images"."""
        return f"{number} {self.one if number == 1 else self.many}"


PARTS: dict[str, MediaKind] = {part: kind for kind in MediaKind for part in kind.parts}
"""Types of parts of OpenAI's messages."""


class FileRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An item that is one file, as a client gives it: exactly one of `url` and `data`.

    url: `data:` URI, `http(s):` URL, `file:` URL, or the base64 text of a file. data: the bytes of a file.
    """

    kind: ClassVar[MediaKind]

    url: str = ""
    data: bytes = b""

    @classmethod
    def of_text(cls, where: str, text: str) -> Self:
        """What a text in place of the item means. where: the field, for errors."""
        return cls(url=text)

    def checked(self, where: str) -> Self:
        """As it is loaded. Raises RequestError."""
        if bool(self.url) == bool(self.data):
            raise RequestError(f"{where}: an item needs either url or data", where)
        return self

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.url) + len(self.data)


class ImageRef(FileRef, frozen=True, kw_only=True):
    """An image. detail: how closely to look at it, as in OpenAI's API: "low" takes few tokens where the family has a choice."""

    kind = MediaKind.IMAGE

    detail: ImageDetail = "auto"


class AudioRef(FileRef, frozen=True):
    """An audio clip."""

    kind = MediaKind.AUDIO


DEFAULT_FPS = 2.0  # frames of a second of a video whose client does not say it
FRAMES_URL = "data:video/jpeg;base64,"  # before the frames of a video that is given as a text
MAX_FRAMES = 10_000  # of a video that is given as one text, whatever the options allow
_MIN_FPS, _MAX_FPS = 0.001, 240.0


class VideoRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A video as a client gives it: its frames, in order, each an image. fps: how many of them there are for a second of the video."""

    kind: ClassVar[MediaKind] = MediaKind.VIDEO

    frames: tuple[ImageRef | str, ...]
    fps: float = DEFAULT_FPS

    @classmethod
    def of_text(cls, where: str, text: str, fps: float = DEFAULT_FPS) -> Self:
        """The video of a text with its frames. Raises RequestError."""
        if text[: len(FRAMES_URL)].lower() != FRAMES_URL:
            raise RequestError(
                f"{where}: video files are not decoded. Take frames of the video, e.g. ffmpeg -i clip.mp4 -vf fps=2 frame%03d.jpg, and send "
                f'{{"frames": [...], "fps": 2}}, or {FRAMES_URL} and the base64 texts of the frames, separated by commas',
                where,
            )
        if text.count(",") > MAX_FRAMES:
            raise RequestError(f"{where}: a video of more than {MAX_FRAMES} frames", where)
        return cls(frames=tuple(ImageRef(url=frame) for frame in text[len(FRAMES_URL) :].split(",")), fps=fps)

    def checked(self, where: str) -> Self:
        """The video with its frames as images. Raises RequestError."""
        if not self.frames:
            raise RequestError(f"{where}: a video has no frames", where)
        if not _MIN_FPS <= self.fps <= _MAX_FPS:
            raise RequestError(
                f"{where}: fps is {self.fps:g}; expected a number from {_MIN_FPS:g} to {_MAX_FPS:g}", where
            )
        for number, frame in enumerate(self.images):
            if bool(frame.url) == bool(frame.data):
                found = "both url and data" if frame.url else "neither url nor data"
                raise RequestError(f"{where}: frames[{number}] has {found}", where)
            if frame.detail == "low":
                raise RequestError(
                    f"{where}: frames[{number}] has detail low, but all frames get the same size; leave it out", where
                )
        return replace(self, frames=self.images)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The frames; a text is an `ImageRef.url`."""
        return tuple(ImageRef(url=frame) if isinstance(frame, str) else frame for frame in self.frames)

    @property
    def num_bytes(self) -> int:
        return sum(frame.num_bytes for frame in self.images)


MediaRef = ImageRef | AudioRef | VideoRef

REFS: dict[MediaKind, type[MediaRef]] = {ref.kind: ref for ref in (ImageRef, AudioRef, VideoRef)}

FILE_KINDS: tuple[MediaKind, ...] = tuple(kind for kind, ref in REFS.items() if issubclass(ref, FileRef))
"""Kinds whose items are files; a video is made of the files of images."""


class MediaRefs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Media of one prompt as its client gives them, each kind in the order of its tokens in the prompt. Its fields are `MediaKind.plural`."""

    images: tuple[ImageRef, ...] = ()
    audios: tuple[AudioRef, ...] = ()
    videos: tuple[VideoRef, ...] = ()

    @classmethod
    def by_kind(cls, refs: Iterable[MediaRef]) -> Self:
        """References of any kind, in the order of each."""
        given = tuple(refs)
        fields: dict[str, Any] = {kind.plural: tuple(ref for ref in given if ref.kind is kind) for kind in MediaKind}
        return cls(**fields)

    def of(self, kind: MediaKind) -> tuple[MediaRef, ...]:
        refs: tuple[MediaRef, ...] = getattr(self, kind.plural)
        return refs

    def native_fields(self) -> dict[str, Any]:
        return {kind.field: [*self.of(kind)] for kind in MediaKind if self.of(kind)}

    def __bool__(self) -> bool:
        return any(map(self.of, MediaKind))

    @property
    def num_bytes(self) -> int:
        return sum(ref.num_bytes for kind in MediaKind for ref in self.of(kind))


NO_REFS = MediaRefs()

ImageData = ImageRef | str | list[ImageRef | str | list[ImageRef | str] | None] | None
AudioData = AudioRef | str | list[AudioRef | str | list[AudioRef | str] | None] | None
VideoData = VideoRef | str | list[VideoRef | str | list[VideoRef | str] | None] | None
"""Media of a call: one item, or a list for its prompt, or for a batch a list with an entry per prompt: an item, a list of items, or None. A string is
a `FileRef.url`, or for a video FRAMES_URL and the base64 texts of the frames, separated by commas."""


class MediaFields(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of a native request with media, named `MediaKind.field`."""

    image_data: ImageData = None
    audio_data: AudioData = None
    video_data: VideoData = None

    def media_data(self) -> dict[MediaKind, Any]:
        data = {kind: getattr(self, kind.field) for kind in MediaKind}
        return {kind: given for kind, given in data.items() if given is not None}


class MediaParts(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of a part of a message in OpenAI's chat completions that is media, named `MediaKind.parts`."""

    image_url: object | None = None
    input_audio: object | None = None
    audio_url: object | None = None
    video_url: object | None = None


def refs_of(data: Mapping[MediaKind, Any], num_prompts: int, is_batch: bool) -> list[MediaRefs]:
    """The media of each prompt of a call. data: in the shapes of `ImageData`. Raises RequestError."""
    refs: list[list[MediaRef]] = [[] for _ in range(num_prompts)]
    for kind, given in data.items():
        for own, more in zip(refs, _by_prompt(kind, given, num_prompts, is_batch), strict=True):
            own += more
    return [MediaRefs.by_kind(own) for own in refs]


def _by_prompt(kind: MediaKind, data: Any, num_prompts: int, is_batch: bool) -> list[list[MediaRef]]:
    if _is_nothing(data):
        return [[]] * num_prompts
    if not is_batch:
        given = data if isinstance(data, list) else [data]
        return [_refs(kind, given[0] if len(given) == 1 and isinstance(given[0], list) else given)]
    an_item = f"an item is one {kind.one}, a list of {kind.many}, or null"
    if not isinstance(data, list):
        raise RequestError(f"{kind.field}: a list of prompts needs a list with an item for each; {an_item}", kind.field)
    if len(data) != num_prompts:
        raise RequestError(
            f"{kind.field}: for a list of prompts the number of items ({len(data)}) must equal that of the prompts ({num_prompts}); {an_item}",
            kind.field,
        )
    return [_refs(kind, item if isinstance(item, list) else [item]) for item in data]


def _is_nothing(data: object) -> bool:
    """Whether it asks for nothing."""
    return all(map(_is_nothing, data)) if isinstance(data, list) else data is None or data == ""


def _refs(kind: MediaKind, given: Sequence[Any]) -> list[MediaRef]:
    refs: list[MediaRef] = []
    for item in given:
        if _is_nothing(item):
            continue
        if isinstance(item, list):
            raise RequestError(f"{kind.field} has lists of {kind.many}, but there is one prompt", kind.field)
        ref = REFS[kind].of_text(kind.field, item) if isinstance(item, str) else item
        refs.append(ref.checked(kind.field))
    return refs
