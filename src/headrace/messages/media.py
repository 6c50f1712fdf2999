"""Images, sounds and videos of a prompt: as a client gives them, and as the model's encoder takes them.

Owns the structs that cross rooms and processes, and what stands for an item in the keys of the prefix cache. Does not fetch, decode or encode.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

ImageDetail = Literal["auto", "low", "high"]
MediaKind = Literal["image", "audio", "video"]

MAX_BATCH_BYTES = 4 << 20
"""Items are encoded together while they have at most this many bytes of values; a larger one is encoded alone. Seven images of 224 pixels a side
take no longer each than a hundred together do, and what decodes beside them waits for a slice of seven only."""

MAX_PARTS = 32
"""Into which the work of a layer is cut at most."""

KEY_BYTES = 16
"""Length of `MediaItem.key`."""


class KindWords(NamedTuple):
    """How messages call a kind of media. field: of a request. many, one: items of it. limit: the option that bounds their number in a prompt.
    refusal: what is said of a model that takes none, and its code. invalid: the code for a file that cannot be read."""

    field: str
    one: str
    many: str
    limit: str
    refusal: str
    code: str
    invalid: str


WORDS: dict[MediaKind, KindWords] = {
    "image": KindWords(
        "image_data",
        "image",
        "images",
        "--max-images",
        "this model does not see images",
        "unsupported_images",
        "invalid_image",
    ),
    "audio": KindWords(
        "audio_data",
        "sound",
        "sounds",
        "--max-audios",
        "this model does not hear sounds",
        "unsupported_audio",
        "invalid_audio",
    ),
    "video": KindWords(
        "video_data",
        "video",
        "videos",
        "--max-videos",
        "this model does not see videos",
        "unsupported_videos",
        "invalid_video",
    ),
}


class ImageRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One image as a client gives it: exactly one of `url` and `data`.

    url: `data:` URI, `http(s):` URL, `file:` URL, or the base64 text of a file. data: the bytes of a file. detail: how closely to look at an
    image, as in OpenAI's API: "low" takes few tokens where the family has a choice.
    """

    url: str = ""
    data: bytes = b""
    detail: ImageDetail = "auto"

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.url) + len(self.data)


class AudioRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One sound as a client gives it: `url` or `data`, as of an `ImageRef`."""

    url: str = ""
    data: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.url) + len(self.data)


DEFAULT_FPS = 2.0
"""Frames of a second of a video whose client does not say it."""


class VideoRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One video as a client gives it: its frames, in order, each an image. fps: how many of them there are for a second of the video."""

    frames: tuple[ImageRef | str, ...]
    fps: float = DEFAULT_FPS

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The frames; a text is an `ImageRef.url`."""
        return tuple(ImageRef(url=frame) if isinstance(frame, str) else frame for frame in self.frames)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return sum(frame.num_bytes for frame in self.images)


MediaRef = ImageRef | AudioRef | VideoRef

ImageData = ImageRef | str | list[ImageRef | str | list[ImageRef | str] | None] | None
"""Images of a call: one, or a list for its prompt, or for a batch a list with one item per prompt: an image, a list of images, or None. A string is
an `ImageRef.url`."""

AudioData = AudioRef | str | list[AudioRef | str | list[AudioRef | str] | None] | None
"""Sounds of a call, in the same shapes. A string is an `AudioRef.url`."""

VideoData = VideoRef | str | list[VideoRef | str | list[VideoRef | str] | None] | None
"""Videos of a call, in the same shapes. A string is a URL `data:video/jpeg;base64,` with the base64 texts of the frames, separated by commas."""


class MediaRefs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Media of one prompt as its client gives them, each kind in the order of its tokens in the prompt."""

    images: tuple[ImageRef, ...] = ()
    sounds: tuple[AudioRef, ...] = ()
    videos: tuple[VideoRef, ...] = ()

    def of(self, kind: MediaKind) -> tuple[MediaRef, ...]:
        """Those of a kind."""
        match kind:
            case "image":
                return self.images
            case "audio":
                return self.sounds
            case "video":
                return self.videos

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.images or self.sounds or self.videos)

    @property
    def num_bytes(self) -> int:
        """Memory that they take, about."""
        return sum(ref.num_bytes for refs in (self.images, self.sounds, self.videos) for ref in refs)


NO_REFS = MediaRefs()


class Senses(msgspec.Struct, frozen=True):
    """What clients need to know of the media that a model takes. tokens: of each kind that it takes the text of the token that stands for an item in
    a prompt. reasons: why it takes no others, where there is more to say than that it was made so."""

    family: str = ""
    tokens: dict[MediaKind, str] = {}
    reasons: dict[MediaKind, str] = {}

    def refusal(self, kind: MediaKind) -> str:
        """What clients are told of a kind that it does not take."""
        reason = self.reasons.get(kind)
        return WORDS[kind].refusal + (f": {reason}" if reason else "")


NO_SENSES = Senses()
"""Of a model that reads text alone."""


class MediaItem(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One image, sound or video, ready for the model's encoder.

    key: KEY_BYTES bytes, equal for the same values only; what is cached of an item is found by it. num_tokens: tokens that it takes in a prompt,
    which are as many rows of the encoder's output. values: float32 little-endian, of this shape: what the family's processor of transformers
    makes of one image (tiles [tiles, 3, height, width], or patches [patches, size]), video ([steps in time, patches, size]) or sound
    ([frames, mel bins]). grid: patches in time, height and width where the family's tokens depend on it, else zeros; of a sound
    (positions, 1, 1). step_s: of a video, seconds of a patch in time.
    """

    key: bytes
    num_tokens: int
    values: bytes
    shape: tuple[int, ...]
    kind: MediaKind = "image"
    grid: tuple[int, int, int] = (0, 0, 0)
    step_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return len(self.values)

    @cached_property
    def pads(self) -> npt.NDArray[np.int32]:
        """int32[4], from its key: negative, so that they are equal to no token id."""
        words = np.frombuffer(self.key, "<u4") | np.uint32(1 << 31)
        return words.view(np.int32)


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of a prompt that stand for rows of an item: tokens start .. start + length - 1 for its rows from `first_row` on.

    item: its index in `PromptContent.media`. An item may lie in several spans, in order, with tokens of text between them.
    """

    start: int
    length: int
    item: int
    first_row: int = 0

    @property
    def end(self) -> int:
        """The token after it."""
        return self.start + self.length


class MediaTokens(NamedTuple):
    """Tokens of a prompt that stand for media."""

    images: int = 0
    sounds: int = 0
    videos: int = 0


NO_MEDIA_TOKENS = MediaTokens()


class EncodingStats(msgspec.Struct, frozen=True, gc=False):
    """What a scheduler has had encoded since its start.

    num_encoded, num_failed: items. num_hits: items that a request needed and that had been encoded for another. num_tokens: rows of the encoder's
    output. seconds: time spent in steps.
    """

    num_encoded: int = 0
    num_failed: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def time_places(steps: npt.NDArray[np.int64], places_per_step: float) -> npt.NDArray[np.int64]:
    """The places in time of a video's steps, from its first one on, in the precision of transformers."""
    places: npt.NDArray[np.int64] = (steps.astype(np.float32) * np.float32(places_per_step)).astype(np.int64)
    return places


def num_parts(shapes: Iterable[tuple[int, ...]]) -> int:
    """Into how many parts the work of a layer on a batch is cut: of about MAX_BATCH_BYTES each. shapes: of the values of its items."""
    num_bytes = sum(4 * math.prod(shape) for shape in shapes)
    return max(1, min(-(-num_bytes // MAX_BATCH_BYTES), MAX_PARTS))


def pad_spans(token_ids: bytes, spans: tuple[MediaSpan, ...], media: tuple[MediaItem, ...]) -> bytes:
    """Tokens with the pads of items in place of their placeholders, so that equal keys mean equal items.

    token_ids: int32[n] bytes, the first n tokens of a sequence, which may end within a span. After four tokens of an item the whole key is compared
    (124 of its 128 bits).
    """
    keys = np.frombuffer(token_ids, np.int32).copy()
    for span in spans:
        if span.start >= len(keys):
            break
        part = keys[span.start : span.end]
        part[:] = np.resize(np.roll(media[span.item].pads, -(span.first_row % 4)), len(part))
    return keys.tobytes()
