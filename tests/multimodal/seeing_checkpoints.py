"""Folders of tiny checkpoints that see, without weights, and the processors of transformers for them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.text.tokenizers import Tokenizer, load_tokenizer

SPECIAL = [
    "<s>", "</s>", "<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<img>", "</img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13)),
]  # fmt: skip


def tokenizer(image_token: str = "<image_soft_token>") -> PreTrainedTokenizerFast:
    """Bytes, runs of two line ends, and the special tokens of all families. image_token: which of them transformers takes for that of images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {newline * 2: len(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "image_token": image_token,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )


def token_id(text: str) -> int:
    """Of a special token."""
    return tokenizer().convert_tokens_to_ids(text)


CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VISION: dict[str, dict[str, Any]] = {
    "llava": CLIP | {"image_size": 28, "patch_size": 14},
    "idefics3": CLIP | {"image_size": 32, "patch_size": 8, "model_type": "idefics3_vision"},
    "qwen2_vl": {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 14},
    "qwen2_5_vl": {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16, "patch_size": 14},
    "gemma3": CLIP | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
    "aya_vision": CLIP | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
    "mistral3": CLIP | {"model_type": "pixtral", "image_size": 64, "patch_size": 8},
    "pixtral": CLIP | {"model_type": "pixtral", "image_size": 64, "patch_size": 8},
}
VISION["qwen3_vl"] = VISION["qwen2_5_vl"] | {"deepstack_visual_indexes": [0]}
VISION["smolvlm"] = VISION["idefics3"]

CONFIG: dict[str, dict[str, Any]] = {
    "llava": {"image_token_index": token_id("<image>")},
    "idefics3": {"image_token_id": token_id("<image>"), "scale_factor": 2},
    "qwen2_vl": {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    },
    "gemma3": {
        "image_token_index": token_id("<image_soft_token>"),
        "boi_token_index": token_id("<start_of_image>"),
        "eoi_token_index": token_id("<end_of_image>"),
        "mm_tokens_per_image": 4,
    },
    "aya_vision": {"image_token_index": token_id("<|IMG_PATCH|>")},
    "mistral3": {"image_token_index": token_id("[IMG]"), "spatial_merge_size": 2, "vision_feature_layer": -1},
    "pixtral": {
        "model_type": "llava",
        "image_token_index": token_id("[IMG]"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
CONFIG["smolvlm"] = CONFIG["idefics3"]
CONFIG["qwen2_5_vl"] = CONFIG["qwen3_vl"] = CONFIG["qwen2_vl"]

PROCESSOR: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 32},
    },
    "qwen2_vl": {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 100352},
    "aya_vision": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 32, "width": 32},
        "max_patches": 12,
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
    "pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 64},
        "patch_size": {"height": 8, "width": 8},
    },
}
PROCESSOR["smolvlm"] = PROCESSOR["idefics3"] | {"image_processor_type": "SmolVLMImageProcessor"}
PROCESSOR["qwen2_5_vl"] = PROCESSOR["qwen2_vl"]
PROCESSOR["qwen3_vl"] = PROCESSOR["qwen2_vl"] | {"patch_size": 14}
PROCESSOR["mistral3"] = PROCESSOR["pixtral"]


def write_checkpoint(folder: Path, family: str, **processor: Any) -> Tokenizer:
    """Write a checkpoint without weights, and read its tokenizer. processor: settings of the image processor."""
    tokenizer().save_pretrained(folder)
    config = {"model_type": family, "vision_config": VISION[family]} | CONFIG[family]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR[family] | processor))
    return load_tokenizer(folder)


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode) if mode != "RGBA" else Image.fromarray(pixels, "RGBA")


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file with this image."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()
