"""Writes a tiny multimodal checkpoint as the two GGUF files that llama.cpp's converters make of it: the text model, and its vision encoder.

Names of tensors are those of the gguf library; metadata and changes of weights as in llama.cpp's `conversion/` and, of LLaVA and Qwen2-VL, in its
older `convert_image_encoder_to_gguf.py` and `qwen2_vl_surgery.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from make_tiny_vlm import SPECIAL
from safetensors.numpy import load_file

ARCHITECTURES = {"gemma3": "gemma3", "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}
PROJECTORS = {
    "llava": "mlp",
    "llava_next": "mlp",
    "gemma3": "gemma3",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "smolvlm": "idefics3",
    "pixtral": "pixtral",
    "mistral3": "pixtral",
    "internvl": "internvl",
}
OLD = {"llava", "llava_next", "qwen2_vl"}
"""As older converters write them, which give the halves of a feed-forward layer each other's name."""
CLIP_STATISTICS = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
LAYERS = 8  # that names are made for: the library numbers the projector's layers alike

# Names that transformers writes today -> those that llama.cpp's converters read, in this order.
OLD_NAMES = [
    (r"^language_model\.model\.|^model\.language_model\.|^model\.text_model\.", "model."),
    (r"^language_model\.lm_head", "lm_head"),
    (r"^model\.visual\.", "visual."),
    (r"mm_input_projection_weight$", "mm_input_projection.weight"),
    (r"^vision_tower\.(?=(embeddings\.(class|patch_embedding\.|position_embedding\.)|encoder\.layers|p\w+_lay))", "vision_tower.vision_model."),
    (r"^vision_tower\.(?=(embeddings|encoder\.layer\.|layernorm))", "model.vision_tower."),
    (r"(lambda_\d|position_embeddings)$", r"\1.weight"),
]  # fmt: skip


def write_pair(
    folder: Path, family: str, kind: Any = gguf.GGMLQuantizationType.F32, without: str = ""
) -> tuple[Path, Path]:
    """The GGUF files of the checkpoint in `folder`, in a folder beside it. kind: of the encoder's matrices. without: a token that the
    vocabulary lacks."""
    out = folder.with_name(f"{folder.name}-gguf")
    out.mkdir(exist_ok=True)
    config, processor = (
        json.loads((folder / name).read_text()) for name in ("config.json", "preprocessor_config.json")
    )
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, old in OLD_NAMES:
            name = re.sub(theirs, old, name)
        tensors[name] = tensor
    text = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(("model.layers", "model.norm", "model.embed", "lm_head"))
    }
    _write_text(out / "model.gguf", folder, family, config, text, without)
    encoder = {name: tensor for name, tensor in tensors.items() if name not in text}
    if "[IMG_BREAK]" in SPECIAL[family]:
        vocabulary = {
            token["content"]: token["id"]
            for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        }
        encoder["v.token_embd.img_break"] = text["model.embed_tokens.weight"][vocabulary["[IMG_BREAK]"]]
    _write_encoder(out / "mmproj-f32.gguf", family, config, processor, encoder, kind)
    return out / "model.gguf", out / "mmproj-f32.gguf"


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The halves of each head, row by row in turn."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_text(
    path: Path, folder: Path, family: str, config: dict[str, Any], tensors: dict[str, np.ndarray], without: str
) -> None:
    own = config.get("text_config", config)
    arch = ARCHITECTURES.get(family, "llama")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(own["max_position_embeddings"])
    writer.add_embedding_length(own["hidden_size"])
    writer.add_block_count(own["num_hidden_layers"])
    writer.add_feed_forward_length(own["intermediate_size"])
    writer.add_head_count(own["num_attention_heads"])
    writer.add_head_count_kv(own["num_key_value_heads"])
    writer.add_key_length(own.get("head_dim", own["hidden_size"] // own["num_attention_heads"]))
    writer.add_layer_norm_rms_eps(own["rms_norm_eps"])
    rope = own["rope_parameters"]
    if arch == "gemma3":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_sliding_window(own["sliding_window"])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    if family == "qwen3_vl":
        writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    _add_tokenizer(writer, folder, without)
    names = gguf.get_tensor_name_map(next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), LAYERS)
    for name, tensor in tensors.items():
        if arch == "llama" and re.search("[qk]_proj", name):
            heads = own["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = interleaved(tensor, heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(tensor))
    finish(writer)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, without: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # A file has at least one pair; this one is in no prompt.
    writer.add_token_list([*("<unused>" if token == without else token for token in tokens), "zz"])
    writer.add_token_types([*(3 if token in special else 1 for token in tokens), 1])
    writer.add_token_merges(["z z"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _write_encoder(
    path: Path,
    family: str,
    config: dict[str, Any],
    processor: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: Any,
) -> None:
    own = config["vision_config"]
    hidden_size = own.get("embed_dim", own["hidden_size"])
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_projector_type(PROJECTORS[family])
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.get("text_config", config)["hidden_size"])
    table = own.get("num_position_embeddings")
    side = own.get("image_size", int(table**0.5) * own["patch_size"] if table else 560)
    writer.add_vision_image_size(side[0] if isinstance(side, list) else side)
    patch = own["patch_size"]
    writer.add_vision_patch_size(patch[0] if isinstance(patch, list) else patch)
    writer.add_vision_embedding_length(hidden_size)
    # Of Qwen2-VL the converter takes another size.
    writer.add_vision_feed_forward_length(own.get("intermediate_size", own["hidden_size"]))
    writer.add_vision_block_count(own.get("depth", own.get("num_hidden_layers")) - family.startswith("llava"))
    writer.add_vision_head_count(own.get("num_heads", own.get("num_attention_heads")))
    mean, std = CLIP_STATISTICS
    writer.add_vision_image_mean(processor.get("image_mean", mean))
    writer.add_vision_image_std(processor.get("image_std", std))
    writer.add_vision_attention_layernorm_eps(
        own.get("layer_norm_eps", 1e-5 if family in ("pixtral", "mistral3") else 1e-6)
    )
    act = own.get("hidden_act", "quick_gelu")
    if family in ("gemma3", "smolvlm", "internvl", "qwen3_vl", "pixtral", "mistral3") and act != "silu":
        writer.add_vision_use_gelu(True)
    elif act == "silu":
        writer.add_vision_use_silu(True)
    _add_own(writer, family, config, processor)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, LAYERS)
    for name, tensor in tensors.items():
        for stored, values in _stored(name, tensor, family, config, names):
            is_matrix = values.ndim == 2 and ".position_embd" not in stored and ".class_embd" not in stored
            if is_matrix and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
                writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(stored, np.ascontiguousarray(values))
    if family == "qwen2_vl":
        writer.add_tensor("v.position_embd.weight", np.zeros((10, 10), np.float32))
    finish(writer)


def _add_own(writer: gguf.GGUFWriter, family: str, config: dict[str, Any], processor: dict[str, Any]) -> None:
    own = config["vision_config"]
    if family == "gemma3":
        side = own["image_size"] // own["patch_size"]
        writer.add_vision_projector_scale_factor(side // int(config["mm_tokens_per_image"] ** 0.5))
    if family == "smolvlm":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])
    if family == "internvl":
        writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
        writer.add_uint32("clip.vision.preproc_min_tiles", 1)
        writer.add_uint32("clip.vision.preproc_max_tiles", processor["max_patches"])
    if family == "mistral3":
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    if family == "qwen3_vl":
        writer.add_vision_is_deepstack_layers(
            [layer in own["deepstack_visual_indexes"] for layer in range(own["depth"])]
        )
    if family == "qwen2_5_vl":
        writer.add_vision_n_wa_pattern(own["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", own["window_size"])
    if "qwen" in family:
        writer.add_uint32("clip.vision.image_min_pixels", processor["min_pixels"])
        writer.add_uint32("clip.vision.image_max_pixels", processor["max_pixels"])
    if family == "llava_next":
        writer.add_array("clip.vision.feature_layer", [own["num_hidden_layers"] - 1])
        writer.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")
        writer.add_array(
            "clip.vision.image_grid_pinpoints", [side for size in config["image_grid_pinpoints"] for side in size]
        )


def _stored(
    name: str, tensor: np.ndarray, family: str, config: dict[str, Any], names: Any
) -> list[tuple[str, np.ndarray]]:
    if family.startswith("llava") and (
        f".layers.{config['vision_config']['num_hidden_layers'] - 1}." in name or "post_layernorm" in name
    ):
        return []  # the second to last layer is read
    if name == "v.token_embd.img_break":
        return [(name, tensor)]
    if name == "image_newline":
        return [("model.image_newline", tensor)]
    if name.startswith("visual.patch_embed.proj.weight"):
        return [("v.patch_embd.weight", tensor[:, :, 0]), ("v.patch_embd.weight.1", tensor[:, :, 1])]
    if ".qkv." in name and family != "qwen3_vl":
        parts = np.split(tensor, 3)
        return [
            (names.get_name(name.replace("qkv", part), (".weight", ".bias")), values)
            for part, values in zip("qkv", parts, strict=True)
        ]
    if "deepstack" in name:
        number, part = re.search(r"list\.(\d+)\.(?:linear_)?(.*)", name).groups()
        layer = config["vision_config"]["deepstack_visual_indexes"][int(number)]
        return [(f"v.deepstack.{layer}.{part}", tensor)]
    if family == "qwen3_vl" and ".merger." in name:
        for theirs, stored in (("linear_fc1", "mm.0"), ("linear_fc2", "mm.2"), ("norm", "v.post_ln")):
            if theirs in name:
                return [(f"{stored}.{name.rpartition('.')[2]}", tensor)]
    if family == "internvl" and name.startswith("multi_modal_projector."):
        for theirs, stored in (("layer_norm", 0), ("linear_1", 1), ("linear_2", 3)):
            name = name.replace(f"multi_modal_projector.{theirs}", f"mlp1.{stored}")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    if family == "gemma3" and "soft_emb_norm" in name:
        tensor = tensor + 1
    if PROJECTORS[family] == "pixtral" and re.search("[qk]_proj", name):
        tensor = interleaved(tensor, config["vision_config"]["num_attention_heads"])
    if family in OLD:
        swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up", "mm.1": "mm.0"}
        found = re.sub("ffn_up|ffn_down|mm.1", lambda match: swapped[match[0]], found)
    return [(found, tensor.squeeze())]
