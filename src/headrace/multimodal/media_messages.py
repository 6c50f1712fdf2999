"""What a child that prepares images is told, asked, and answers. Imported by both sides."""

import msgspec

from headrace.checkpoint.image_processors import ImageSettings


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. memory_bytes: what it may allocate beyond what it needs itself."""

    settings: ImageSettings
    memory_bytes: int


class ImageJob(msgspec.Struct, frozen=True):
    """An image to prepare. data: of the file. low: few tokens, where there is a choice."""

    data: bytes
    low: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """See `MediaItem`. left_bytes: by how much the child has grown since it was ready, once the image is gone."""

    key: bytes
    values: bytes
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    left_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An image that is not taken, and why, in words for the client; kind: a word for metrics."""

    message: str
    kind: str
    left_bytes: int = 0


Verdict = Done | Refused

VERDICTS: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
