"""Options for models that see and hear: what clients may send, and what is kept of it."""

from headrace.config.option import FILLED, POSITIVE, Bounds, option

_GROUP = "Images, sounds and videos"

MAX_IMAGES = option(8, _GROUP, "Most images in one prompt.", POSITIVE)
MAX_IMAGE_BYTES = option(20_000_000, _GROUP, "Largest file of an image, or of a frame of a video, in bytes.", POSITIVE)
MAX_AUDIOS = option(8, _GROUP, "Most sounds in one prompt.", POSITIVE)
MAX_AUDIO_BYTES = option(20_000_000, _GROUP, "Largest file of a sound, in bytes.", POSITIVE)
MAX_VIDEOS = option(2, _GROUP, "Most videos in one prompt.", POSITIVE)
MAX_VIDEO_FRAMES = option(64, _GROUP, "Most frames of a video.", POSITIVE)
MAX_IMAGE_PATCHES = option(
    4096,
    _GROUP,
    "Most patches of an image, of models whose images have no fixed size: larger ones are made smaller. A video may have four times as many.",
    Bounds(least=16),
)
ALLOWED_MEDIA_DOMAINS = option(
    "",
    _GROUP,
    "Hosts, separated by commas, from which files may be fetched by URL; by default none. An address is written with its port.",
)
ALLOWED_LOCAL_MEDIA_PATH = option(
    None, _GROUP, "Folder below which files may be read by file: URL; by default none.", FILLED
)
IMAGE_PROCESSES = option(
    1, _GROUP, "Processes that decode images and sounds; one more decodes videos.", Bounds(least=1, most=64)
)
IMAGE_CACHE_BYTES = option(
    256 << 20,
    _GROUP,
    "Decoded images, sounds and videos that are kept, in bytes, for when they are sent again.",
    Bounds(least=0),
)
ENCODER_CACHE_BYTES = option(
    256 << 20, _GROUP, "What the model's encoder made of images, sounds and videos that is kept, in bytes.", POSITIVE
)
