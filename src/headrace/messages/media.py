"""Images and sounds of a prompt: as a client gives them, and as the model's encoder takes them.

Owns the structs that cross rooms and processes, and what stands for an item in the keys of the prefix cache. Does not fetch, decode or encode.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

ImageDetail = Literal["auto", "low", "high"]
MediaKind = Literal["image", "audio", "video"]

MAX_BATCH_BYTES = 4 << 20
"""Items are encoded together while they have at most this many bytes of values; a larger one is encoded alone. Seven images of 224 pixels a side
take no longer each than a hundred together do, and what decodes beside them waits for a slice of seven only."""

KEY_BYTES = 16
"""Length of `MediaItem.key`."""


class ImageRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One image, sound or video as a client gives it: exactly one of `url` and `data`.

    url: `data:` URI, `http(s):` URL, `file:` URL, or the base64 text of a file. data: the bytes of a file. detail: how closely to look at an
    image, as in OpenAI's API: "low" takes few tokens where the family has a choice.
    """

    url: str = ""
    data: bytes = b""
    detail: ImageDetail = "auto"


ImageData = ImageRef | str | list[ImageRef | str | list[ImageRef | str] | None] | None
"""Images of a call: one, or a list for its prompt, or for a batch a list with one item per prompt: an image, a list of images, or None. A string is
an `ImageRef.url`."""


class MediaInfo(msgspec.Struct, frozen=True):
    """What clients need to know of a model that sees. image_token: the text of the token that stands for an image in a prompt."""

    family: str
    image_token: str


class MediaItem(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One image or sound, ready for the model's encoder.

    key: KEY_BYTES bytes, equal for the same values only; what is cached of an item is found by it. num_tokens: tokens that it takes in a prompt,
    which are as many rows of the encoder's output. values: float32 little-endian, of this shape: what the family's processor of transformers
    makes of one image (tiles [tiles, 3, height, width], or patches [patches, size]) or sound. grid: patches in time, height and width
    where the family's tokens depend on it, else zeros.
    """

    key: bytes
    num_tokens: int
    values: bytes
    shape: tuple[int, ...]
    kind: MediaKind = "image"
    grid: tuple[int, int, int] = (0, 0, 0)

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


def num_parts(shapes: Iterable[tuple[int, ...]]) -> int:
    """Into how many parts the work of a layer on a batch is cut: of about MAX_BATCH_BYTES each, where there are tiles to cut at. shapes: of the
    values of its items."""
    found = list(shapes)
    num_bytes = sum(4 * math.prod(shape) for shape in found)
    num_tiles = sum(shape[0] if len(shape) == 4 else 1 for shape in found)
    return max(1, min(-(-num_bytes // MAX_BATCH_BYTES), num_tiles))


def pad_spans(token_ids: bytes, spans: tuple[MediaSpan, ...], media: tuple[MediaItem, ...]) -> bytes:
    """Tokens with the pads of items in place of their placeholders, so that equal keys mean equal images.

    token_ids: int32[n] bytes, the first n tokens of a sequence, which may end within a span. After four tokens of a span the whole key is compared
    (124 of its 128 bits).
    """
    keys = np.frombuffer(token_ids, np.int32).copy()
    for span in spans:
        if span.start >= len(keys):
            break
        part = keys[span.start : span.end]
        part[:] = np.resize(np.roll(media[span.item].pads, -(span.first_row % 4)), len(part))
    return keys.tobytes()
