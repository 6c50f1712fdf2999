"""LLaVA 1.5, Pixtral and others with a CLIP, SigLIP or Pixtral tower; Mistral 3; LLaVA-NeXT (LLaVA 1.6) and LLaVA-OneVision (images)."""

from typing import Any

import msgspec

from headrace.checkpoint.config_keys import MediaKeys, NotServedError
from headrace.checkpoint.family import Family, Vision
from headrace.checkpoint.media_config import MediaConfig, VisionConfig, clip, image_token, pixtral, siglip
from headrace.checkpoint.media_tokens import ItemFacts, KindTokens, TokenLayout, Tokens, check_side
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.checkpoint.projector import CLIP_LAYER, Projector, VisionKeys, clip_names
from headrace.errors import ModelError
from headrace.multimodal.resolutions import best_resolution, shrunk, without_border


def _llava_tower(keys: MediaKeys, vision: MediaKeys) -> tuple[VisionConfig, bool]:
    """The tower as far as it is computed, and whether its first token is dropped."""
    kind = vision.name("model_type", "clip_vision_model")
    towers = {"clip_vision_model": clip, "siglip_vision_model": siglip, "pixtral": pixtral}
    if kind not in towers:
        raise NotServedError(f"the vision tower {kind!r:.80} is not served; those of these are: {', '.join(towers)}")
    tower = towers[kind](vision)
    layer = keys.config.get(
        "vision_feature_layer", -2 if keys.config.get("model_type") in ("llava", "llava_next") else -1
    )
    if not isinstance(layer, int):
        raise NotServedError("vision_feature_layer names several layers; only one is served")
    # hidden_states[0] is what the first layer takes, and the last one is what the last layer gives.
    num_layers = layer if layer >= 0 else tower.num_layers + 1 + layer
    if not 0 <= num_layers <= tower.num_layers:
        raise ModelError(f"{keys.origin}: vision_feature_layer is {layer}, but the tower has {tower.num_layers} layers")
    strategy = keys.name("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelError(f"{keys.origin}: vision_feature_select_strategy is {strategy!r:.80}; expected default or full")
    drops = strategy == "default"
    if kind == "pixtral":
        drops = False
        if strategy == "default" and keys.config.get("model_type") == "llava":
            raise NotServedError("the strategy 'default' drops a patch of a Pixtral tower; only 'full' is served")
    return msgspec.structs.replace(tower, num_layers=num_layers), drops


def _projector(keys: MediaKeys, bias: bool = True) -> dict[str, Any]:
    """Fields of `MediaConfig`."""
    return {
        "projector_act": keys.act("projector_hidden_act", "gelu"),
        "projector_bias": keys.says("multimodal_projector_bias", bias),
    }


def _llava(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    tower, drops = _llava_tower(keys, vision)
    return MediaConfig(
        family="llava",
        image_token_id=image_token(keys, 32000),
        vision=tower,
        drops_first=drops,
        **_projector(keys),
    )


def _llava_next(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "clip_vision_model", "siglip_vision_model", default="clip_vision_model")
    has_first = vision.name("model_type", "clip_vision_model") == "clip_vision_model"
    keys.must_be("vision_feature_select_strategy", "default" if has_first else "full", default="default")
    tower, drops = _llava_tower(keys, vision)
    sizes = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    return MediaConfig(
        family="llava_next",
        image_token_id=image_token(keys, 32000),
        vision=tower,
        drops_first=drops,
        **_projector(keys),
        pinpoints=_pinpoints(keys, tower.image_size, sizes),
    )


def _llava_onevision(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "siglip_vision_model", default="siglip_vision_model")
    keys.must_be("vision_feature_select_strategy", "full", default="full")
    tower, _ = _llava_tower(keys, vision)
    aspect = keys.name("vision_aspect_ratio", "anyres_max_9")
    digits = aspect.removeprefix("anyres_max_")
    if digits == aspect or not digits.isdecimal() or int(digits) < 1:
        raise NotServedError(f"vision_aspect_ratio is {aspect!r:.80} in {keys.origin}; only anyres_max_N is served")
    sizes = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
    return MediaConfig(
        family="llava_onevision",
        image_token_id=image_token(keys, 151646),
        vision=tower,
        **_projector(keys),
        pinpoints=_pinpoints(keys, tower.image_size, sizes),
        max_tiles=int(digits),
    )


def _pinpoints(keys: MediaKeys, side: int, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    found = keys.config.get("image_grid_pinpoints")
    if found is None:
        found = list(map(list, default))
    if not isinstance(found, list) or not found:
        raise ModelError(f"{keys.origin}: image_grid_pinpoints is {found!r:.80}; expected a list of sizes")
    for size in found:
        if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
            raise ModelError(f"{keys.origin}: image_grid_pinpoints holds {size!r:.80}; expected a height and a width")
        if any(each % side for each in size):
            raise NotServedError(f"image_grid_pinpoints holds {size}, which tiles of {side} pixels do not fill")
    return tuple((height, width) for height, width in found)


def _mistral3(keys: MediaKeys, vision: MediaKeys) -> MediaConfig:
    vision.must_be("model_type", "pixtral", default="pixtral")
    tower, _ = _llava_tower(keys, vision)
    return MediaConfig(
        family="mistral3",
        image_token_id=image_token(keys, 10),
        vision=msgspec.structs.replace(tower, merge_size=keys.count("spatial_merge_size", default=2)),
        **_projector(keys, bias=False),
    )


def _fixed_tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    if media.vision.tower == "pixtral":
        return _pixtral_tokens(media, settings, tokens, config)
    vision = media.vision
    check_side(settings, vision.image_size)
    num_tokens = (vision.image_size // vision.patch_size) ** 2
    num_tokens += vision.tower == "clip"
    num_tokens -= media.drops_first
    layout = tokens.layout([tokens.row] * num_tokens)
    return KindTokens(tokens.row, lambda facts: layout)


def _pixtral_tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    """A token after each row of patches, and another one after the last."""
    side = settings.patch_size * settings.merge_size
    after_row, after_image = tokens.id("[IMG_BREAK]"), tokens.id("[IMG_END]")

    def layout(facts: ItemFacts) -> TokenLayout:
        rows, columns = facts.shape[2] // side, facts.shape[3] // side
        ids = ([tokens.row] * columns + [after_row]) * rows
        ids[-1] = after_image
        return tokens.layout(ids)

    return KindTokens(tokens.row, layout)


def _anyres_tokens(media: MediaConfig, settings: ImageSettings, tokens: Tokens, config: dict[str, Any]) -> KindTokens:
    """The whole image, and a larger one without the black around it, with a token at the end of each row; or the former alone, with one token."""
    vision = media.vision
    if settings.recipe != "anyres" or settings.size.height != vision.image_size:
        raise ModelError(f"the image processor does not make tiles of {vision.image_size} x {vision.image_size} pixels")
    side = vision.image_size // vision.patch_size
    if settings.pinpoints != media.pinpoints:
        raise ModelError("image_grid_pinpoints of the image processor are not those of the model")

    def layout(facts: ItemFacts) -> TokenLayout:
        if facts.shape[0] == 1:
            return tokens.layout([tokens.row] * (side * side + 1))
        _, height, width = facts.grid
        tall, wide = best_resolution(height, width, settings.pinpoints)
        rows, columns = (each // vision.image_size * side for each in (tall, wide))
        rows, columns = shrunk(*without_border(height, width, rows, columns), media.max_tiles * side**2)
        return tokens.layout([tokens.row] * (side * side + rows * columns + rows))

    return KindTokens(tokens.row, layout)


def _pixtral_settings(media: MediaConfig, settings: ImageSettings) -> ImageSettings:
    """Patches that are merged are resized to as one: transformers' processor passes it so."""
    if media.vision.tower != "pixtral":
        return settings
    if settings.recipe != "pixtral":
        raise ModelError("a Pixtral tower needs a PixtralImageProcessor")
    vision = media.vision
    merge = vision.merge_size if media.family == "mistral3" else 1
    return msgspec.structs.replace(settings, patch_size=vision.patch_size, merge_size=merge)


def _is_next(keys: VisionKeys) -> bool:
    return bool(keys.file.get("clip.vision.mm_patch_merge_type") == "spatial_unpad")


def _mmproj_llava(keys: VisionKeys) -> dict[str, Any]:
    """Converters leave out layers after the one that is read, and with them the last norm."""
    tower, has_first = keys.tower(), keys.has("v.class_embd")
    layers = keys.file.get("clip.vision.feature_layer")
    if layers is None:
        layers = [tower["num_hidden_layers"] - (has_first and keys.has("v.post_ln.weight"))]
    gelu = "gelu" if has_first else "gelu_pytorch_tanh"
    own = {
        "model_type": "clip_vision_model" if has_first else "siglip_vision_model",
        "hidden_act": gelu if keys.activation == "gelu" else keys.activation,
    }
    config: dict[str, Any] = {
        "model_type": "llava_next" if _is_next(keys) else "llava",
        "architectures": [f"Llava{'Next' if _is_next(keys) else ''}ForConditionalGeneration"],
        "image_token_index": keys.row_token("<image>"),
        "vision_feature_layer": layers[0] if isinstance(layers, list) and len(layers) == 1 else layers,
        "vision_feature_select_strategy": "default" if has_first else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": keys.has("mm.0.bias"),
        "vision_config": {**own, **tower},
    }
    if _is_next(keys) and (pinpoints := _mmproj_pinpoints(keys)):
        config["image_grid_pinpoints"] = pinpoints
    return config


def _mmproj_pinpoints(keys: VisionKeys) -> list[list[int]]:
    if "clip.vision.image_grid_pinpoints" not in keys.file:
        return []
    sides = keys.file.listed("clip.vision.image_grid_pinpoints", int)
    return [sides[at : at + 2] for at in range(0, len(sides), 2)]


def _mmproj_llava_processor(keys: VisionKeys) -> dict[str, Any]:
    """Of LLaVA 1.5 as it was trained, and as llama.cpp has it: images become squares by a border; of LLaVA-NeXT as of transformers."""
    side = keys.count("image_size")
    crop = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, **keys.statistics()}
    if not _is_next(keys):
        return {"image_processor_type": "LlavaImageProcessor", "do_pad": True, **crop}
    pinpoints = _mmproj_pinpoints(keys)
    named = {"image_grid_pinpoints": pinpoints} if pinpoints else {}
    return {"image_processor_type": "LlavaNextImageProcessor", **crop, **named}


def _mmproj_pixtral(keys: VisionKeys) -> dict[str, Any]:
    tower = keys.tower()
    merges = "clip.vision.spatial_merge_size" in keys.file
    own: dict[str, Any] = {"model_type": "pixtral", "hidden_act": keys.activation}
    own["rope_theta"] = keys.file.decimal("clip.rope.freq_base", 10000.0)
    around: dict[str, Any] = {
        "model_type": "mistral3" if merges else "llava",
        "architectures": [f"{'Mistral3' if merges else 'Llava'}ForConditionalGeneration"],
        "image_token_index": keys.own_token("[IMG]"),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": keys.has("mm.1.bias"),
        "vision_config": {**own, **tower},
    }
    return around | ({"spatial_merge_size": keys.count("spatial_merge_size")} if merges else {})


def _mmproj_pixtral_processor(keys: VisionKeys) -> dict[str, Any]:
    side = keys.count("patch_size")
    size = {"size": {"longest_edge": keys.count("image_size")}, "patch_size": {"height": side, "width": side}}
    return {"image_processor_type": "PixtralImageProcessor", **size, **keys.statistics()}


FAMILY = Family(
    vision={
        "llava": Vision(read=_llava, tokens=_fixed_tokens, settings=_pixtral_settings, image_processor="CLIP"),
        "mistral3": Vision(
            read=_mistral3, tokens=_pixtral_tokens, settings=_pixtral_settings, image_processor="Pixtral", tied=True
        ),
        "llava_next": Vision(read=_llava_next, tokens=_anyres_tokens, image_processor="LlavaNext"),
        # It was trained with tiles of an image that is the only one of its prompt, and with several as squares.
        "llava_onevision": Vision(
            read=_llava_onevision, tokens=_anyres_tokens, image_processor="LlavaOnevision", several_are_squares=True
        ),
    },
    projectors={
        "mlp": Projector(
            architectures=(),
            output=("mm.2.weight", 0),
            config=_mmproj_llava,
            processor=_mmproj_llava_processor,
            layers="vision_tower.encoder.layers.{}.",
            layer=CLIP_LAYER,
            names={
                **clip_names("vision_tower."),
                "mm.0": "multi_modal_projector.linear_1",
                "mm.2": "multi_modal_projector.linear_2",
                "v.image_newline": "image_newline",
                "model.image_newline": "image_newline",
            },
        ),
        "pixtral": Projector(
            architectures=(),
            output=("mm.2.weight", 0),
            config=_mmproj_pixtral,
            processor=_mmproj_pixtral_processor,
            layers="vision_tower.transformer.layers.{}.",
            layer={
                "ln1": "attention_norm",
                "ln2": "ffn_norm",
                "attn_q": "attention.q_proj",
                "attn_k": "attention.k_proj",
                "attn_v": "attention.v_proj",
                "attn_out": "attention.o_proj",
                "ffn_gate": "feed_forward.gate_proj",
                "ffn_up": "feed_forward.up_proj",
                "ffn_down": "feed_forward.down_proj",
            },
            names={
                "v.patch_embd": "vision_tower.patch_conv",
                "v.pre_ln": "vision_tower.ln_pre",
                "mm.1": "multi_modal_projector.linear_1",
                "mm.2": "multi_modal_projector.linear_2",
                "mm.input_norm": "multi_modal_projector.norm",
                "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            },
            unused=frozenset({"v.token_embd.img_break"}),  # a row of the text model's embedding
            interleaved=True,
        ),
    },
)
