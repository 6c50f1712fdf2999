"""What encoders of the BERT family say of themselves in `config.json`: `EncoderConfig`, and every spelling of its keys.

Does not read the sizes that encoders share with decoders (`model_config.py`), nor what is made of hidden
states (`pooling.py`). Imports neither torch nor transformers.
"""

from typing import Any, Literal

import msgspec

from headrace.checkpoint.config_keys import ConfigKeys
from headrace.checkpoint.families import encoders
from headrace.checkpoint.layer_types import LayerType
from headrace.checkpoint.rope_config import RopeConfig
from headrace.errors import ModelError


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
    """The keys of an encoder's config under their common names. config: of one of `families.encoders`. Raises ModelError for a decoder."""
    own = encoders()[config["model_type"]]
    if config.get("is_decoder"):
        raise ModelError(f"{origin}: is_decoder is set; only encoders of this type are supported")
    common = {own.common_names.get(key, key): value for key, value in config.items()}
    return ConfigKeys(common, origin, dict(own.defaults))


def read_encoder(keys: ConfigKeys, num_layers: int) -> EncoderConfig:
    """Raises ModelError that names the invalid key."""
    own = encoders()[keys.config["model_type"]]
    if own.read is not None:
        config: EncoderConfig = own.read(keys, num_layers)
        return config
    kind = keys.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(f"{keys.origin}: position_embedding_type {kind!r:.80} is not supported; only absolute is")
    num_positions = keys.count("max_position_embeddings")
    first_position = 0
    if own.after_padding:
        first_position = (keys.token("pad_token_id") or 0) + 1
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


def norm_eps(keys: ConfigKeys, constant: float | None = None) -> float:
    """Of the LayerNorms. constant: of a family whose code has it so, whatever the config says."""
    eps = keys.number("layer_norm_eps") if constant is None else constant
    if eps <= 0:
        raise ModelError(f"{keys.origin}: layer_norm_eps is {eps:g}; expected a number above 0")
    return eps
