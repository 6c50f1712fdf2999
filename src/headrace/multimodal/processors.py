"""From the pixels of an image to the values that a model's encoder takes, bit by bit those of transformers' image processors (with Pillow).

Sources: the processors of transformers 5 for CLIP, SigLIP, LLaVA, LLaVA-OneVision, Gemma 3, Pixtral, Idefics3, SmolVLM, Qwen2-VL and GOT-OCR2
(InternVL), in their variants for Pillow and NumPy. Runs in a child process.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.media_kinds import MediaKind
from headrace.multimodal.limits import MAX_ITEM_BYTES, MAX_PIXELS, MediaRefusedError
from headrace.multimodal.resolutions import (
    best_resolution,
    best_tiles,
    by_longest,
    by_shortest,
    in_tiles,
    smart_size,
    within,
)

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

NO_GRID = (0, 0, 0)

LOW_TOKENS = 256  # tokens of an image with `detail: low`, at most, where its size decides
_MOST_ASPECT = 200  # qwen refuses images that are longer than wide, or wider than long, by more than this factor


Grid: TypeAlias = tuple[int, int, int]
Pixels: TypeAlias = tuple[list[Bytes], Grid]
"""Images [height, width, 3] of one size, and the grid."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """values: float32 [tiles, 3, height, width], or [patches, size] of Qwen, of a video [steps, patches, size], or of a sound
    [frames, mel bins]. grid, step_s: see `MediaItem`; of tiles (0, rows, columns). digest: of what the values are made of; they are equal for the
    same digest, grid and settings."""

    values: Floats
    grid: Grid
    digest: bytes
    step_s: float = 0.0


def prepare(image: Image.Image, settings: ImageSettings, low: bool = False, squared: bool = False) -> Prepared:
    """The values of one image in mode RGB. low: few tokens, where there is a choice. squared: in the middle of a square. Raises MediaRefusedError."""
    if squared:
        image = _squared(image, settings.mean)
    pixels, grid = _pixels(image, settings, low)
    values = _values(pixels, settings)
    if settings.recipe == "patches":
        # A still image is the same in each frame of a patch.
        values = _patches(np.repeat(values, settings.temporal_patch_size, axis=0), settings)
    return Prepared(values, grid, _digest(values.shape, pixels))


def prepare_video(
    frames: Iterable[Image.Image], num_frames: int, fps: float, settings: ImageSettings, max_patches: int
) -> Prepared:
    """The values of a video whose frames are all of one size. fps: frames of a second. max_patches: of all frames together; a video with more is made
    smaller. Raises MediaRefusedError."""
    together = settings.temporal_patch_size
    pixels: list[Bytes] = []
    size, target = (0, 0), (0, 0)
    for number, frame in enumerate(frames):
        if not number:
            size, target = frame.size, _frame_size(frame, num_frames, settings, max_patches)
        if frame.size != size:
            raise MediaRefusedError(
                f"frames[{number}] has {frame.width} x {frame.height} pixels, and frames[0] {size[0]} x {size[1]}: they must be of one size",
                "pixels",
            )
        pixels.append(np.asarray(_resized(frame, *target, settings.resample)))
    pixels += pixels[-1:] * (-len(pixels) % together)
    values = _patches(_values(pixels, settings, MediaKind.VIDEO), settings)
    grid = (len(pixels) // together, target[0] // settings.patch_size, target[1] // settings.patch_size)
    values = values.reshape(grid[0], -1, values.shape[1])
    return Prepared(values, grid, _digest(values.shape, pixels), together / fps)


def _digest(shape: tuple[int, ...], pixels: Sequence[Bytes]) -> bytes:
    digest = hashlib.blake2b(repr(shape).encode())
    for each in pixels:  # a quarter of the values' bytes, or less
        digest.update(np.ascontiguousarray(each).data)
    return digest.digest()


def _frame_size(frame: Image.Image, num_frames: int, settings: ImageSettings, max_patches: int) -> tuple[int, int]:
    """(height, width) of each frame of a video: see `_patched`."""
    height, width = frame.height, frame.width
    if max(height, width) / min(height, width) > _MOST_ASPECT:
        raise _too_long(frame)
    together, factor = settings.temporal_patch_size, settings.patch_size * settings.merge_size
    steps = -(-num_frames // together)
    size = settings.size
    if settings.by_volume:
        scale = max(1.0, factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
        tall, wide = smart_size(height, width, factor, size.shortest_edge, size.longest_edge, num_frames)
    else:
        tall, wide = smart_size(height, width, factor, size.shortest_edge, size.longest_edge)
    if tall * wide * steps > max_patches * settings.patch_size**2:
        most = max_patches * settings.patch_size**2 // steps
        tall, wide = smart_size(height, width, factor, 0, most)
        if tall * wide > most:
            raise MediaRefusedError(
                f"a video of {num_frames} frames has too many for this server (--max-image-patches)", "pixels"
            )
    return tall, wide


def _pixels(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    match settings.recipe:
        case "fixed":
            return _fixed(image, settings)
        case "pixtral":
            return _pixtral(image, settings, low)
        case "split":
            return _split(image, settings, low)
        case "patches":
            return _patched(image, settings, low)
        case "anyres":
            return _anyres(image, settings, low)
        case "tiled":
            return _tiled(image, settings, low)


def _fixed(image: Image.Image, settings: ImageSettings) -> Pixels:
    """One image of one size: CLIP, SigLIP, LLaVA, Gemma 3."""
    if settings.squares:
        image = _squared(image, settings.mean)
    if settings.resizes:
        size = settings.size
        if size.shortest_edge:
            image = _resized(image, *by_shortest(image.height, image.width, size.shortest_edge), settings.resample)
        else:
            image = _resized(image, size.height, size.width, settings.resample)
    pixels = np.asarray(image)
    if settings.crop is not None:
        pixels = _cropped(pixels, *settings.crop)
    return [pixels], NO_GRID


def _pixtral(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    """The longest edge within a bound, both edges multiples of a patch."""
    patch = settings.patch_size * settings.merge_size
    most = settings.size.longest_edge
    if low:
        most = min(most, patch * math.isqrt(LOW_TOKENS))
    height, width = image.height, image.width
    ratio = max(height / most, width / most)
    if ratio > 1:
        height, width = (math.floor(side / ratio) for side in (height, width))
    rows, columns = ((side - 1) // patch + 1 for side in (height, width))
    if rows < 1 or columns < 1:
        raise _too_long(image)
    return [np.asarray(_resized(image, rows * patch, columns * patch, settings.resample))], NO_GRID


def _split(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    """Tiles row by row, and after them the whole image in the size of a tile; or that alone."""
    side = settings.max_side
    if settings.resizes:
        image = _resized(image, *by_longest(image.height, image.width, settings.size.longest_edge), settings.resample)
    if low or not settings.splits:
        return [np.asarray(_resized(image, side, side, settings.resample))], NO_GRID
    image = _resized(image, *in_tiles(image.height, image.width, side), settings.resample)
    rows, columns = image.height // side, image.width // side
    pixels = np.asarray(image)
    if rows <= 1 and columns <= 1:
        return [pixels], NO_GRID
    tiles = _tiles_of(pixels, side, side)
    tiles.append(np.asarray(_resized(image, side, side, settings.resample)))
    return tiles, (0, rows, columns)


def _patched(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    """Both edges multiples of a square of patches, and a number of pixels within bounds."""
    height, width = image.height, image.width
    if max(height, width) / min(height, width) > _MOST_ASPECT:
        raise _too_long(image)
    patch, merge = settings.patch_size, settings.merge_size
    size = settings.size
    if low:
        size = within(size.shortest_edge, size.longest_edge, LOW_TOKENS * (patch * merge) ** 2)
    height, width = smart_size(height, width, patch * merge, size.shortest_edge, size.longest_edge)
    if height * width > size.longest_edge:  # one square of patches high or wide, and still too long
        raise _too_long(image)
    pixels = np.asarray(_resized(image, height, width, settings.resample))
    return [pixels], (1, height // patch, width // patch)


def _anyres(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    """The whole image in the size of a tile, and after it, row by row, the tiles of a larger one with black around it; low: without these. The grid
    has the image's own size, of which the encoder finds where the black is."""
    side, grid = settings.size.height, (0, image.height, image.width)
    tiles = [np.asarray(_resized(image, side, side, settings.resample))]
    if low:
        return tiles, grid
    tall, wide = best_resolution(image.height, image.width, settings.pinpoints)
    by_width, by_height = wide / image.width, tall / image.height
    if by_width < by_height:
        width, height = wide, min(math.ceil(image.height * by_width), tall)
    else:
        width, height = min(math.ceil(image.width * by_height), wide), tall
    if tall * wide > MAX_PIXELS:
        raise _too_long(image)
    pixels = np.zeros((tall, wide, 3), np.uint8)
    top, left = (tall - height) // 2, (wide - width) // 2
    pixels[top : top + height, left : left + width] = np.asarray(_resized(image, height, width, settings.resample))
    return tiles + _tiles_of(pixels, side, side), grid


def _tiled(image: Image.Image, settings: ImageSettings, low: bool) -> Pixels:
    """Tiles row by row, as many as have nearly the shape of the image, and after them the whole image in the size of a tile."""
    height, width = settings.size.height, settings.size.width
    if low or not settings.splits or settings.max_tiles < 2:
        whole = _resized(image, height, width, settings.resample) if settings.resizes else image
        return [np.asarray(whole)], NO_GRID
    rows, columns = best_tiles(image.height, image.width, settings)
    pixels = np.asarray(_resized(image, rows * height, columns * width, settings.resample))
    tiles = _tiles_of(pixels, height, width)
    if len(tiles) > 1:
        tiles.append(np.asarray(_resized(image, height, width, settings.resample)))
    return tiles, (0, rows, columns)


def _tiles_of(pixels: Bytes, height: int, width: int) -> list[Bytes]:
    """Tiles of this size row by row, into which an image can be cut."""
    tall, wide = pixels.shape[:2]
    return [pixels[y : y + height, x : x + width] for y in range(0, tall, height) for x in range(0, wide, width)]


def _values(images: Sequence[Bytes], settings: ImageSettings, kind: MediaKind = MediaKind.IMAGE) -> Floats:
    """float32 [images, 3, height, width] of pixels [height, width, 3], which are all of one size."""
    shape = (len(images), 3, *images[0].shape[:2])
    if math.prod(shape) * 4 > MAX_ITEM_BYTES:
        raise MediaRefusedError(f"the {kind} takes more than {MAX_ITEM_BYTES} bytes for this model", "pixels")
    values = np.empty(shape, np.float32)
    tables = _tables(settings)
    for image, own in zip(images, values, strict=True):
        for channel in range(3):
            np.take(tables[channel], image[:, :, channel], out=own[channel], mode="clip")
    return values


def _patches(values: Floats, settings: ImageSettings) -> Floats:
    """[frames, 3, height, width] as patches, in the order in which squares of them are merged, step by step in time."""
    patch, merge, together = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    rows, columns = values.shape[2] // patch, values.shape[3] // patch
    # [steps, frame in it, channels, rows of squares, row in it, y, columns of squares, column in it, x]
    parts = values.reshape(-1, together, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    parts = parts.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(parts).reshape(len(parts) * rows * columns, -1)


def _tables(settings: ImageSettings) -> Floats:
    """float32 [3, 256]: the value of each byte, in the steps and precisions of transformers, which have only these 256 inputs."""
    table: Floats = np.arange(256, dtype=np.float32)
    if settings.scale:
        table = (np.arange(256, dtype=np.float64) * settings.scale).astype(np.float32)
    if not settings.mean:
        return np.tile(table, (3, 1))
    mean, std = (np.array(each, np.float32)[:, None] for each in (settings.mean, settings.std))
    normal: Floats = (table - mean) / std
    return normal


def _resized(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise _too_long(image)
    return image.resize((width, height), resample=Image.Resampling(resample))


def _squared(image: Image.Image, mean: Sequence[float]) -> Image.Image:
    side = max(image.size)
    if image.width == image.height:
        return image
    if side * side > MAX_PIXELS:
        raise _too_long(image)
    square = Image.new("RGB", (side, side), tuple(int(value * 255) for value in mean) if mean else (0, 0, 0))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _cropped(pixels: Bytes, height: int, width: int) -> Bytes:
    """The middle of an image; where it is smaller, there is black around it."""
    tall, wide = pixels.shape[:2]
    top, left = (tall - height) // 2, (wide - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    larger = np.zeros((max(height, tall), max(width, wide), 3), np.uint8)
    above, before = (math.ceil((new - old) / 2) for new, old in ((larger.shape[0], tall), (larger.shape[1], wide)))
    larger[above : above + tall, before : before + wide] = pixels
    top, left = max(0, top + above), max(0, left + before)
    return larger[top : top + height, left : left + width]


def _too_long(image: Image.Image) -> MediaRefusedError:
    what = f"an image of {image.width} x {image.height} pixels"
    return MediaRefusedError(f"{what} is too long for its width, or too wide, for this model", "pixels")
