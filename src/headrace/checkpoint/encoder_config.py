"""What encoders of the BERT family say of themselves in `config.json`: `EncoderConfig`, and every spelling of its keys.

The defaults are those of transformers. Does not read the sizes that encoders share with decoders (`model_config.py`), nor what is made of hidden
states (`pooling.py`). Imports neither torch nor transformers.
"""

from typing import Any, Literal, cast

import msgspec

from headrace.checkpoint.config_keys import ConfigKeys
from headrace.checkpoint.layer_types import LayerType
from headrace.checkpoint.rope_config import RopeConfig, one_rope
from headrace.errors import ModelError

_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "attention_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
}
_ROBERTA = _BERT | {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA | {"vocab_size": 30522},
    "xlm-roberta": _ROBERTA | {"vocab_size": 30522},
    "distilbert": _BERT | {"num_hidden_layers": 6, "type_vocab_size": 0},
    "modernbert": {
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "pad_token_id": 50283,
        "bos_token_id": 50281,
    },
}
"""By model type; `type_vocab_size` 0 = the family has no token types."""

_COMMON_NAMES: dict[str, dict[str, str]] = {
    "distilbert": {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    },
    "modernbert": {"norm_eps": "layer_norm_eps", "hidden_activation": "hidden_act"},
}
"""What families call the keys that others call by the names on the right."""

_PADDED_POSITIONS = frozenset({"roberta", "camembert", "xlm-roberta"})
"""Families whose first token has the position after that of padding, `pad_token_id` + 1 (fairseq)."""


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The constants that decoders do not have.

    norm_eps, norm_bias: of LayerNorms. num_positions: rows of the table of positions, or positions that rotary embedding is made for.
    first_position: the row of a text's first token. num_token_types: rows of the table of token types, 0 = there is none.
    rope: of full layers, None = positions are a table. rope_local: of sliding layers. layer_types: one entry per layer.
    window: in a sliding layer token i sees token j where |i - j| <= window; 0 = no layer slides. attention_bias, mlp_bias: biases of linear layers.
    classifier_pooling: what the classification head reads. classifier_bias, classifier_act: of its hidden layer, where the family lets them vary.
    """

    norm_eps: float
    norm_bias: bool
    num_positions: int
    first_position: int = 0
    num_token_types: int = 0
    rope: RopeConfig | None = None
    rope_local: RopeConfig | None = None
    layer_types: tuple[LayerType, ...]
    window: int = 0
    attention_bias: bool
    mlp_bias: bool
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = True
    classifier_act: str = "gelu"


def encoder_keys(config: dict[str, Any], origin: str) -> ConfigKeys:
    """The keys of an encoder's config under their common names. config: with a model type of `families.ENCODERS`. Raises ModelError for a decoder."""
    model_type = config["model_type"]
    if config.get("is_decoder"):
        raise ModelError(f"{origin}: is_decoder is set; only encoders of this type are supported")
    names = _COMMON_NAMES.get(model_type, {})
    return ConfigKeys({names.get(key, key): value for key, value in config.items()}, origin, _DEFAULTS[model_type])


def read_encoder(keys: ConfigKeys, num_layers: int) -> EncoderConfig:
    """Raises ModelError that names the invalid key."""
    model_type = keys.config["model_type"]
    if model_type == "modernbert":
        return _modernbert(keys, num_layers)
    kind = keys.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"{keys.origin}: position_embedding_type {kind!r:.80} is not supported; only absolute is")
    num_positions = keys.count("max_position_embeddings")
    first_position = 0
    if model_type in _PADDED_POSITIONS:
        first_position = (keys.token("pad_token_id") or 0) + 1
    if first_position >= num_positions:
        raise ModelError(
            f"{keys.origin}: max_position_embeddings is {num_positions}, of which the first {first_position} are not used"
        )
    full: LayerType = "full_attention"
    return EncoderConfig(
        norm_eps=_norm_eps(keys, model_type),
        norm_bias=True,
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=0 if model_type == "distilbert" else keys.count_or_none("type_vocab_size"),
        layer_types=(full,) * num_layers,
        attention_bias=True,
        mlp_bias=True,
    )


def _norm_eps(keys: ConfigKeys, model_type: str) -> float:
    """Of the LayerNorms. DistilBERT's code has it as a constant, whatever the config says."""
    eps = 1e-12 if model_type == "distilbert" else keys.number("layer_norm_eps")
    if eps <= 0:
        raise ModelError(f"{keys.origin}: layer_norm_eps is {eps:g}; expected a number above 0")
    return eps


def _modernbert(keys: ConfigKeys, num_layers: int) -> EncoderConfig:
    """B. Warner et al., "Smarter, Better, Faster, Longer" (2024): rotary positions, and sliding windows in most layers."""
    layer_types = _layer_types(keys, num_layers)
    pooling = keys.get("classifier_pooling") or "cls"
    if pooling not in ("cls", "mean"):
        raise ModelError(f"{keys.origin}: classifier_pooling is {pooling!r:.80}; expected cls or mean")
    parameters = keys.optional_object("rope_parameters") or {}
    scaling = keys.optional_object("rope_scaling") or {}

    def rope(kind: LayerType, theta: str) -> RopeConfig:
        own = parameters.get(kind)
        return one_rope(keys, scaling | (own if isinstance(own, dict) else {}), keys.number(theta))

    return EncoderConfig(
        norm_eps=_norm_eps(keys, "modernbert"),
        norm_bias=keys.flag("norm_bias"),
        num_positions=keys.count("max_position_embeddings"),
        rope=rope("full_attention", "global_rope_theta"),
        rope_local=rope("sliding_attention", "local_rope_theta"),
        layer_types=layer_types,
        window=keys.count("local_attention") // 2 if "sliding_attention" in layer_types else 0,
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        classifier_pooling=cast(Literal["cls", "mean"], pooling),
        classifier_bias=keys.flag("classifier_bias"),
        classifier_act=str(keys.get("classifier_activation") or "gelu"),
    )


def _layer_types(keys: ConfigKeys, num_layers: int) -> tuple[LayerType, ...]:
    """Every n-th layer, from the first, sees the whole text; transformers 5 writes a list instead."""
    stated = keys.listed("layer_types", str, "kinds of layers")
    if stated:
        if len(stated) != num_layers or not set(stated) <= {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{keys.origin}: layer_types must be full_attention or sliding_attention for each of the {num_layers} layers"
            )
        return cast(tuple[LayerType, ...], stated)
    every = keys.count("global_attn_every_n_layers")
    return tuple("sliding_attention" if layer % every else "full_attention" for layer in range(num_layers))
