"""Values of images, bit by bit those of transformers' processors, from the same settings."""

import importlib
import io
import json

import numpy as np
import pytest
from PIL import Image
from seeing_checkpoints import PROCESSOR, file_of, picture

from headrace.checkpoint.preprocessor_config import ImageSettings, image_settings, read_image_settings
from headrace.errors import ModelError
from headrace.multimodal.images import read_image
from headrace.multimodal.limits import MediaRefusedError
from headrace.multimodal.processors import prepare
from headrace.multimodal.resolutions import bounded

TILES = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
CASES = {
    "clip": ("clip", "CLIP", "llava", {}),
    "clip, odd crop": ("clip", "CLIP", "llava", {"size": {"shortest_edge": 50}, "crop_size": {"height": 61, "width": 45}}),
    "clip, no resize": ("clip", "CLIP", "llava", {"do_resize": False, "crop_size": {"height": 64, "width": 64}}),
    "clip, raw": ("clip", "CLIP", "llava", {"do_rescale": False}),
    "clip, not normalised": ("clip", "CLIP", "llava", {"do_normalize": False, "rescale_factor": 0.01}),
    "clip, bytes": ("clip", "CLIP", "llava", {"do_normalize": False, "do_rescale": False}),
    "llava, square": ("llava", "Llava", "llava", {"do_pad": True}),
    "siglip": ("siglip", "Siglip", "llava", {}),
    "siglip, bilinear": ("siglip", "Siglip", "llava", {"size": {"height": 30, "width": 30}, "resample": 2}),
    "gemma3": ("gemma3", "Gemma3", "gemma3", {"size": {"height": 96, "width": 96}}),
    "pixtral": ("pixtral", "Pixtral", "mistral3", {"size": {"longest_edge": 160}}),
    "pixtral, patch 14": ("pixtral", "Pixtral", "mistral3", {"patch_size": {"height": 14, "width": 14}}),
    "idefics3": ("idefics3", "Idefics3", "idefics3", TILES),
    "idefics3, whole": ("idefics3", "Idefics3", "idefics3", TILES | {"do_image_splitting": False}),
    "idefics3, no resize": ("idefics3", "Idefics3", "idefics3", TILES | {"do_resize": False}),
    "smolvlm": ("smolvlm", "SmolVLM", "smolvlm", {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}),
    "anyres": ("llava_onevision", "LlavaOnevision", "llava_onevision", {
        "size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [96, 32], [160, 64], [64, 192]],
    }),
    "anyres, cropped": ("llava_next", "LlavaNext", "llava_next", {
        "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
    }),
    "tiled": ("got_ocr2", "GotOcr2", "internvl", {"size": {"height": 32, "width": 32}, "crop_to_patches": True}),
    "tiled, not square": ("got_ocr2", "GotOcr2", "internvl", {
        "size": {"height": 24, "width": 40}, "crop_to_patches": True, "min_patches": 2, "max_patches": 9,
    }),
    "tiled, whole": ("got_ocr2", "GotOcr2", "internvl", {"size": {"height": 24, "width": 40}}),
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", "qwen2_vl", {"min_pixels": 3136, "max_pixels": 50176}),
    "qwen, patch 16": ("qwen2_vl", "Qwen2VL", "qwen2_5_vl", {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 131072}}),
}  # fmt: skip
SIZES = [(1, 1), (1, 9), (7, 5), (32, 32), (33, 31), (100, 40), (64, 301), (224, 224), (300, 207), (17, 500)]


def theirs(case: str):
    module, name, _, options = CASES[case]
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    processor = getattr(found, f"{name}ImageProcessorPil")(**options)
    return processor, image_settings(processor.to_dict())


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_transformers(case: str):
    processor, settings = theirs(case)
    more = {"return_row_col_info": True} if settings.recipe == "split" else {}
    for number, (height, width) in enumerate(SIZES):
        image = picture(height, width, seed=number)
        found = processor(image, return_tensors="np", **more)
        expected = np.asarray(found["pixel_values"])
        if settings.recipe in ("split", "anyres"):
            expected = expected[0]

        ours = prepare(image, settings)

        assert ours.values.dtype == np.float32
        assert ours.values.flags.c_contiguous
        assert ours.values.shape == expected.shape, (height, width)
        assert np.array_equal(ours.values, expected), (height, width)
        if settings.recipe == "split":
            assert ours.grid == (0, found["rows"][0][0], found["cols"][0][0])
        elif settings.recipe == "tiled":
            assert max(ours.grid[1] * ours.grid[2], 1) in (len(expected), len(expected) - 1)
        elif settings.recipe == "anyres":
            assert ours.grid == (0, height, width) == (0, *found["image_sizes"][0])
        elif settings.recipe == "patches":
            assert ours.grid == tuple(found["image_grid_thw"][0])
        else:
            assert ours.grid == (0, 0, 0)


def test_several_images_of_llava_onevision_are_squares_in_the_mean_colour():
    processor, settings = theirs("anyres")
    images = [picture(height, width, seed=number) for number, (height, width) in enumerate(SIZES)]
    expected = processor([images], return_tensors="np")["pixel_values"]

    for image, values in zip(images, expected, strict=True):
        assert np.array_equal(prepare(image, settings, low=True, squared=True).values, values), image.size


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGB", "RGBA"])
def test_colours_are_those_of_transformers(mode: str):
    processor, settings = theirs("siglip, bilinear")
    data = file_of(picture(40, 50, mode))
    expected = processor(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"]
    assert np.array_equal(prepare(read_image(data), settings).values, expected)


def test_transparent_palettes_are_laid_on_white():
    image = picture(8, 8).quantize(4)
    data = file_of(image, transparency=bytes([0, 0, 0, 0]))
    assert np.all(np.asarray(read_image(data)) == 255)


def test_grey_of_16_bits_keeps_its_upper_8():
    grey = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    pixels = np.asarray(read_image(file_of(Image.fromarray(grey))))
    assert np.array_equal(pixels[:, :, 1], (grey >> 8).astype(np.uint8))


def test_settings_come_from_either_file(tmp_path):
    for name in ("preprocessor_config.json", "processor_config.json"):
        nested = name == "processor_config.json"
        config = PROCESSOR["qwen2_vl"]
        (tmp_path / name).write_text(json.dumps({"image_processor": config, "x": 1} if nested else config))
        settings = read_image_settings(tmp_path, "Qwen2VL")
        assert (settings.size.shortest_edge, settings.size.longest_edge) == (3136, 100352)
        (tmp_path / name).unlink()
    with pytest.raises(ModelError, match="preprocessor_config"):
        read_image_settings(tmp_path, "Qwen2VL")


REAL = {
    "llava-1.5": ("llava", {
        "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
    }),
    "an old CLIP": ("llava", {
        "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True, "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3, "size": 224,
    }),
    "SmolVLM": ("smolvlm", {
        "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "SmolVLMImageProcessor", "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": 512}, "processor_class": "SmolVLMProcessor", "resample": 1, "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 2048}, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
    }),
    "Qwen2.5-VL": ("qwen2_5_vl", {
        "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
    }),
    "Qwen2-VL, saved again": ("qwen2_vl", {
        "size": {"max_pixels": 12845056, "min_pixels": 3136}, "max_pixels": 12845056, "min_pixels": 3136, "patch_size": 14,
        "image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }),
    "Gemma 3": ("gemma3", {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None, "pan_and_scan_min_crop_size": None, "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor", "resample": 2, "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896},
    }),
    "Mistral Small 3.1": ("mistral3", {
        "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None, "do_center_crop": None,
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "PixtralImageProcessorFast", "image_std": [0.26862954, 0.26130258, 0.27577711], "input_data_format": None,
        "patch_size": 14, "processor_class": "Mistral3Processor", "resample": 3, "rescale_factor": 0.00392156862745098,
        "return_tensors": None, "size": {"longest_edge": 1540},
    }),
}  # fmt: skip
"""As published."""


@pytest.mark.parametrize("name", REAL)
def test_published_settings_are_read(name: str):
    _, config = REAL[name]
    settings = image_settings(config)
    assert isinstance(settings, ImageSettings)
    assert settings.scale == pytest.approx(1 / 255)
    assert len(settings.mean) == len(settings.std) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_processor_type": "MllamaImageProcessor"}, "Mllama"),
        ({"image_processor_type": 3}, "no name"),
        ({"do_flip": True}, "do_flip"),
        ({"size": {"shortest_edge": 0}}, "shortest_edge"),
        ({"size": {"longest_edge": 10}}, "longest_edge"),
        ({"size": {"depth": 10}}, "size"),
        ({"size": "large"}, "size"),
        ({"size": True}, "size"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"resample": 9}, "resample"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"pad_size": {"height": 3, "width": 3}}, "pad_size"),
    ],
    ids=str,
)
def test_settings_that_are_not_served_are_refused_with_a_reason(change: dict, words: str):
    with pytest.raises(ModelError, match=words):
        image_settings(PROCESSOR["llava"] | change)


@pytest.mark.parametrize("max_patches", [16, 64, 300, 4096])
@pytest.mark.parametrize("family", ["qwen2_vl", "pixtral"])
def test_an_image_is_made_smaller_until_it_has_few_enough_patches(family: str, max_patches: int):
    settings = bounded(image_settings(PROCESSOR[family] | {"max_pixels": None}), max_patches)
    for height, width in ((500, 500), (300, 900), (900, 250), (5, 5)):
        values = prepare(picture(height, width), settings).values
        patches = len(values) if family == "qwen2_vl" else values.shape[2] * values.shape[3] // settings.patch_size**2
        assert 1 <= patches <= max_patches


def test_few_tokens_are_taken_where_there_is_a_choice():
    _, qwen = theirs("qwen, patch 16")
    assert len(prepare(picture(900, 900), qwen, low=True).values) <= 256 * 4
    _, tiles = theirs("idefics3")
    assert prepare(picture(100, 70), tiles, low=True).values.shape == (1, 3, 32, 32)
    _, pixtral = theirs("pixtral")
    assert prepare(picture(900, 900), pixtral, low=True).values.shape == (1, 3, 160, 160)


@pytest.mark.parametrize(
    ("case", "size"),
    [("clip", (20_000, 1)), ("qwen2_vl", (1, 201)), ("pixtral", (1, 5000)), ("llava, square", (9000, 1))],
)
def test_an_image_that_is_too_long_is_refused(case: str, size: tuple[int, int]):
    _, settings = theirs(case)
    with pytest.raises(MediaRefusedError, match="too long"):
        prepare(picture(*size), settings)
