"""Encoders in GGUF files: the names of their tensors, and their config.

Owns what differs from decoders (`gguf_names.py`). Only the architecture `bert` is known, to which BERT and DistilBERT convert, and
RoBERTa without the first rows of its table of positions, which no token uses.
"""

from typing import Any, Literal

from headrace.checkpoint.gguf import GgufFile
from headrace.errors import ModelError

GLOBAL = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}

PoolingName = Literal["mean", "cls", "lasttoken"]

_POOLINGS: dict[int, PoolingName] = {1: "mean", 2: "cls", 3: "lasttoken"}
"""`<arch>.pooling_type` of llama.cpp, as sentence-transformers calls them."""


def hf_name(file: GgufFile, name: str) -> str:
    """The Hugging Face name of a tensor of architecture `bert`. Raises ModelError for one that is not known."""
    part, _, kind = name.rpartition(".")
    if part in GLOBAL:
        return f"{GLOBAL[part]}.{kind}"
    block, _, rest = part.removeprefix("blk.").partition(".")
    if part.startswith("blk.") and block.isdecimal() and rest in LAYER:
        return f"encoder.layer.{block}.{LAYER[rest]}.{kind}"
    raise ModelError(f"{file.path.name}: tensor {name} is unknown for architecture bert")


def bert_config(file: GgufFile) -> dict[str, Any]:
    """The Hugging Face style config dict of architecture `bert`. Raises ModelError for missing keys."""
    types = file.tensors.get("token_types.weight")
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": file.count("bert.embedding_length"),
        "num_hidden_layers": file.count("bert.block_count"),
        "num_attention_heads": file.count("bert.attention.head_count"),
        "intermediate_size": file.count("bert.feed_forward_length"),
        "max_position_embeddings": _rows(file, "position_embd.weight"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "layer_norm_eps": file.decimal("bert.attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def stated_pooling(file: GgufFile, arch: str) -> dict[str, PoolingName]:
    """What the converter noted of `modules.json`, as {"gguf_pooling": name}; {} if it noted nothing.

    Raises ModelError for a kind that is not served, such as the head of a cross-encoder (4).
    """
    stated = file.get(f"{arch}.pooling_type")
    if stated is None or stated == 0:
        return {}
    if not isinstance(stated, int) or stated not in _POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise ModelError(f"{file.path.name}: {arch}.pooling_type {stated!r:.80} is not supported; known: {known}")
    return {"gguf_pooling": _POOLINGS[stated]}


def _rows(file: GgufFile, name: str) -> int:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{file.path.name}: tensor {name} is missing")
    return tensor.shape[0]
