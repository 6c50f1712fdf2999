"""What a model is, read from its metadata: `ModelConfig` from a Hugging Face `config.json`.

Owns the reading of every spelling of the fields that the runtime uses, with the defaults that transformers gives to the
keys a `config.json` may leave out. Does not read weights, and imports neither torch nor transformers: any process may
use it. GGUF metadata is first turned into a Hugging Face style dict (`gguf_names.py`) and then read here.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.checkpoint import foreign_config
from headrace.checkpoint.json_fault import json_fault
from headrace.checkpoint.regular_file import open_regular
from headrace.checkpoint.sampling_defaults import SamplingDefaults, from_generation_config
from headrace.errors import ModelError

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention", "chunked_attention")

# What each architecture means when its config.json says nothing. Keys that are the same for all are in `_COMMON`.
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "decoder_sparse_step": 1,
}
_GEMMA: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN | {"num_key_value_heads": 32, "attention_bias": True},
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": _QWEN_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "attention_bias": True,
    },
    "qwen3_moe": _QWEN_MOE
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gemma": _GEMMA
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    "phi3": {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
}


_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


T = TypeVar("T")
_MAX_HEAD_DIM = 4096
_LISTED_FACTORS = ("long_factor", "short_factor")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding of one kind of layer.

    scaling: the parameters of `rope_type` under their Hugging Face names (`factor`, `low_freq_factor`,
    `original_max_position_embeddings`, `beta_fast` ...), without the type and the theta. Empty for `default`.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    scaling: dict[str, Any] = {}
    partial_rotary_factor: float = 1.0


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
        """Whether decoder layer `layer` (from 0) has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the constants of one model. Dimensions are counts of elements, positions of tokens.

    model_type: the Hugging Face name; a multimodal wrapper of a text model is flattened to its text model.
    rope: of full attention layers. rope_local: of sliding layers where it differs (gemma3), else None.
    sliding_window: tokens a sliding layer sees, None when no layer slides. layer_types: one entry a layer.
    query_pre_attn_scalar: attention scale is its inverse square root; None means head_dim.
    moe: None for a dense model. dtype: the checkpoint's own precision by its torch name, None when not stated.
    eos_token_ids: the ids of config.json and of generation_config.json together, in that order, without repeats.
    quantization: the `quantization_config` dict of the checkpoint, None when there is none.
    raw: the whole Hugging Face config dict (of the text model), from which a transformers config can be built.
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
    raw: dict[str, Any] = {}

    def rope_for(self, layer: int) -> RopeConfig:
        """The rotary parameters of decoder layer `layer` (from 0)."""
        if self.rope_local is not None and self.layer_types[layer] == "sliding_attention":
            return self.rope_local
        return self.rope

    @property
    def attention_scale(self) -> float:
        """Factor on q.k before the softmax."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)


def load_model_config(path: Path) -> ModelConfig:
    """Read a `config.json`, or the one in the folder `path`, with the `generation_config.json` beside it.

    Raises ModelError for a missing or malformed file, and for values that make no model.
    """
    file = path / "config.json" if path.is_dir() else path
    generation_file = file.with_name("generation_config.json")
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    return parse_hf_config(read_json_object(file), generation, origin=file.name)


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ModelError naming the file when it is absent, broken or not an object."""
    try:
        with open_regular(file) as opened:
            value = json.loads(opened.read(), object_hook=_special_float)
    except FileNotFoundError:
        raise ModelError(f"{file.name} is missing from {file.parent.name or file.parent}") from None
    except OSError as err:
        raise ModelError(f"{file.name} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise ModelError(f"{file.name} cannot be read as JSON: {json_fault(err)}") from err
    if not isinstance(value, dict):
        raise ModelError(f"{file.name} holds a {type(value).__name__}, not a JSON object")
    return value


def _special_float(fields: dict[str, Any]) -> Any:
    """transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return _SPECIAL_FLOATS.get(fields["__float__"], fields) if fields.keys() == {"__float__"} else fields


def parse_hf_config(
    config: dict[str, Any], generation: dict[str, Any] | None = None, origin: str = "config.json"
) -> ModelConfig:
    """Turn a Hugging Face config dict, and optionally its generation config, into a ModelConfig.

    origin: what error messages call the source. Raises ModelError naming the key at fault.
    """
    generation = generation or {}
    config = _text_config(config, origin)
    keys = _Keys(config, origin)
    model_type = config["model_type"]
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
    sliding_window, layer_types = _layers(keys, model_type, num_layers)
    rope, rope_local = _rope(keys, model_type)
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
        raw=config,
    )


class _Keys:
    """Typed reads of one config dict, falling back to the architecture's defaults."""

    def __init__(self, config: dict[str, Any], origin: str) -> None:
        self.config = config
        self.origin = origin
        model_type = config["model_type"]
        self.is_foreign = model_type not in _DEFAULTS and foreign_config.is_known(model_type)
        known = foreign_config.common_fields(config, origin) if self.is_foreign else _DEFAULTS.get(model_type, {})
        self.defaults = _COMMON | known

    def get(self, key: str) -> Any:
        """The value of `key`, or the architecture's default, or None."""
        value = self.config.get(key)
        return self.defaults.get(key) if value is None and key not in self.config else value

    def count(self, key: str, default: int | None = None, only_shown: bool = False) -> int:
        """A whole number >= 1; a key that is absent or null takes the architecture's default, then `default`.

        only_shown: the code that runs the model reads the config by itself: what is no such number counts as 1.
        """
        value = self.get(key)
        if only_shown and not (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31):
            return 1
        if value is None:
            value = self.defaults.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected a whole number above 0")
        return value

    def count_or_none(self, key: str) -> int:
        """A whole number >= 0; absent or null is 0."""
        value = self.get(key)
        return 0 if value is None or (value == 0 and type(value) is int) else self.count(key)

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.optional_number(key)
        if value is None:
            raise ModelError(f"{self.origin}: {key} is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None when absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not _is_finite(value):
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected a finite number")
        return float(value)

    def listed(self, key: str, kind: type[T], words: str) -> tuple[T, ...]:
        """The values of a list, all of type `kind`; absent or null is none. words: what they are, for the message."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ModelError(f"{self.origin}: {key} is {value!r:.80}; expected a list of {words}")
        return tuple(value)

    def optional_object(self, key: str) -> dict[str, Any] | None:
        """An object, or None when absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"{self.origin}: {key} is {value!r:.80}; expected an object")
        return value

    def flag(self, key: str) -> bool:
        """A boolean; absent or null is False."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.origin}: {key} is {value!r}; expected true or false")
        return bool(value)

    def token(self, key: str) -> int | None:
        """A token id, or None. A list (as some configs write bos) gives its first; -1 means none."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return None
        return value


def _text_config(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """The config of the language model inside; a plain text config is returned as a copy."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        outer_keys = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
        outer = {key: config[key] for key in outer_keys if config.get(key) is not None}
        if "tie_word_embeddings" in config and "tie_word_embeddings" not in inner:
            outer["tie_word_embeddings"] = config["tie_word_embeddings"]
        flat = outer | inner
        flat.setdefault("model_type", f"{config.get('model_type', '')}_text")
        return flat
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{origin}: model_type is missing; it names the architecture")
    return dict(config)


def _layers(keys: _Keys, model_type: str, num_layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """The sliding window in tokens (None when no layer slides) and the type of each layer."""
    window = keys.get("sliding_window")
    if "use_sliding_window" in keys.config or model_type.startswith("qwen"):
        window = window if keys.get("use_sliding_window") else None
    if not window or isinstance(window, bool) or not isinstance(window, int):
        window = None
    kinds: tuple[LayerType, LayerType] = ("full_attention", "sliding_attention")
    stated = keys.get("layer_types")
    if stated is not None:
        if (
            not isinstance(stated, list)
            or not all(isinstance(kind, str) for kind in stated)
            or len(stated) < num_layers
        ):
            raise ModelError(f"{keys.origin}: layer_types must name a kind for each of the {num_layers} layers")
        others = sorted(set(stated[:num_layers]) - set(LAYER_TYPES))
        if others:
            raise ModelError(
                f"{keys.origin}: model type {model_type} has layers of kind {', '.join(others)} (layer_types), which are not served; "
                "full_attention and sliding_attention are"
            )
        types: tuple[LayerType, ...] = tuple(stated[:num_layers])
    elif window is None:
        types = tuple(kinds[False] for _ in range(num_layers))
    else:
        types = tuple(kinds[_slides(keys, model_type, layer)] for layer in range(num_layers))
    if "full_attention" in types and "sliding_attention" not in types and "chunked_attention" not in types:
        window = None
    elif "sliding_attention" in types and window is None:
        raise ModelError(f"{keys.origin}: layer_types has sliding layers but sliding_window is not set")
    return window, types


def _slides(keys: _Keys, model_type: str, layer: int) -> bool:
    """Whether a layer slides in the architectures that state it by a rule and not by a list."""
    if model_type == "gemma2":
        return layer % 2 == 0
    if model_type == "gemma3_text":
        name = "_sliding_window_pattern" if keys.get("_sliding_window_pattern") else "sliding_window_pattern"
        return bool((layer + 1) % keys.count(name))
    if model_type.startswith("qwen"):
        return layer >= (28 if keys.get("max_window_layers") is None else keys.count_or_none("max_window_layers"))
    return True


def _rope(keys: _Keys, model_type: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary parameters of full layers, and of sliding layers where the architecture has its own."""
    theta = keys.number("rope_theta")
    local = keys.optional_number("rope_local_base_freq")
    parameters = keys.optional_object("rope_parameters") or {}
    per_layer = {kind: parameters[kind] for kind in LAYER_TYPES if isinstance(parameters.get(kind), dict)}
    if per_layer:
        full = _one_rope(keys, per_layer.get("full_attention", {}), theta)
        sliding = per_layer.get("sliding_attention")
        return full, None if sliding is None else _one_rope(keys, sliding, theta if local is None else local)
    scaling = keys.optional_object("rope_scaling") or {}
    full = _one_rope(keys, scaling | parameters, theta)
    # gemma3's scaling is for the full layers only: the local ones keep plain positions.
    return full, None if local is None else RopeConfig(theta=local)


def _one_rope(keys: _Keys, parameters: dict[str, Any], theta: float) -> RopeConfig:
    """Normalise one rope dict; both `rope_type` and the older `type` name the kind."""
    parameters = {key: value for key, value in parameters.items() if value is not None}
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if kind == "su":
        kind = "longrope"
    if keys.is_foreign and kind not in ROPE_TYPES:
        kind = "default"  # the family's own code rotates
    if kind not in ROPE_TYPES:
        raise ModelError(f"{keys.origin}: rope type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    if keys.is_foreign:
        parameters = {key: value for key, value in parameters.items() if _is_numeric(value)}
    for name, value in parameters.items():
        if not _is_numeric(value) or (isinstance(value, list) and name not in _LISTED_FACTORS):
            raise ModelError(f"{keys.origin}: {name} of the rope parameters is {value!r:.80}; expected a finite number")
    theta = float(parameters.pop("rope_theta", theta))
    if theta <= 0:
        raise ModelError(f"{keys.origin}: rope_theta is {theta:g}; expected a number above 0")
    partial = float(parameters.pop("partial_rotary_factor", keys.optional_number("partial_rotary_factor") or 1.0))
    factor = parameters.get("factor")
    if kind in ("linear", "dynamic", "yarn", "llama3") and not (
        isinstance(factor, int | float) and math.isfinite(factor) and factor > 0
    ):
        raise ModelError(f"{keys.origin}: rope type {kind} needs a factor above 0, got {factor!r}")
    if kind == "llama3":
        missing = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"} - parameters.keys()
        if missing:
            raise ModelError(f"{keys.origin}: rope type llama3 lacks {', '.join(sorted(missing))}")
    if kind in ("yarn", "longrope"):
        original = keys.get("original_max_position_embeddings") or keys.count("max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", original)
    return RopeConfig(
        theta=theta,
        rope_type=kind,
        scaling={} if kind == "default" else parameters,
        partial_rotary_factor=partial,
    )


def _is_numeric(value: object) -> bool:
    """A flag, a finite number, or a list of finite numbers."""
    return all(map(_is_finite, value)) if isinstance(value, list) else isinstance(value, bool) or _is_finite(value)


def _is_finite(value: object) -> bool:
    """A number that a float can hold; whole numbers of a JSON file may be larger."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max


def _moe(keys: _Keys) -> MoeConfig | None:
    # transformers 5 writes num_local_experts where published configs have num_experts; mixtral always had the former.
    names = ("num_experts", "num_local_experts")
    if keys.is_foreign:
        num_experts = max(keys.count(name, only_shown=True) for name in names)
        per_token = keys.count("num_experts_per_tok", only_shown=True)
        size = keys.count("moe_intermediate_size", only_shown=True)
        one = MoeConfig(num_experts=num_experts, num_experts_per_tok=per_token, intermediate_size=size)
        return one if num_experts > 1 else None
    name = next((key for key in names if keys.config.get(key)), None)
    if name is None:
        name = next((key for key in names if keys.defaults.get(key)), None)
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


def _eos(keys: _Keys, generation: dict[str, Any], origin: str) -> tuple[int, ...]:
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
