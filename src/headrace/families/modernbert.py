"""ModernBERT: rotary positions, norms before each part, sliding windows in most layers, a gated feed-forward layer.

Source: B. Warner et al., "Smarter, Better, Faster, Longer" (2024).
"""

from typing import Literal, cast

from headrace.checkpoint.config_keys import ConfigKeys
from headrace.checkpoint.family import EmbeddingOptions, Encoder, EncoderOptions, Family
from headrace.checkpoint.layer_config import EncoderConfig, LayerType, RopeConfig, norm_eps, one_rope
from headrace.errors import ModelError


def _read(keys: ConfigKeys, num_layers: int) -> EncoderConfig:
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
        norm_eps=norm_eps(keys),
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


FAMILY = Family(
    encoders={
        "modernbert": Encoder(
            name="modernbert",
            prefix="model.",
            defaults={
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
            common_names={"norm_eps": "layer_norm_eps", "hidden_activation": "hidden_act"},
            embeddings=EmbeddingOptions(words="embeddings.tok_embeddings", norm="embeddings.norm"),
            blocks=EncoderOptions(
                layers="layers",
                qkv=("attn.Wqkv",),
                out="attn.Wo",
                attention_norm="attn_norm",
                up="mlp.Wi",
                down="mlp.Wo",
                mlp_norm="mlp_norm",
                final_norm="final_norm",
                pre_norm=True,
                gated=True,
            ),
            head=("head.dense", "classifier"),
            head_norm="head.norm",
            unused=("head.", "decoder.", "classifier."),
            read=_read,
        )
    }
)
