"""Configs of vision models: defaults are transformers', and what is not served leaves the model without vision, not broken."""

import copy
from typing import Any

import pytest
import transformers

from headrace.checkpoint.families import all_families
from headrace.checkpoint.model_config import parse_hf_config, read_media
from headrace.errors import ModelError

M_ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
    "llava siglip": {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}},
    "llava pixtral": {
        "model_type": "llava",
        "vision_config": {"model_type": "pixtral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "idefics3": {"model_type": "idefics3", "vision_config": {}},
    "smolvlm": {"model_type": "smolvlm", "vision_config": {}},
    "qwen2_vl": {"model_type": "qwen2_vl", "vision_config": {}, **M_ROPE},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": {}, **M_ROPE},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": {}},
    "gemma3": {"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}},
    "mistral3": {"model_type": "mistral3", "vision_config": {"model_type": "pixtral"}},
    "llava_next": {
        "model_type": "llava_next",
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    },
    "internvl": {"model_type": "internvl", "vision_config": {}},
    "aya_vision": {
        "model_type": "aya_vision",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 364, "patch_size": 14},
    },
}
SPELLINGS = {
    "hidden_size": ("embed_dim", "hidden_size"),
    "num_layers": ("depth", "num_hidden_layers"),
    "num_heads": ("num_heads", "num_attention_heads"),
    "intermediate_size": ("intermediate_size",),
    "hidden_act": ("hidden_act",),
    "norm_eps": ("layer_norm_eps",),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "num_channels": ("in_channels", "num_channels"),
    "temporal_patch_size": ("temporal_patch_size",),
    "merge_size": ("spatial_merge_size",),
    "window_size": ("window_size",),
    "full_layers": ("fullatt_block_indexes",),
    "out_size": ("out_hidden_size",),
    "num_positions": ("num_position_embeddings",),
    "deep_layers": ("deepstack_visual_indexes",),
    "qkv_bias": ("attention_bias",),
}
VALUES = (
    None,
    True,
    0,
    -1,
    7,
    3.5,
    1e400,
    "x",
    "",
    [],
    ["a"],
    ["a", "a"],
    [1, 2],
    [[]],
    {},
    {"rope_theta": "x"},
    {"a": 1},
)


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_transformers(name: str):
    config = copy.deepcopy(CONFIGS[name])
    media, reason = read_media(config)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))

    assert media is not None
    assert not reason
    for ours, spellings in SPELLINGS.items():
        expected = next(
            (getattr(theirs.vision_config, key) for key in spellings if hasattr(theirs.vision_config, key)), None
        )
        if expected is None or (ours == "num_layers" and config["model_type"] in ("llava", "llava_next")):
            continue
        if isinstance(expected, list | tuple):
            expected = expected[0] if ours in ("image_size", "patch_size") else tuple(expected)
        assert getattr(media.vision, ours) == expected, ours
    assert media.image_token_id == theirs.image_token_id
    assert media.projector_act == getattr(theirs, "projector_hidden_act", "gelu")
    assert media.projector_bias == getattr(theirs, "multimodal_projector_bias", media.projector_bias)


def test_every_family_has_a_case():
    assert {config["model_type"] for config in CONFIGS.values()} == set(all_families().vision)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_value_is_a_model_error_or_makes_blind(name: str):
    vision = {*CONFIGS[name]["vision_config"], *(key for keys in SPELLINGS.values() for key in keys)}
    vision |= {"rope_parameters", "rope_theta", "mlp_ratio", "norm_type", "use_qk_norm", "use_mean_pooling"}
    top = {
        "image_token_id",
        "image_token_index",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "text_config",
    }
    top |= {"projector_hidden_act", "multimodal_projector_bias", "scale_factor", "spatial_merge_size", "rope_scaling"}
    top |= {"downsample_factor", "adapter_layer_norm_eps", "alignment_intermediate_size"}
    top |= {"mm_tokens_per_image", "image_grid_pinpoints", "vision_aspect_ratio", "downsample_ratio", "vision_config"}
    for inside, keys in ((True, vision), (False, top)):
        for key in sorted(keys):
            for value in VALUES:
                config = copy.deepcopy(CONFIGS[name])
                (config["vision_config"] if inside else config)[key] = value
                try:
                    media, reason = read_media(config)
                except ModelError:
                    continue
                assert (media is None) == bool(reason) or key == "vision_config"


@pytest.mark.parametrize(
    "name, inside, key, value, why",
    [
        ("llava", True, "hidden_act", "gelu_fast", "hidden_act is 'gelu_fast'"),
        ("llava", True, "model_type", "dinov2", "the vision tower 'dinov2' is not served"),
        ("llava", False, "projector_hidden_act", "swish", "projector_hidden_act is 'swish'"),
        ("llava", False, "vision_feature_layer", [-2, -5], "names several layers"),
        ("internvl", True, "use_qk_norm", True, "use_qk_norm is True"),
        ("internvl", True, "image_size", [448, 224], "only squares are served"),
        ("llava_onevision", False, "vision_aspect_ratio", "pad", "only anyres_max_N is served"),
        ("llava_onevision", False, "image_grid_pinpoints", [[400, 384]], "which tiles of 384 pixels do not fill"),
        ("qwen3_vl", True, "deepstack_visual_indexes", [4, 2], "do not ascend"),
        ("gemma3", False, "model_type", "paligemma", "images of model type 'paligemma' are not served"),
    ],
)
def test_a_model_whose_eyes_are_not_served_is_read_without_them(
    name: str, inside: bool, key: str, value: Any, why: str
):
    config = copy.deepcopy(CONFIGS[name]) | {"text_config": {"model_type": "llama", **M_ROPE}}
    (config["vision_config"] if inside else config)[key] = value

    model = parse_hf_config(config)

    assert model.media is None
    assert why in model.vision_unsupported_reason
    assert model.model_type == "llama"


def test_images_that_add_to_every_layer_of_the_text_model_are_not_served():
    config = copy.deepcopy(CONFIGS["qwen3_vl"])
    assert read_media(config | {"text_config": {"num_hidden_layers": 4}})[1] == ""

    media, reason = read_media(config | {"text_config": {"num_hidden_layers": 3}})

    assert media is None
    assert "images add to 3 layers of a text model of 3" in reason
