"""Writes a small model that sees or hears, with random weights, in the format of Hugging Face: enough to try how images and sounds are sent, not to
read the answers.

python examples/make_tiny_vlm.py qwen2_vl /tmp/tiny-vlm
headrace serve /tmp/tiny-vlm
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
SOUND_S = 2
"""Seconds of the longest sound: 100 frames each, of which two are one position."""
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112]]
NORMALISED = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

SPECIAL: dict[str, list[str]] = {
    "llava": ["<image>"],
    "llava_next": ["<image>"],
    "llava_onevision": ["<image>"],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
    "aya_vision": [
        "<|IMG_PATCH|>",
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "TILE_GLOBAL",
        *(f"TILE_{number}" for number in range(1, 5)),
    ],
    "pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "smolvlm": [
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ],
    "qwen2_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen2_5_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen3_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}
"""Tokens for images, by family; the first is that which stands for each row of an image."""
HEARING: dict[str, list[str]] = {"qwen2_audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]}
"""The same for sounds."""
IN_A_PROMPT = {
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
}
"""What the chat template writes for an image or a sound; "<image>" unless it is here."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEARING_TEMPLATE = (
    "{% set sounds = namespace(count=0) %}{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}{% set sounds.count = sounds.count + 1 %}Audio {{ sounds.count }}: SOUND\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2-Audio numbers its sounds."""


def tokenizer(family: str) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizer_models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = HEARING[family] if family in HEARING else SPECIAL[family]
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special])
    item, template = IN_A_PROMPT.get(family, "<image>"), HEARING_TEMPLATE if family in HEARING else TEMPLATE
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template.replace("SOUND", item).replace("IMAGE", item),
    )


def config(family: str, ids: transformers.PreTrainedTokenizerFast) -> Any:
    """The config of the whole model."""
    image = ids.convert_tokens_to_ids((HEARING[family] if family in HEARING else SPECIAL[family])[0])
    text = TEXT | {"vocab_size": len(ids), "eos_token_id": ids.eos_token_id, "pad_token_id": ids.pad_token_id}
    text |= {"bos_token_id": None}
    llama = transformers.LlamaConfig(**text)
    qwen = transformers.Qwen2Config(**{name: value for name, value in text.items() if name != "head_dim"})

    def whole(kind: str, text_config: Any, vision_config: Any, **more: Any) -> Any:
        return transformers.AutoConfig.for_model(kind, text_config=text_config, vision_config=vision_config, **more)

    match family:
        case "llava":
            vision = transformers.CLIPVisionConfig(image_size=56, patch_size=14, **VISION)
            return whole("llava", llama, vision, image_token_index=image)
        case "llava_next":
            vision = transformers.CLIPVisionConfig(image_size=56, patch_size=14, **VISION)
            return whole(family, llama, vision, image_token_index=image, image_grid_pinpoints=PINPOINTS)
        case "llava_onevision":
            vision = transformers.SiglipVisionConfig(image_size=56, patch_size=14, vision_use_head=False, **VISION)
            return whole(family, qwen, vision, image_token_index=image, image_grid_pinpoints=PINPOINTS)
        case "qwen2_audio":
            audio = AUDIO | {"num_mel_bins": 16, "max_source_positions": 50 * SOUND_S}
            ears = transformers.Qwen2AudioEncoderConfig(**audio)
            return transformers.Qwen2AudioConfig(text_config=qwen, audio_config=ears, audio_token_index=image)
        case "internvl":
            vision = transformers.InternVLVisionConfig(image_size=56, **VISION)
            return whole(family, llama, vision, image_token_id=image, tie_word_embeddings=False)
        case "aya_vision":
            vision = transformers.SiglipVisionConfig(image_size=56, patch_size=14, vision_use_head=False, **VISION)
            cohere = transformers.Cohere2Config(**text, sliding_window=32, sliding_window_pattern=2)
            return whole(family, cohere, vision, image_token_index=image, tie_word_embeddings=False)
        case "pixtral":
            vision = transformers.PixtralVisionConfig(image_size=112, patch_size=14, **VISION)
            full = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
            return whole("llava", llama, vision, image_token_index=image, **full)
        case "mistral3":
            vision = transformers.PixtralVisionConfig(image_size=112, patch_size=14, **VISION)
            mistral = transformers.MistralConfig(**text, sliding_window=None)
            return whole("mistral3", mistral, vision, image_token_index=image, tie_word_embeddings=False)
        case "smolvlm":
            vision = {"image_size": 56, "patch_size": 14, **VISION}
            return whole("smolvlm", llama, vision, image_token_id=image, scale_factor=2)
        case "qwen3_vl":
            rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e4, "mrope_interleaved": True}
            vision = {**VISION, "depth": 2, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64}
            vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
            return whole(family, text | {"rope_parameters": rope}, vision, **_qwen_tokens(ids))
        case "qwen2_vl" | "qwen2_5_vl":
            shared = {name: value for name, value in text.items() if name not in ("head_dim", "tie_word_embeddings")}
            shared["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
            vision = {"depth": 2, "num_heads": 2, "patch_size": 14}
            if family == "qwen2_vl":
                vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
            else:
                vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 56}
                vision |= {"fullatt_block_indexes": [1]}
            return whole(family, shared, vision, **_qwen_tokens(ids))
        case "gemma3":
            gemma = transformers.Gemma3TextConfig(**text, sliding_window=32, query_pre_attn_scalar=16)
            vision = transformers.SiglipVisionConfig(image_size=56, patch_size=14, vision_use_head=False, **VISION)
            begin, end = map(ids.convert_tokens_to_ids, SPECIAL[family][1:])
            more = {"boi_token_index": begin, "eoi_token_index": end, "image_token_index": image}
            return whole("gemma3", gemma, vision, mm_tokens_per_image=4, tie_word_embeddings=False, **more)
    raise AssertionError(family)


def _qwen_tokens(ids: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    return dict(zip(names, map(ids.convert_tokens_to_ids, SPECIAL["qwen2_vl"]), strict=True))


def processor(family: str) -> dict[str, Any]:
    """`preprocessor_config.json`: what makes values of an image or a sound."""
    square = {"size": {"height": 56, "width": 56}, "do_resize": True, "do_rescale": True, "do_normalize": True}
    match family:
        case "llava":
            size = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
            return {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor", **size}
        case "pixtral" | "mistral3":
            size = {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}}
            return {"image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor", **size}
        case "smolvlm":
            size = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True}
            kind = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor"}
            return {**kind, **size, **NORMALISED}
        case "llava_next":
            size = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True}
            kind = {"image_processor_type": "LlavaNextImageProcessor", "processor_class": "LlavaNextProcessor"}
            return {**kind, **size, "image_grid_pinpoints": PINPOINTS}
        case "llava_onevision":
            kind = {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "processor_class": "LlavaOnevisionProcessor",
            }
            return {**kind, **square, "image_grid_pinpoints": PINPOINTS}
        case "internvl":
            kind = {"image_processor_type": "GotOcr2ImageProcessor", "processor_class": "InternVLProcessor"}
            return {**kind, **square, "max_patches": 4}
        case "aya_vision":
            kind = {"image_processor_type": "GotOcr2ImageProcessor", "processor_class": "AyaVisionProcessor"}
            return {**kind, **square, "max_patches": 4}
        case "qwen2_audio":
            kind = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor"}
            length = {"chunk_length": SOUND_S, "n_samples": 16000 * SOUND_S, "nb_max_frames": 100 * SOUND_S}
            frames = {"feature_size": 16, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160}
            return {**kind, **length, **frames, "return_attention_mask": True}
        case "gemma3":
            return {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                **square,
                **NORMALISED,
            }
        case _:
            size = {"min_pixels": 56 * 56, "max_pixels": 196 * 196, "patch_size": 14, "temporal_patch_size": 2}
            kinds = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
            kind = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{kinds[family]}Processor"}
            return {**kind, "merge_size": 2, **size}


def write(family: str, folder: Path, seed: int = 0) -> Any:
    """Write the checkpoint; returns the model of transformers."""
    ids = tokenizer(family)
    model = transformers.AutoModelForMultimodalLM.from_config(config(family, ids), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor.data + 0.2 * noise
    model.generation_config.eos_token_id = ids.eos_token_id
    model.eval().save_pretrained(folder)
    ids.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor(family), indent=2))
    return model


def main() -> None:
    """Write a checkpoint of the family and into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=[*SPECIAL, *HEARING])
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    write(options.family, options.folder, options.seed)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(f"{options.folder}: a {options.family} of {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
