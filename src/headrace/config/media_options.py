"""Options for media in prompts: what clients may send, and what is kept of it."""

from typing import Any

from headrace.config.option import FILLED, POSITIVE, Bounds, option
from headrace.media_kinds import DEFAULT_FILE_BYTES, MediaKind

_GROUP = "Images, audio and videos"


def max_items(kind: MediaKind) -> Any:
    """The option that bounds the items of a kind in a prompt."""
    return option(kind.default_limit, _GROUP, f"Maximum number of {kind.many} in one prompt.", POSITIVE)


def max_file_bytes(kind: MediaKind, others: str = "") -> Any:
    """The option that bounds the files of a kind."""
    return option(DEFAULT_FILE_BYTES, _GROUP, f"Maximum size of an {kind} file{others}, in bytes.", POSITIVE)


MAX_VIDEO_FRAMES = option(64, _GROUP, "Maximum number of frames of a video.", POSITIVE)
MAX_IMAGE_PATCHES = option(
    4096,
    _GROUP,
    "Maximum number of patches of an image, for models without a fixed image size: larger ones are scaled down. A video may have four times as many.",
    Bounds(least=16),
)
ALLOWED_MEDIA_DOMAINS = option(
    "",
    _GROUP,
    "Hosts from which files may be fetched by URL, comma-separated; none by default. An IP address needs its port.",
)
ALLOWED_LOCAL_MEDIA_PATH = option(
    None, _GROUP, "Folder below which files may be read by file: URL; none by default.", FILLED
)
IMAGE_PROCESSES = option(
    1, _GROUP, "Processes that decode images and audio; one more decodes videos.", Bounds(least=1, most=64)
)
IMAGE_CACHE_BYTES = option(
    256 << 20,
    _GROUP,
    "Size of the cache of decoded images, audio and videos, in bytes.",
    Bounds(least=0),
)
ENCODER_CACHE_BYTES = option(
    256 << 20, _GROUP, "Size of the cache of encoder outputs of images, audio and videos, in bytes.", POSITIVE
)
