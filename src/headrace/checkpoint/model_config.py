"""The configuration of a model: `ModelConfig`, read from a Hugging Face `config.json`.

Owns reading every spelling of the fields that the runtime uses, with the keys of a family (`families.py`). Imports neither torch nor transformers
for a family that has defaults here: any process may use it. GGUF metadata is first turned into such a dict (`gguf_names.py`).
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.checkpoint.config_keys import (
    COMMON_DEFAULTS,
    ConfigKeys,
    MediaKeys,
    NotServedError,
    common_fields,
    transformers_knows,
)
from headrace.checkpoint.families import all_families, check_family
from headrace.checkpoint.family import Audio, Decoder, Encoder, Vision
from headrace.checkpoint.files import read_json_if_there, read_json_object
from headrace.checkpoint.layer_config import (
    EncoderConfig,
    LayerType,
    RopeConfig,
    full_and_sliding_rope,
    norm_eps,
    window_and_types,
)
from headrace.checkpoint.media_config import AudioConfig, MediaConfig
from headrace.checkpoint.sampling_defaults import SamplingDefaults, from_generation_config
from headrace.errors import ModelError

_MAX_HEAD_DIM = 4096


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts. Layer i is sparse when it is not in `mlp_only_layers` and (i + 1) % decoder_sparse_step == 0."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the constants of one model. Dimensions are counts of elements, positions of tokens.

    model_type: the Hugging Face name; a multimodal wrapper of a text model is flattened to its text model.
    rope: of full attention layers. rope_local: of sliding layers where it differs (gemma3), else None.
    sliding_window: tokens a sliding layer sees, None when no layer slides. layer_types: one entry per layer.
    logit_scale: factor on the logits. query_pre_attn_scalar: attention scale is its inverse square root; None means head_dim.
    moe: None for a dense model. dtype: the checkpoint's own precision by its torch name, None when not stated.
    eos_token_ids: the ids of config.json and of generation_config.json together, in that order, without duplicates.
    quantization: the `quantization_config` dict of the checkpoint, None if there is none.
    encoder: what only encoders have; None for a decoder. An encoder's `rms_norm_eps` is that of its LayerNorms, and `max_position_embeddings` is
    the longest text, without the rows of the table that no token uses.
    media: its vision encoder, None without one; vision_unsupported_reason: why one that it has is not supported. audio, audio_unsupported_reason: the
    same of its audio encoder.
    raw: the whole Hugging Face config dict (of the text model), from which a transformers config can be built. around: of a multimodal model,
    the dict that this is in.
    """

    model_type: str
    architectures: tuple[str, ...] = ()
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...]
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    moe: MoeConfig | None = None
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    quantization: dict[str, Any] | None = None
    encoder: EncoderConfig | None = None
    media: MediaConfig | None = None
    vision_unsupported_reason: str = ""
    audio: AudioConfig | None = None
    audio_unsupported_reason: str = ""
    raw: dict[str, Any] = {}
    around: dict[str, Any] = {}

    def as_file(self, **changes: Any) -> dict[str, Any]:
        """What is in config.json, with changes of the text model's keys."""
        if not self.around:
            return self.raw | changes
        text = {key: value for key, value in self.raw.items() if key not in ("vision_config", "audio_config")}
        tied = {"tie_word_embeddings": self.tie_word_embeddings}
        return self.around | changes | tied | {"text_config": text | changes}

    def rope_for(self, layer: int) -> RopeConfig:
        if self.rope_local is not None and self.layer_types[layer] == "sliding_attention":
            return self.rope_local
        return self.rope

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)


def load_model_config(path: Path) -> ModelConfig:
    file = path / "config.json" if path.is_dir() else path
    generation = read_json_if_there(file.with_name("generation_config.json"))
    config = read_json_object(file)
    if "quantization_config" not in config and (beside := _quantization_beside(file)) is not None:
        config["quantization_config"] = beside
    return parse_hf_config(config, generation, origin=file.name)


_QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older checkpoints say how they are quantised, and by which quant_method."""


def _quantization_beside(file: Path) -> dict[str, Any] | None:
    """What stands for `quantization_config` in the folder of a config.json that has none."""
    for name, method in _QUANTIZATION_FILES.items():
        if file.with_name(name).is_file():
            stated = read_json_object(file.with_name(name))
            settings = stated.get("quantization", stated)
            return {"quant_method": method, **settings} if isinstance(settings, dict) else None
    return None


def read_media(config: dict[str, Any], origin: str = "config.json") -> tuple[MediaConfig | None, str]:
    """The vision encoder of a whole config.json, and why it is not supported; (None, "") without one. Raises ModelError for invalid values."""
    return _read_part(
        config,
        origin,
        "vision_config",
        all_families().vision,
        "images of model type {} are not served; those of these are: {}",
    )


def read_audio(config: dict[str, Any], origin: str = "config.json") -> tuple[AudioConfig | None, str]:
    return _read_part(
        config, origin, "audio_config", all_families().audio, "audio of model type {} is not supported; supported: {}"
    )


def _read_part(
    config: dict[str, Any],
    origin: str,
    key: str,
    families: Mapping[str, Vision] | Mapping[str, Audio],
    unsupported: str,
) -> tuple[Any, str]:
    family, part = config.get("model_type"), config.get(key)
    if not isinstance(part, dict):
        return None, ""
    own = families.get(family) if isinstance(family, str) else None
    if own is None:
        return None, unsupported.format(f"{family!r:.80}", ", ".join(families))
    try:
        return own.read(MediaKeys(config, origin), MediaKeys(part, f"{origin}: {key}")), ""
    except NotServedError as reason:
        return None, str(reason)


def parse_hf_config(
    config: dict[str, Any], generation: dict[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """Turn a Hugging Face config dict, and optionally its generation config, into a ModelConfig. origin: name of the source in error messages.
    Raises ModelError that names the invalid key."""
    generation = generation or {}
    media, no_vision = read_media(config, origin)
    audio, no_audio = read_audio(config, origin)
    around = config if media is not None or audio is not None or no_vision or no_audio else {}
    config = _text_config(config, origin)
    model_type = config["model_type"]
    if model_type in all_families().encoders:
        return _encoder(config, origin)
    decoder = all_families().decoders.get(model_type)
    keys = _foreign_keys(config, origin) if decoder is None else _own_keys(config, origin, decoder)
    num_layers = keys.count("num_hidden_layers")
    num_q_heads = keys.count("num_attention_heads")
    num_kv_heads = keys.count("num_key_value_heads", default=num_q_heads)
    hidden_size = keys.count("hidden_size")
    head_dim = keys.count("head_dim", default=hidden_size // num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelError(f"{origin}: {num_q_heads} query heads cannot share {num_kv_heads} key-value heads evenly")
    if head_dim > _MAX_HEAD_DIM:
        raise ModelError(f"{origin}: head_dim is {head_dim}; heads of more than {_MAX_HEAD_DIM} are not served")
    scalar = keys.optional_number("query_pre_attn_scalar")
    if scalar is not None and scalar <= 0:
        raise ModelError(f"{origin}: query_pre_attn_scalar is {scalar:g}; expected a number above 0")
    if head_dim % 2:
        raise ModelError(f"{origin}: head_dim is {head_dim}; rotary embedding needs an even number")
    sliding_window, layer_types = window_and_types(keys, "all" if decoder is None else decoder.sliding, num_layers)
    rope, rope_local = full_and_sliding_rope(keys)
    act = "hidden_activation" if keys.get("hidden_activation") else "hidden_act"
    return ModelConfig(
        model_type=model_type,
        architectures=keys.listed("architectures", str, "names"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.count("intermediate_size", only_shown=keys.is_foreign),
        vocab_size=keys.count("vocab_size"),
        max_position_embeddings=keys.count("max_position_embeddings"),
        rms_norm_eps=1e-6 if keys.is_foreign else keys.number("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local,
        sliding_window=sliding_window,
        layer_types=layer_types,
        attn_logit_softcapping=keys.optional_number("attn_logit_softcapping"),
        final_logit_softcapping=keys.optional_number("final_logit_softcapping"),
        logit_scale=keys.number("logit_scale") if "logit_scale" in keys.defaults else 1.0,
        query_pre_attn_scalar=scalar,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=keys.flag("qkv_bias" if "qkv_bias" in config else "attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        hidden_act=str(keys.get(act)),
        moe=_moe(keys),
        dtype=_dtype(config),
        eos_token_ids=_eos(keys, generation, origin),
        bos_token_id=keys.token("bos_token_id"),
        pad_token_id=keys.token("pad_token_id"),
        sampling_defaults=from_generation_config(generation),
        quantization=keys.optional_object("quantization_config"),
        media=media,
        vision_unsupported_reason=no_vision,
        audio=audio,
        audio_unsupported_reason=no_audio,
        around=around,
        raw=config,
    )


def _own_keys(config: dict[str, Any], origin: str, own: Decoder | Encoder) -> ConfigKeys:
    common = {own.common_names.get(key, key): value for key, value in config.items()}
    return ConfigKeys(common, origin, COMMON_DEFAULTS | dict(own.defaults))


def _foreign_keys(config: dict[str, Any], origin: str) -> ConfigKeys:
    """The keys of a family that only transformers may know. Raises ModelError for one that surely cannot be served."""
    check_family(config["model_type"], origin, config)
    is_foreign = transformers_knows(config["model_type"])
    known = common_fields(config, origin) if is_foreign else {}
    return ConfigKeys(config, origin, COMMON_DEFAULTS | known, is_foreign)


def _encoder(config: dict[str, Any], origin: str) -> ModelConfig:
    own = all_families().encoders[config["model_type"]]
    if config.get("is_decoder"):
        raise ModelError(f"{origin}: is_decoder is set; only encoders of this type are supported")
    keys = _own_keys(config, origin, own)
    num_layers, num_heads = keys.count("num_hidden_layers"), keys.count("num_attention_heads")
    hidden_size = keys.count("hidden_size")
    if hidden_size % num_heads:
        raise ModelError(f"{origin}: {num_heads} heads cannot share a hidden_size of {hidden_size} evenly")
    encoder = (own.read or partial(_read_bert, own))(keys, num_layers)
    if encoder.rope is not None and hidden_size // num_heads % 2:
        raise ModelError(
            f"{origin}: heads have {hidden_size // num_heads} elements; rotary embedding needs an even number"
        )
    return ModelConfig(
        model_type=config["model_type"],
        architectures=keys.listed("architectures", str, "names"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=keys.count("intermediate_size"),
        vocab_size=keys.count("vocab_size"),
        max_position_embeddings=encoder.num_positions - encoder.first_position,
        rms_norm_eps=encoder.norm_eps,
        rope=RopeConfig() if encoder.rope is None else encoder.rope,
        rope_local=encoder.rope_local,
        layer_types=encoder.layer_types,
        attention_bias=encoder.attention_bias,
        mlp_bias=encoder.mlp_bias,
        hidden_act=str(keys.get("hidden_act")),
        dtype=_dtype(config),
        pad_token_id=keys.token("pad_token_id"),
        bos_token_id=keys.token("bos_token_id"),
        quantization=keys.optional_object("quantization_config"),
        encoder=encoder,
        raw=config,
    )


def _text_config(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """The config of the language model inside; a plain text config is returned as a copy."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        outer_keys = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
        outer = {key: config[key] for key in outer_keys if config.get(key) is not None}
        if "tie_word_embeddings" in config and "tie_word_embeddings" not in inner:
            outer["tie_word_embeddings"] = config["tie_word_embeddings"]
        flat = outer | inner
        kind = config.get("model_type")
        own = all_families().vision.get(kind) if isinstance(kind, str) else None
        if own is not None and own.tied is not None:
            flat["tie_word_embeddings"] = config.get("tie_word_embeddings", own.tied)
        elif config.get("tie_word_embeddings") is True:
            flat["tie_word_embeddings"] = True
        flat.setdefault("model_type", f"{config.get('model_type', '')}_text")
        if not isinstance(flat["model_type"], str):
            raise ModelError(f"{origin}: text_config.model_type is {flat['model_type']!r:.80}; expected a name")
        return flat
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{origin}: model_type is missing; it names the architecture")
    own = all_families().vision.get(config["model_type"])
    return config | {"model_type": config["model_type"] if own is None or not own.flat_text else own.flat_text}


def _moe(keys: ConfigKeys) -> MoeConfig | None:
    # transformers 5 writes num_local_experts where published configs have num_experts; mixtral always had the former.
    names = ("num_experts", "num_local_experts")
    if keys.is_foreign:
        num_experts = max(keys.count(name, only_shown=True) for name in names)
        per_token = keys.count("num_experts_per_tok", only_shown=True)
        size = keys.count("moe_intermediate_size", only_shown=True)
        one = MoeConfig(num_experts=num_experts, num_experts_per_tok=per_token, intermediate_size=size)
        return one if num_experts > 1 else None
    name = next((key for source in (keys.config, keys.defaults) for key in names if source.get(key)), None)
    if name is None:
        return None
    num_experts = keys.count(name)
    per_token = keys.count("num_experts_per_tok")
    if per_token > num_experts:
        raise ModelError(f"{keys.origin}: {per_token} experts per token but only {num_experts} experts")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=keys.count("moe_intermediate_size", default=keys.count("intermediate_size")),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        decoder_sparse_step=keys.count("decoder_sparse_step", default=1),
        mlp_only_layers=keys.listed("mlp_only_layers", int, "numbers of layers"),
        shared_expert_intermediate_size=keys.count_or_none("shared_expert_intermediate_size"),
    )


def _dtype(config: dict[str, Any]) -> str | None:
    stated = config.get("dtype") or config.get("torch_dtype")
    return stated.removeprefix("torch.") if isinstance(stated, str) and stated != "auto" else None


def _eos(keys: ConfigKeys, generation: dict[str, Any], origin: str) -> tuple[int, ...]:
    found: list[int] = []
    for value in (keys.get("eos_token_id"), generation.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is None or token in found:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise ModelError(f"{origin}: eos_token_id holds {token!r}; expected token ids")
            if token >= 0:
                found.append(token)
    return tuple(found)


def _read_bert(own: Encoder, keys: ConfigKeys, num_layers: int) -> EncoderConfig:
    kind = keys.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"{keys.origin}: position_embedding_type {kind!r:.80} is not supported; only absolute is")
    num_positions = keys.count("max_position_embeddings")
    first_position = (keys.token("pad_token_id") or 0) + 1 if own.after_padding else 0
    if first_position >= num_positions:
        raise ModelError(
            f"{keys.origin}: max_position_embeddings is {num_positions}, of which the first {first_position} are not used"
        )
    full: LayerType = "full_attention"
    return EncoderConfig(
        norm_eps=norm_eps(keys, own.norm_eps),
        norm_bias=True,
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=keys.count_or_none("type_vocab_size") if own.embeddings.types else 0,
        layer_types=(full,) * num_layers,
        attention_bias=True,
        mlp_bias=True,
    )
