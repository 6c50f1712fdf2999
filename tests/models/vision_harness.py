"""Random tiny models that see or hear, by transformers, and their images and sounds as its processors make them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from model_harness import randomise

from headrace.checkpoint.source import open_checkpoint
from headrace.execution.load_weights import load_model
from headrace.layers.weight import Placement
from headrace.models.media import MediaEncoder, MediaInput
from headrace.models.registry import model_class_for

IMAGE, VIDEO = 7, 9
"""The tokens of images (or sounds) and videos of all of them."""
MELS = 12
LONGEST = 120
"""Frames of the longest sound, to which transformers pads."""
VOCAB_SIZE = 131
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN2 = {name: value for name, value in _TEXT.items() if name != "head_dim"} | {"hidden_size": 64}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Family:
    """config: of the whole model. sizes: of three images, in patches: tiles, rows, columns; or frames of three sounds. features: transformers' rows
    of each. pixels: height and width of each image, where the encoder needs to know them."""

    config: Callable[[], Any]
    sizes: tuple[tuple[int, ...], ...]
    features: Callable[[Any, list[MediaInput]], list[torch.Tensor]]
    patches: bool = False
    pixels: tuple[tuple[int, int], ...] = ()

    def inputs(self, values: list[torch.Tensor], grids: list[tuple[int, int, int]]) -> dict[str, Any]:
        """What transformers' whole model takes of the images or sounds of one prompt."""
        if self.features is _sounds:
            features, mask = zip(
                *(whole_sound(one, grid[0]) for one, grid in zip(values, grids, strict=True)), strict=True
            )
            return {"input_features": torch.cat(features), "feature_attention_mask": torch.cat(mask)}
        if self.patches:
            return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}
        if self.features is _anyres:
            most = max(len(one) for one in values)
            tiles = [torch.cat([one, one.new_zeros(most - len(one), *one.shape[1:])]) for one in values]
            return {"pixel_values": torch.stack(tiles), "image_sizes": torch.tensor([grid[1:] for grid in grids])}
        if self.features is _tiles:
            most = max(len(one) for one in values)
            # Tiles of zeros are none.
            tiles = [torch.cat([one, one.new_zeros(most - len(one), *one.shape[1:])]) for one in values]
            return {"pixel_values": torch.cat(tiles)[None]}
        if self.features is _with_sizes:
            sizes = torch.tensor([one.shape[-2:] for one in values])
            height, width = sizes.amax(0).tolist()
            padded = [
                torch.nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in values
            ]
            return {"pixel_values": torch.cat(padded), "image_sizes": sizes}
        return {"pixel_values": torch.cat(values)}


def _config(kind: str, text: Any, vision: Any, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision, **changes)


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**(_TEXT | changes))


def _llava(vision: Any, **changes: Any) -> Any:
    return _config("llava", _llama(), vision, image_token_index=IMAGE, **changes)


def _rows(features: Any) -> torch.Tensor:
    """The rows of all images, of what get_image_features gives."""
    found = features.pooler_output
    return torch.cat(list(found)) if isinstance(found, list | tuple) else found.flatten(0, -2)


def _one_by_one(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    return [_rows(model.get_image_features(pixel_values=item.values)) for item in items]


def _with_sizes(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    return [
        _rows(model.get_image_features(pixel_values=item.values, image_sizes=torch.tensor([item.values.shape[-2:]])))
        for item in items
    ]


def _tiles(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    return [_rows(model.model.get_image_features(pixel_values=item.values[None])) for item in items]


def _anyres(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    return [
        _rows(model.get_image_features(pixel_values=item.values[None], image_sizes=torch.tensor([item.grid[1:]])))
        for item in items
    ]


def _qwen(kind: str, **vision: Any) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    left_out = ("tie_word_embeddings",) if kind == "qwen3_vl" else ("head_dim", "tie_word_embeddings")
    text = {name: value for name, value in _TEXT.items() if name not in left_out}
    text |= {"hidden_size": 64, "num_hidden_layers": 3, "rope_parameters": rope}
    vision |= {"depth": 3, "num_heads": 2, "patch_size": 4}
    out = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    return _config(kind, text, vision | {out: 64}, image_token_id=IMAGE, vision_start_token_id=8, video_token_id=VIDEO)


def _grids(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    return [
        _rows(model.get_image_features(pixel_values=item.values, image_grid_thw=torch.tensor([item.grid])))
        for item in items
    ]


def _deep_grids(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    """With the parts for the text model's first layers."""
    found = []
    for item in items:
        features = model.get_image_features(pixel_values=item.values, image_grid_thw=torch.tensor([item.grid]))
        deep = [torch.cat(list(part)) for part in features.deepstack_features]
        found.append(torch.cat([_rows(features), *deep], dim=1))
    return found


def whole_sound(values: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sound's input_features and feature_attention_mask. What nothing depends on is large, so that it shows."""
    features = torch.full((1, MELS, LONGEST), 1e3)
    features[0, :, : len(values)] = values.T
    return features, (torch.arange(LONGEST) < 2 * positions)[None].int()


def _sounds(model: Any, items: list[MediaInput]) -> list[torch.Tensor]:
    found = []
    for item in items:
        positions = item.grid[0]
        hidden = torch.zeros(1, 1, LONGEST // 2, LONGEST // 2)
        hidden[..., positions:] = torch.finfo(torch.float32).min
        features, _ = whole_sound(item.values, positions)
        tower = model.model.audio_tower(features, attention_mask=hidden)
        found.append(model.model.multi_modal_projector(tower.last_hidden_state)[0, : positions // 2])
    return found


FAMILIES: dict[str, Family] = {
    "llava clip": Family(
        lambda: _llava(transformers.CLIPVisionConfig(image_size=16, **_VISION)), ((1, 4, 4),) * 3, _one_by_one
    ),
    "llava clip full": Family(
        lambda: _llava(
            transformers.CLIPVisionConfig(image_size=16, **_VISION),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        ((1, 4, 4),) * 3,
        _one_by_one,
    ),
    "llava siglip": Family(
        lambda: _llava(
            transformers.SiglipVisionConfig(image_size=20, **_VISION),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        ((1, 5, 5),) * 3,
        _one_by_one,
    ),
    "llava pixtral": Family(
        lambda: _llava(
            transformers.PixtralVisionConfig(image_size=64, **_VISION),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        ((1, 3, 5), (1, 4, 4), (1, 6, 2)),
        _with_sizes,
    ),
    "idefics3": Family(
        lambda: _config(
            "idefics3",
            _llama(),
            {"image_size": 32, **_VISION},
            image_token_id=IMAGE,
            scale_factor=4,
        ),
        ((5, 8, 8), (1, 8, 8), (3, 8, 8)),
        _tiles,
    ),
    "smolvlm": Family(
        lambda: _config("smolvlm", _llama(), {"image_size": 24, **_VISION}, image_token_id=IMAGE, scale_factor=3),
        ((3, 6, 6), (1, 6, 6), (2, 6, 6)),
        _tiles,
    ),
    "idefics3 27": Family(
        lambda: _config("idefics3", _llama(), {"image_size": 108, **_VISION}, image_token_id=IMAGE, scale_factor=3),
        ((1, 27, 27), (1, 27, 27), (2, 27, 27)),
        _tiles,
    ),
    "qwen2_vl": Family(
        lambda: _qwen("qwen2_vl", embed_dim=32, mlp_ratio=2),
        ((1, 4, 6), (1, 2, 2), (1, 8, 4)),
        _grids,
        patches=True,
    ),
    "qwen2_5_vl": Family(
        lambda: _qwen(
            "qwen2_5_vl",
            hidden_size=32,
            intermediate_size=56,
            out_hidden_size=48,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
        ((1, 6, 10), (1, 2, 2), (1, 8, 4)),
        _grids,
        patches=True,
    ),
    "internvl": Family(
        lambda: _config(
            "internvl",
            _llama(),
            transformers.InternVLVisionConfig(image_size=(24, 24), **(_VISION | {"patch_size": (4, 4)})),
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        ),
        ((3, 6, 6), (1, 6, 6), (2, 6, 6)),
        _one_by_one,
    ),
    "internvl rms": Family(
        lambda: _config(
            "internvl",
            _llama(),
            transformers.InternVLVisionConfig(
                image_size=(24, 24),
                norm_type="rms_norm",
                attention_bias=True,
                use_mean_pooling=False,
                **(_VISION | {"patch_size": (4, 4)}),
            ),
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        ),
        ((3, 6, 6), (1, 6, 6), (2, 6, 6)),
        _one_by_one,
    ),
    "qwen3_vl": Family(
        lambda: _qwen(
            "qwen3_vl",
            hidden_size=32,
            intermediate_size=56,
            num_position_embeddings=25,
            deepstack_visual_indexes=[0, 2],
        ),
        ((1, 6, 10), (1, 2, 2), (1, 8, 4)),
        _deep_grids,
        patches=True,
    ),
    "gemma3": Family(
        lambda: _config(
            "gemma3",
            transformers.Gemma3TextConfig(**(_TEXT | {"sliding_window": 24, "num_hidden_layers": 7})),
            transformers.SiglipVisionConfig(image_size=24, vision_use_head=False, **_VISION),
            image_token_index=IMAGE,
            mm_tokens_per_image=9,
        ),
        ((1, 6, 6),) * 3,
        _one_by_one,
    ),
    "llava_next": Family(
        lambda: _config(
            "llava_next",
            _llama(),
            transformers.CLIPVisionConfig(image_size=16, **_VISION),
            image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 48], [32, 32], [48, 16]],
        ),
        ((2, 4, 4), (2, 4, 4), (4, 4, 4)),
        _anyres,
        pixels=((15, 6), (5, 15), (11, 55)),
    ),
    "llava_onevision": Family(
        lambda: _config(
            "llava_onevision",
            transformers.Qwen2Config(**{name: value for name, value in _TEXT.items() if name != "head_dim"}),
            transformers.SiglipVisionConfig(image_size=16, vision_use_head=False, **_VISION),
            image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 16], [16, 48], [32, 32], [48, 16], [64, 32]],
            vision_aspect_ratio="anyres_max_2",
        ),
        ((5, 4, 4), (2, 4, 4), (4, 4, 4)),
        _anyres,
        pixels=((30, 21), (5, 15), (11, 55)),
    ),
    "mistral3": Family(
        lambda: _config(
            "mistral3",
            transformers.MistralConfig(**(_TEXT | {"sliding_window": None})),
            transformers.PixtralVisionConfig(image_size=64, **_VISION),
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        ((1, 4, 6), (1, 4, 2), (1, 6, 4)),
        _with_sizes,
    ),
    "aya_vision": Family(
        lambda: _config(
            "aya_vision",
            transformers.Cohere2Config(
                **(_TEXT | {"hidden_size": 64, "num_hidden_layers": 3, "sliding_window": 24}),
                sliding_window_pattern=2,
            ),
            transformers.SiglipVisionConfig(image_size=24, vision_use_head=False, **_VISION),
            image_token_index=IMAGE,
            tie_word_embeddings=False,
        ),
        ((3, 6, 6), (1, 6, 6), (2, 6, 6)),
        _one_by_one,
    ),
    "qwen2_audio": Family(
        lambda: transformers.Qwen2AudioConfig(
            text_config=transformers.Qwen2Config(**_QWEN2),
            audio_config=transformers.Qwen2AudioEncoderConfig(
                d_model=32,
                encoder_layers=3,
                encoder_attention_heads=2,
                encoder_ffn_dim=56,
                num_mel_bins=MELS,
                max_source_positions=LONGEST // 2,
            ),
            audio_token_index=IMAGE,
        ),
        ((38,), (LONGEST,), (29,)),
        _sounds,
    ),
}


def save_seeing(name: str, folder: Path) -> Any:
    """Save a random model of a family in `folder`; returns the transformers model."""
    model = transformers.AutoModelForMultimodalLM.from_config(
        FAMILIES[name].config(), attn_implementation="eager", dtype=torch.float32
    )
    randomise(model)
    model.eval().save_pretrained(folder)
    return model


def sound(num_frames: int, seed: int = 5) -> MediaInput:
    """A random sound of so many frames."""
    positions = (num_frames - 1) // 2 + 1
    shape = min(2 * positions + 1, LONGEST), MELS
    return MediaInput(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), (positions, 1, 1))


def images(name: str) -> list[MediaInput]:
    """Three random images of a family, or sounds."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(5)
    if family.features is _sounds:
        return [sound(num_frames, seed) for seed, (num_frames,) in enumerate(family.sizes)]
    patch = 4
    made = []
    for tiles, rows, columns in family.sizes:
        if family.patches:
            values = torch.randn(tiles * rows * columns, 3 * 2 * patch * patch, generator=generator)
            made.append(MediaInput(values, (tiles, rows, columns)))
        else:
            values = torch.randn(tiles, 3, rows * patch, columns * patch, generator=generator)
            made.append(MediaInput(values, (0, *family.pixels[len(made)]) if family.pixels else (0, 0, 0)))
    return made


def open_encoder(folder: Path, dtype: torch.dtype = torch.float32, quantization: Any = "none") -> MediaEncoder:
    """The encoder of the checkpoint in `folder`."""
    checkpoint = open_checkpoint(folder)
    placement = Placement(torch.device("cpu"), dtype, 256, quantization)
    model = load_model(checkpoint, model_class_for(checkpoint.config), placement)
    encoder = model.media_encoder
    assert encoder is not None
    return encoder
