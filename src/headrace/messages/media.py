"""Media of a prompt as the model's encoder takes them, and what was done with them. What a client gives: `headrace.media_kinds`.

Owns the structs that cross rooms and processes, and what stands for an item in the keys of the prefix cache. Does not fetch, decode or encode.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.media_kinds import MediaKind

MAX_BATCH_BYTES = 4 << 20
"""Items are encoded together while they have at most this many bytes of values; a larger one is encoded alone. Seven images of 224 pixels a side
take no longer each than a hundred together do, and what decodes beside them waits for a slice of seven only."""

MAX_PARTS = 32
"""Into which the work of a layer is cut at most."""

KEY_BYTES = 16
"""Length of `MediaItem.key`."""


class MediaSupport(msgspec.Struct, frozen=True):
    """The media that a model supports. tokens: of each kind that it supports, the text of the token that stands for an item in a prompt. reasons: why
    it does not support others, where there is more to say than that it was made so."""

    family: str = ""
    tokens: dict[MediaKind, str] = {}
    reasons: dict[MediaKind, str] = {}

    def refusal(self, kind: MediaKind) -> str:
        """What clients are told of a kind that it does not support."""
        reason = self.reasons.get(kind)
        return f"this model does not support {kind.noun}" + (f": {reason}" if reason else "")


NO_MEDIA_SUPPORT = MediaSupport()
"""Of a model that takes text only."""


class MediaItem(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One image, audio clip or video, ready for the model's encoder.

    key: KEY_BYTES bytes, equal for the same values only; what is cached of an item is found by it. num_tokens: tokens that it takes in a prompt,
    which are as many rows of the encoder's output. values: float32 little-endian, of this shape: what the family's processor of transformers
    makes of one image (tiles [tiles, 3, height, width], or patches [patches, size]), video ([steps in time, patches, size]) or audio
    ([frames, mel bins]). grid: patches in time, height and width where the family's tokens depend on it, else zeros; of audio
    (positions, 1, 1). step_s: of a video, seconds of a patch in time.
    """

    key: bytes
    num_tokens: int
    values: bytes
    shape: tuple[int, ...]
    kind: MediaKind = MediaKind.IMAGE
    grid: tuple[int, int, int] = (0, 0, 0)
    step_s: float = 0.0

    @property
    def num_bytes(self) -> int:
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
        return self.start + self.length


class MediaStats(msgspec.Struct, frozen=True):
    """What the loader of media has done since its start, for metrics.

    num_loaded: items that were given to requests, by kind. num_cache_hits: those of them that had been prepared for another. num_refused: items
    that were refused, by the kind of the reason. fetch_s, decode_s: seconds in which files were fetched, and decoded and prepared, their waiting for
    a place included. num_cached, cache_bytes: prepared items that are kept. num_killed: processes that were lost at their work.
    """

    num_loaded: Mapping[MediaKind, int] = {}
    num_cache_hits: int = 0
    num_refused: Mapping[str, int] = {}
    fetch_s: float = 0.0
    decode_s: float = 0.0
    num_cached: int = 0
    cache_bytes: int = 0
    num_killed: int = 0


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
