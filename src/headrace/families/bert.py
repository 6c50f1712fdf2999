"""BERT: learned positions, token types, norms after each part (J. Devlin et al., 2018); RoBERTa (Y. Liu et al., 2019), XLM-RoBERTa, CamemBERT.

GGUF files of architecture `bert` have BERT and DistilBERT, and RoBERTa without the first rows of its table of positions, which no token uses.
"""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.family import EmbeddingOptions, Encoder, EncoderOptions, Family, Gguf
from headrace.errors import ModelError

if TYPE_CHECKING:
    from headrace.checkpoint.gguf import GgufFile

DEFAULTS: dict[str, Any] = {
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
EMBEDDINGS = EmbeddingOptions(
    words="embeddings.word_embeddings",
    norm="embeddings.LayerNorm",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
)
BLOCKS = EncoderOptions(
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
UNUSED = ("position_ids", "pooler.", "cls.", "lm_head.", "classifier.")

_GGUF_GLOBAL = {
    "token_embd": EMBEDDINGS.words,
    "token_types": EMBEDDINGS.types,
    "position_embd": EMBEDDINGS.positions,
    "token_embd_norm": EMBEDDINGS.norm,
}
_GGUF_LAYER = {
    **dict(zip(("attn_q", "attn_k", "attn_v"), BLOCKS.qkv, strict=True)),
    "attn_output": BLOCKS.out,
    "attn_output_norm": BLOCKS.attention_norm,
    "ffn_up": BLOCKS.up,
    "ffn_down": BLOCKS.down,
    "layer_output_norm": BLOCKS.mlp_norm,
}


def _gguf_name(file: "GgufFile", name: str) -> str:
    part, _, kind = name.rpartition(".")
    if part in _GGUF_GLOBAL:
        return f"{_GGUF_GLOBAL[part]}.{kind}"
    block, _, rest = part.removeprefix("blk.").partition(".")
    if part.startswith("blk.") and block.isdecimal() and rest in _GGUF_LAYER:
        return f"{BLOCKS.layers}.{block}.{_GGUF_LAYER[rest]}.{kind}"
    raise ModelError(f"{file.path.name}: tensor {name} is unknown for architecture bert")


def _gguf_config(file: "GgufFile", config: dict[str, Any]) -> dict[str, Any]:
    types = file.tensors.get("token_types.weight")
    return {
        "vocab_size": file.rows("token_embd.weight"),
        "hidden_size": file.count("bert.embedding_length"),
        "num_hidden_layers": file.count("bert.block_count"),
        "num_attention_heads": file.count("bert.attention.head_count"),
        "intermediate_size": file.count("bert.feed_forward_length"),
        "max_position_embeddings": file.rows("position_embd.weight"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "layer_norm_eps": file.decimal("bert.attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


_ROBERTA: dict[str, Any] = DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _roberta(**defaults: Any) -> Encoder:
    """Positions are counted from after the padding id, and the head is another."""
    return Encoder(
        name="roberta",
        prefix="roberta.",
        defaults=_ROBERTA | defaults,
        embeddings=EMBEDDINGS,
        blocks=BLOCKS,
        head=("classifier.dense", "classifier.out_proj"),
        head_activation="tanh",
        unused=UNUSED,
        after_padding=True,
    )


FAMILY = Family(
    encoders={
        "bert": Encoder(
            name="bert",
            prefix="bert.",
            defaults=DEFAULTS,
            embeddings=EMBEDDINGS,
            blocks=BLOCKS,
            # Classifiers read the first token through BERT's pooler; embeddings do without.
            head=("pooler.dense", "classifier"),
            head_activation="tanh",
            unused=UNUSED,
        ),
        "roberta": _roberta(),
        "xlm-roberta": _roberta(vocab_size=30522),
        "camembert": _roberta(vocab_size=30522),
    },
    gguf={"bert": Gguf(model_type="bert", architecture="BertModel", config=_gguf_config, name=_gguf_name)},
)
