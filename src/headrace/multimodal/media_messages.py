"""What a child that prepares media is told, asked, and answers. Imported by both sides."""

from typing import ClassVar

import msgspec

from headrace.checkpoint.preprocessor_config import AudioSettings, ImageSettings
from headrace.media_kinds import MediaKind


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model wants its media, of the kinds that it takes. videos: of their frames. video_patches: most of a video."""

    images: ImageSettings | None = None
    audio: AudioSettings | None = None
    videos: ImageSettings | None = None
    video_patches: int = 0


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. memory_bytes: what it may allocate beyond what it needs itself."""

    settings: MediaSettings
    memory_bytes: int


class ImageJob(msgspec.Struct, frozen=True, tag=True):
    """An image to prepare. data: of the file. low: few tokens, where there is a choice. squared: it is first put in the middle of a square."""

    kind: ClassVar = MediaKind.IMAGE
    data: bytes
    low: bool = False
    squared: bool = False


class AudioJob(msgspec.Struct, frozen=True, tag=True):
    kind: ClassVar = MediaKind.AUDIO
    data: bytes


class VideoJob(msgspec.Struct, frozen=True, tag=True):
    """A video to prepare. frames: the files of its frames. fps: frames of a second."""

    kind: ClassVar = MediaKind.VIDEO
    frames: tuple[bytes, ...]
    fps: float


MediaJob = ImageJob | AudioJob | VideoJob


class Done(msgspec.Struct, frozen=True, tag=True):
    """See `MediaItem`. left_bytes: by how much the child has grown since it was ready, once the item is gone."""

    key: bytes
    values: bytes
    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    step_s: float = 0.0
    left_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An item that is not taken, and why, in words for the client; kind: a word for metrics."""

    message: str
    kind: str
    left_bytes: int = 0


Verdict = Done | Refused

VERDICTS: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
