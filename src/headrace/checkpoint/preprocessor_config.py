"""How a checkpoint wants its media prepared: `ImageSettings` and `AudioSettings`, read from `preprocessor_config.json` and the like.

Owns the image processors and feature extractors that are known, with the defaults of transformers, and every spelling of their settings. A setting
that is not known is refused, since it may change the values. Prepares nothing (`multimodal`). Imports neither torch nor transformers.
"""

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.checkpoint.files import read_json_if_there, read_json_object
from headrace.errors import ModelError

Recipe = Literal["fixed", "pixtral", "split", "patches", "anyres", "tiled"]

_MOST_PIXELS = 1 << 26
_LONGEST_SIDE = 1 << 14
_MOST_TILES = 64

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_BILINEAR, _BICUBIC, _LANCZOS = 2, 3, 1


class Size(msgspec.Struct, frozen=True, omit_defaults=True):
    """A size as checkpoints give it: some of these, in pixels; 0 = not given. Of Qwen the edges are numbers of pixels of the whole image."""

    height: int = 0
    width: int = 0
    shortest_edge: int = 0
    longest_edge: int = 0


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the values of an image.

    recipe: the steps, by the processor of transformers: fixed = CLIP, SigLIP, LLaVA, Gemma 3; split = Idefics3; patches = Qwen2-VL;
    anyres = LLaVA-OneVision; tiled = InternVL.
    resample: Pillow's number of the filter.
    resizes: whether the image is resized at all. size: to what, or within what. crop: (height, width) that are cut from the middle, or None.
    squares: the image is first made square by a border. scale: factor of the values 0 .. 255, 0 = none. mean, std: of red, green and blue, empty =
    values are not normalised. patch_size, temporal_patch_size, merge_size: of Qwen and Pixtral. max_side: pixels of a side of a tile (Idefics3).
    splits: large images are cut into tiles. min_tiles, max_tiles: how many (InternVL). pinpoints: (height, width) of which the one that fits best is
    filled with tiles (LLaVA-OneVision). by_volume: of videos, `size` counts the pixels of all frames (Qwen3-VL), not those of one.
    """

    recipe: Recipe
    resample: int = _BICUBIC
    resizes: bool = True
    size: Size = Size()
    crop: tuple[int, int] | None = None
    squares: bool = False
    scale: float = 1 / 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    patch_size: int = 0
    temporal_patch_size: int = 1
    merge_size: int = 1
    max_side: int = 0
    splits: bool = False
    min_tiles: int = 1
    max_tiles: int = 1
    pinpoints: tuple[tuple[int, int], ...] = ()
    by_volume: bool = False


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    recipe: Recipe
    defaults: dict[str, Any]
    own: frozenset[str] = frozenset()


def _kind(recipe: Recipe, stats: tuple[tuple[float, ...], tuple[float, ...]], own: str = "", **defaults: Any) -> _Kind:
    common: dict[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    common |= {"image_mean": stats[0], "image_std": stats[1], "resample": _BICUBIC, "default_to_square": True}
    return _Kind(recipe=recipe, defaults=common | defaults, own=frozenset(own.split()))


_CROPPED: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
_IDEFICS3 = _kind(
    "split",
    _HALF,
    "do_image_splitting max_image_size return_row_col_info",
    resample=_LANCZOS,
    size={"longest_edge": 4 * 364},
    max_image_size={"longest_edge": 364},
    do_image_splitting=True,
)
_KINDS = {
    "CLIP": _kind("fixed", _CLIP, "use_square_size", **_CROPPED),
    "Llava": _kind("fixed", _CLIP, **_CROPPED),
    "Siglip": _kind("fixed", _HALF, size={"height": 224, "width": 224}, default_to_square=False),
    "Gemma3": _kind(
        "fixed",
        _HALF,
        "do_pan_and_scan pan_and_scan_min_crop_size pan_and_scan_max_num_crops pan_and_scan_min_ratio_to_activate",
        resample=_BILINEAR,
        size={"height": 224, "width": 224},
    ),
    "Pixtral": _kind("pixtral", _CLIP, "patch_size", size={"longest_edge": 1024}, patch_size=16),
    "Idefics3": _IDEFICS3,
    "SmolVLM": _IDEFICS3,
    "Qwen2VL": _kind(
        "patches",
        _CLIP,
        "patch_size temporal_patch_size merge_size min_pixels max_pixels",
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        default_to_square=False,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
    ),
    "LlavaOnevision": _kind(
        "anyres",
        _CLIP,
        "image_grid_pinpoints",
        size={"height": 384, "width": 384},
        default_to_square=False,
        image_grid_pinpoints=[[height * 384, width * 384] for height in range(1, 7) for width in range(1, 7)],
    ),
    "LlavaNext": _kind(
        "anyres",
        _CLIP,
        "image_grid_pinpoints",
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        **_CROPPED,
    ),
    "GotOcr2": _kind(
        "tiled",
        _CLIP,
        "crop_to_patches min_patches max_patches",
        size={"height": 384, "width": 384},
        crop_to_patches=False,
        min_patches=1,
        max_patches=12,
    ),
}
"""By the name of transformers' class without `ImageProcessor` and what follows."""


def _frames(stats: tuple[tuple[float, ...], tuple[float, ...]], patch_size: int) -> _Kind:
    """Of Qwen's video processors: squares of two by two patches, 128 to 768 of them."""
    square = (2 * patch_size) ** 2
    return _kind(
        "patches",
        stats,
        "patch_size temporal_patch_size merge_size min_pixels max_pixels min_frames max_frames cap_pixels_per_frame max_video_tokens",
        size={"shortest_edge": 128 * square, "longest_edge": 768 * square},
        default_to_square=False,
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=2,
    )


_VIDEO_KINDS = {"Qwen2VL": _frames(_CLIP, 14), "Qwen3VL": _frames(_HALF, 16)}
"""By the name of transformers' class without `VideoProcessor`. Which frames of a video are shown is the client's choice, so settings for it are
not read."""

_COMMON = frozenset({
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std",
    "do_pad", "pad_size", "default_to_square", "do_convert_rgb",
})  # fmt: skip
_IMAGES_IGNORE = frozenset({
    "image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "data_format", "input_data_format", "device",
    "disable_grouping", "return_tensors", "model_input_names", "image_seq_length", "image_seq_len", "video_sampling", "video_size",
    "video_processor_type", "do_sample_frames", "num_frames", "fps", "return_metadata", "video_metadata", "max_duration",
})  # fmt: skip
"""Settings that do not change the values of one image. What a file says of videos belongs to another processor."""


def read_image_settings(folder: Path, default: str) -> ImageSettings:
    """Of a checkpoint's folder. default: see `Vision.image_processor`. Raises ModelError, with the reason if images cannot be prepared."""
    return image_settings(_read_nested(folder, "image_processor", "images are"), default)


def image_settings(config: dict[str, Any], default: str = "") -> ImageSettings:
    name = config.get("image_processor_type") or config.get("feature_extractor_type")
    if name is None:
        name = default
    if not isinstance(name, str):
        raise ModelError("image_processor_type is no name")
    for ending in ("Fast", "Pil", "FeatureExtractor", "ImageProcessor"):
        name = name.removesuffix(ending)
    return _of_kind(config, _known(_KINDS, name, "ImageProcessor", "images for a {} image processor"), name)


def read_video_settings(folder: Path, default: str) -> ImageSettings:
    """The settings for frames of videos. default: see `Vision.video_processor`. Raises ModelError, with the reason if videos cannot be prepared."""
    config = read_json_if_there(folder / "processor_config.json").get("video_processor")
    for file in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if not isinstance(config, dict):
            config = read_json_if_there(folder / file) or None
    if config is None:
        raise ModelError("video_preprocessor_config.json is missing: it says how videos are prepared")
    return video_settings(config, default)


def video_settings(config: dict[str, Any], default: str) -> ImageSettings:
    name = str(config.get("video_processor_type") or default).removesuffix("VideoProcessor")
    kind = _known(_VIDEO_KINDS, name, "VideoProcessor", "videos for a {} video processor")
    if config.get("cap_pixels_per_frame"):
        raise ModelError("the video processor's cap_pixels_per_frame is not served")
    return msgspec.structs.replace(_of_kind(config, kind, name), by_volume=name == "Qwen3VL")


def _known(kinds: dict[str, _Kind], name: str, ending: str, what: str) -> _Kind:
    if name not in kinds:
        known = ", ".join(f"{each}{ending}" for each in kinds)
        raise ModelError(f"{what.format(f'{name!r:.80}')} cannot be prepared; those for these can: {known}")
    return kinds[name]


def _of_kind(config: dict[str, Any], kind: _Kind, name: str) -> ImageSettings:
    given = {key: value for key, value in config.items() if value is not None}
    unknown = given.keys() - _COMMON - _IMAGES_IGNORE - kind.own - kind.defaults.keys()
    if unknown:
        raise ModelError(f"the image processor has a setting that is not known: {', '.join(sorted(unknown))!s:.200}")
    keys = _Keys("image processor", kind.defaults | given)
    if keys.flag("do_pan_and_scan"):
        raise ModelError("the image processor's do_pan_and_scan is not served")
    if keys.config.get("pad_size") is not None:
        raise ModelError("the image processor's pad_size is not served")
    size = keys.size("size", square=keys.flag("default_to_square"))
    if kind.recipe == "patches":
        size = Size(
            shortest_edge=keys.count("min_pixels", size.shortest_edge, most=_MOST_PIXELS),
            longest_edge=keys.count("max_pixels", size.longest_edge, most=_MOST_PIXELS),
        )
        if not 0 < size.shortest_edge <= size.longest_edge:
            raise ModelError(f"the image processor's size is {size.shortest_edge} to {size.longest_edge} pixels")
    elif keys.config.get("use_square_size"):
        size = Size(height=size.shortest_edge, width=size.shortest_edge)
    crop = keys.size("crop_size", square=True) if keys.flag("do_center_crop") else Size()
    if name == "LlavaNext":
        size, crop = _tile_size(size, keys), Size()
    patch = keys.config.get("patch_size", 0)
    if isinstance(patch, dict):
        patch = patch.get("height") if patch.get("height") == patch.get("width") else None
    settings = ImageSettings(
        recipe=kind.recipe,
        resample=keys.count("resample", least=0, most=5),
        resizes=keys.flag("do_resize"),
        size=size,
        crop=(crop.height, crop.width) if crop.height and crop.width else None,
        squares=name == "Llava" and keys.flag("do_pad"),
        scale=keys.number("rescale_factor") if keys.flag("do_rescale") else 0.0,
        mean=keys.numbers("image_mean") if keys.flag("do_normalize") else (),
        std=keys.numbers("image_std") if keys.flag("do_normalize") else (),
        patch_size=_Keys(keys.owner, {"patch_size": patch}).count("patch_size", least=0, most=256),
        temporal_patch_size=keys.count("temporal_patch_size", 1, most=16),
        merge_size=keys.count("merge_size", 1, most=16),
        max_side=keys.size("max_image_size", square=True).longest_edge,
        splits=keys.flag("do_image_splitting") or keys.flag("crop_to_patches"),
        min_tiles=keys.count("min_patches", 1, most=_MOST_TILES),
        max_tiles=keys.count("max_patches", 1, most=_MOST_TILES),
        pinpoints=keys.pinpoints("image_grid_pinpoints"),
    )
    _check_size(settings)
    if 0.0 in settings.std:
        raise ModelError("the image processor's image_std has a 0")
    return settings


def _tile_size(size: Size, keys: "_Keys") -> Size:
    """Of LLaVA-NeXT: a side to which images are resized, and which is what is cut from their middle: everything."""
    side = size.shortest_edge or size.height
    square = Size(height=side, width=side)
    if keys.size("crop_size", square=True) not in (Size(), square) or size not in (Size(shortest_edge=side), square):
        raise ModelError("the image processor's crop_size is not its size")
    return square


def _check_size(settings: ImageSettings) -> None:
    size = settings.size
    edges = tuple(name for name in ("height", "width", "shortest_edge", "longest_edge") if getattr(size, name))
    served = {
        "fixed": (("height", "width"), ("shortest_edge",)),
        "pixtral": (("longest_edge",),),
        "split": (("longest_edge",),),
        "patches": (("shortest_edge", "longest_edge"),),
        "anyres": (("height", "width"),),
        "tiled": (("height", "width"),),
    }[settings.recipe]
    if edges not in served:
        raise ModelError(
            f"the image processor's size has {' and '.join(edges) or 'nothing'}; expected "
            f"{' or '.join(' and '.join(each) for each in served)}"
        )
    if settings.recipe == "split" and not settings.max_side:
        raise ModelError("the image processor's max_image_size has no longest_edge")
    if settings.recipe in ("pixtral", "patches") and not (settings.patch_size and settings.resizes):
        raise ModelError("the image processor needs a patch_size and do_resize")
    if settings.recipe == "anyres" and (not settings.pinpoints or not settings.resizes or size.height != size.width):
        raise ModelError("the image processor needs image_grid_pinpoints, do_resize and a square size")
    if settings.min_tiles > settings.max_tiles:
        raise ModelError(
            f"the image processor's min_patches is {settings.min_tiles}, and max_patches {settings.max_tiles}"
        )
    if settings.recipe != "fixed" and settings.crop is not None:
        raise ModelError("the image processor's do_center_crop is not served")


_EXTRACTOR = "WhisperFeatureExtractor"
_MOST_FRAMES = 1 << 14
_AUDIO_SIZES = frozenset({"sampling_rate", "feature_size", "n_fft", "hop_length", "chunk_length"})
_AUDIO_SERVED = {"dither": 0, "padding_value": 0, "padding_side": "right", "do_normalize": False}
"""Settings of which only one value is served."""
_AUDIO_IGNORES = frozenset({
    "feature_extractor_type", "processor_class", "auto_map", "device", "return_tensors", "model_input_names", "return_attention_mask",
    "mel_filters",
})  # fmt: skip
"""Settings that do not change the values of one sound. Older files list the mel filters, which transformers computes anew."""


class AudioSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the values of a sound: log-mel features, as `WhisperFeatureExtractor` of transformers computes them.

    sampling_rate: samples in a second. num_mel_bins: values of a frame. n_fft: samples of a frame, even. hop_length: samples from one frame to the
    next. chunk_seconds: the length to which a sound is padded, and that it may have at most.
    """

    sampling_rate: int = 16000
    num_mel_bins: int = 80
    n_fft: int = 400
    hop_length: int = 160
    chunk_seconds: int = 30

    @property
    def chunk_samples(self) -> int:
        return self.chunk_seconds * self.sampling_rate

    @property
    def chunk_frames(self) -> int:
        return self.chunk_samples // self.hop_length


def read_audio_settings(folder: Path) -> AudioSettings:
    return audio_settings(_read_nested(folder, "feature_extractor", "audio is"))


def audio_settings(config: dict[str, Any]) -> AudioSettings:
    kind = config.get("feature_extractor_type")
    if kind != _EXTRACTOR:
        raise ModelError(f"audio for the feature extractor {kind!r:.80} cannot be prepared; those for {_EXTRACTOR} can")
    given = {key: value for key, value in config.items() if value is not None and key not in _AUDIO_IGNORES}
    keys = _Keys("feature extractor", given)
    settings = AudioSettings(
        sampling_rate=keys.count("sampling_rate", 16000, least=4000, most=96000),
        num_mel_bins=keys.count("feature_size", 80, least=1, most=256),
        n_fft=keys.count("n_fft", 400, least=16, most=4096),
        hop_length=keys.count("hop_length", 160, least=16, most=4096),
        chunk_seconds=keys.count("chunk_length", 30, least=1, most=60),
    )
    if settings.n_fft % 2 or settings.hop_length > settings.n_fft:
        raise ModelError(
            f"the feature extractor's n_fft is {settings.n_fft} and its hop_length {settings.hop_length}; expected an "
            "even n_fft that is not less than hop_length"
        )
    if settings.chunk_frames > _MOST_FRAMES:
        raise ModelError(
            f"the feature extractor makes {settings.chunk_frames} frames; at most {_MOST_FRAMES} are served"
        )
    derived = {"n_samples": settings.chunk_samples, "nb_max_frames": settings.chunk_frames}
    for name, expected in derived.items():
        value = given.get(name, expected)
        if isinstance(value, bool) or value != expected:
            raise keys.wrong(name, value, f"{expected}, which follows from its other settings")
    for name, served in _AUDIO_SERVED.items():
        value = given.get(name, served)
        if isinstance(value, bool) != isinstance(served, bool) or value != served:
            raise ModelError(f"the feature extractor's {name} is {value!r:.80}, which is not served; {served!r} is")
    unknown = given.keys() - _AUDIO_SIZES - derived.keys() - _AUDIO_SERVED.keys()
    if unknown:
        raise ModelError(f"the feature extractor has a setting that is not known: {', '.join(sorted(unknown))!s:.200}")
    return settings


class _Keys:
    """Settings with their types. Every method raises ModelError."""

    def __init__(self, owner: str, config: dict[str, Any]) -> None:
        self.owner, self.config = owner, config

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"the {self.owner}'s {name} is {value!r:.80}; expected {expected}")

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = _LONGEST_SIDE) -> int:
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, value, "a number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Three numbers; one stands for three."""
        value = self.config.get(name)
        parts = value if isinstance(value, list | tuple) else [value] * 3
        if len(parts) != 3:
            raise self.wrong(name, value, "three numbers")
        return tuple(_Keys(self.owner, {name: part}).number(name) for part in parts)

    def pinpoints(self, name: str) -> tuple[tuple[int, int], ...]:
        value = self.config.get(name) or []
        if not isinstance(value, list | tuple) or len(value) > 1000:
            raise self.wrong(name, value, "a list of sizes")
        sizes = [_Keys(self.owner, {name: pair}).size(name, square=True) for pair in value]
        if not all(size.height and size.width for size in sizes):
            raise self.wrong(name, value, "a list of sizes")
        return tuple((size.height, size.width) for size in sizes)

    def size(self, name: str, *, square: bool) -> Size:
        """A size; one number is a square, or else its shortest edge. Absent = nothing given."""
        value = self.config.get(name)
        match value:
            case None:
                return Size()
            case bool():
                raise self.wrong(name, value, "a size")
            case int():
                value = {"height": value, "width": value} if square else {"shortest_edge": value}
            case [height, width]:
                value = {"height": height, "width": width}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a size")
        # Edges of Qwen are numbers of pixels, and some files call them so.
        names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
        given = {names.get(key, key): part for key, part in value.items() if part is not None}
        if not given.keys() <= set(Size.__struct_fields__):
            raise self.wrong(name, value, f"a size with {', '.join(Size.__struct_fields__)}")
        return Size(**{key: _Keys(self.owner, given).count(key, most=_MOST_PIXELS) for key in given})


def _read_nested(folder: Path, part: str, what: str) -> dict[str, Any]:
    nested = read_json_if_there(folder / "processor_config.json").get(part)
    if isinstance(nested, dict):
        return nested
    if not (folder / "preprocessor_config.json").is_file():
        raise ModelError(f"preprocessor_config.json is missing: it says how {what} prepared")
    return read_json_object(folder / "preprocessor_config.json")
