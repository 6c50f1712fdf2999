"""To which size an image is made, and into how many tiles it is cut, by the rules of transformers' image processors: (height, width), always."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from headrace.checkpoint.preprocessor_config import ImageSettings, Size

MOST_OF_A_SIDE = 4096  # idefics3 makes no image larger than this


def bounded(settings: ImageSettings, max_patches: int) -> ImageSettings:
    """The settings such that an image has at most so many patches, where its size decides: then it is made smaller."""
    size = settings.size
    if settings.recipe == "patches":
        most = max_patches * settings.patch_size**2
        size = within(size.shortest_edge, size.longest_edge, most)
    elif settings.recipe == "pixtral":
        side = settings.patch_size * settings.merge_size
        most = max(1, math.isqrt(max_patches) // settings.merge_size) * side
        size = Size(longest_edge=min(size.longest_edge, most))
    return replace(settings, size=size)


def smart_size(height: int, width: int, factor: int, least: int, most: int, num_frames: int = 1) -> tuple[int, int]:
    """(height, width) near those given, multiples of `factor`, with `least` to `most` pixels together (Qwen's smart_resize). num_frames: of a video
    whose bounds are for all of its frames."""
    tall, wide = (round(side / factor) * factor for side in (height, width))
    frames = num_frames if num_frames == 1 else round(num_frames / 2) * 2
    if frames * tall * wide > most:
        shrink = math.sqrt(num_frames * height * width / most)
        tall, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif frames * tall * wide < least:
        grow = math.sqrt(least / (num_frames * height * width))
        tall, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return tall, wide


def best_resolution(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) in which most of an image can be seen, and of these the smallest; the first of several (LLaVA-NeXT)."""

    def fit(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        return seen, seen - size[0] * size[1]

    return max(pinpoints, key=fit)


def without_border(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """What is left of rows x columns, in which an image of this size is centred, without those that are wholly border (LLaVA-NeXT)."""
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return rows, columns


def shrunk(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches such that there are about `most` of them, unless they are not many more (LLaVA-OneVision). most: 0 = any number."""
    if not most:
        return rows, columns
    shrink = math.sqrt(rows * columns / most)
    return (int(rows // shrink), int(columns // shrink)) if shrink > 1.1 else (rows, columns)


def best_tiles(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """(rows, columns) whose shape is the nearest to that of the image. Of those with the same shape, a larger one only if the image fills more than
    half of it."""
    aspect, area = width / height, width * height
    most = settings.max_tiles
    counts = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if settings.min_tiles <= rows * columns <= most
    ]
    best, distance = (1, 1), math.inf
    for rows, columns in sorted(counts, key=math.prod):
        other = abs(aspect - columns / rows)
        fills = area > 0.5 * settings.size.height * settings.size.width * rows * columns
        if other < distance or (other == distance and fills):
            best, distance = (rows, columns), other
    return best


def by_shortest(height: int, width: int, shortest: int) -> tuple[int, int]:
    if width <= height:
        return int(shortest * height / width), shortest
    return shortest, int(shortest * width / height)


def by_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longest edge becomes `longest`, the other one even (Idefics3)."""
    aspect = width / height
    if width >= height:
        wide, tall = longest, int(longest / aspect)
        tall += tall % 2
    else:
        tall, wide = longest, int(longest * aspect)
        wide += wide % 2
    tall, wide = max(tall, 1), max(wide, 1)
    aspect = wide / tall
    if wide >= tall and wide > MOST_OF_A_SIDE:
        wide, tall = MOST_OF_A_SIDE, int(MOST_OF_A_SIDE / aspect)
    elif tall > wide and tall > MOST_OF_A_SIDE:
        tall, wide = MOST_OF_A_SIDE, int(MOST_OF_A_SIDE * aspect)
    return max(tall, 1), max(wide, 1)


def in_tiles(height: int, width: int, side: int) -> tuple[int, int]:
    """The longer edge up to a multiple of a tile's side, then the other one (Idefics3)."""
    aspect = width / height
    if width >= height:
        wide = math.ceil(width / side) * side
        return math.ceil(int(wide / aspect) / side) * side, wide
    tall = math.ceil(height / side) * side
    return tall, math.ceil(int(tall * aspect) / side) * side


def within(least: int, most: int, bound: int) -> Size:
    most = min(most, bound)
    return Size(shortest_edge=min(least, most), longest_edge=most)
