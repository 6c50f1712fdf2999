"""Maps the metadata of a GGUF file to the keys of config.json, and finds the tokens that end a text. Tensors: `gguf_tensors.py`. No torch.

What is an architecture's own is in its family (`family.Gguf`).
"""

from typing import Any, Literal

import numpy as np

from headrace.checkpoint.families import all_families
from headrace.checkpoint.gguf import GgufFile
from headrace.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens in GGUF
# fmt: off
END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "[e~[", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    # between the files of a repository, in models that fill in the middle
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<REPO>", "<reponame>", "<|file_sep|>",
})
# fmt: on
"""Texts of tokens that end a text."""


def architecture(file: GgufFile) -> str:
    arch = file.require("general.architecture")
    if arch == "clip":
        raise ModelError(f"{file.path.name} is a vision encoder; name the text model, and this file as --mmproj")
    if not isinstance(arch, str) or arch not in all_families().gguf:
        raise ModelError(
            f"{file.path.name}: architecture {arch!r:.80} is not supported; known: {', '.join(all_families().gguf)}"
        )
    return arch


def hf_config(file: GgufFile) -> dict[str, Any]:
    arch = architecture(file)
    own = all_families().gguf[arch]
    names = {"model_type": own.model_type, "architectures": [own.architecture]}
    if own.name is not None:
        return names | own.config(file, {}) | stated_pooling(file, arch)
    num_heads = head_count(file, arch, "head_count")
    hidden_size = file.count(f"{arch}.embedding_length")
    head_dim = file.count(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
    if head_dim != file.get(f"{arch}.attention.value_length", head_dim):
        raise ModelError(f"{file.path.name}: keys and values of different width are not supported")
    if file.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path.name}: rotary embedding of part of a head is not supported for {arch}")
    config: dict[str, Any] = {
        **names,
        "vocab_size": file.rows("token_embd.weight"),  # the tokenizer may have fewer tokens
        "hidden_size": hidden_size,
        "num_hidden_layers": file.count(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": head_count(file, arch, "head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": file.count(f"{arch}.feed_forward_length"),
        "max_position_embeddings": file.count(f"{arch}.context_length"),
        "rms_norm_eps": file.decimal(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.decimal(f"{arch}.rope.freq_base", 10000.0),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        **stated_pooling(file, arch),
    }
    scaling = _rope_scaling(file, arch, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config | own.config(file, config)


def _rope_scaling(file: GgufFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    kind: Literal["none", "linear", "yarn"] = file.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        factor = file.decimal(f"{arch}.rope.scale_linear", 1.0)
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    factor = file.decimal(f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.count(f"{arch}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{file.path.name}: rope scaling {kind!r:.80} is not supported; known: linear, yarn, llama 3's")


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Parameters behind the stored per-frequency divisors: llama 3.1 and 3.2 differ only in the factor.

    The divisors are recomputed and compared, so that another scheme is refused instead of giving wrong results.
    Formula: the `llama3` rope of https://github.com/meta-llama/llama-models (apply_scaling).
    """
    stored = file.dequantize("rope_freqs.weight").reshape(-1)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    exponent = np.arange(0, config["head_dim"], 2, dtype=np.float64) / config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** exponent
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{file.path.name}: tensor rope_freqs.weight is not the rope scaling of llama 3.1 or 3.2")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


PoolingName = Literal["mean", "cls", "lasttoken"]

_POOLINGS: dict[int, PoolingName] = {1: "mean", 2: "cls", 3: "lasttoken"}
"""`<arch>.pooling_type` of llama.cpp, as sentence-transformers calls them."""


def stated_pooling(file: GgufFile, arch: str) -> dict[str, PoolingName]:
    """What the converter noted of `modules.json`, as {"gguf_pooling": name}; {} if it noted nothing. Raises ModelError for a kind that is not
    served, such as the head of a cross-encoder (4)."""
    stated = file.get(f"{arch}.pooling_type")
    if stated is None or stated == 0:
        return {}
    if not isinstance(stated, int) or stated not in _POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise ModelError(f"{file.path.name}: {arch}.pooling_type {stated!r:.80} is not supported; known: {known}")
    return {"gguf_pooling": _POOLINGS[stated]}


def head_count(file: GgufFile, arch: str, key: str) -> int:
    count = file.get(f"{arch}.attention.{key}")
    if count is None and key == "head_count_kv":
        count = file.require(f"{arch}.attention.head_count")
    if isinstance(count, list):
        if any(one != count[0] for one in count):
            raise ModelError(f"{file.path.name}: layers with different numbers of heads are not supported")
        count = count[0] if count else None
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"{file.path.name}: {arch}.attention.{key} is {count!r:.80}; expected a positive whole number")
    return count


def end_ids(file: GgufFile) -> list[int]:
    """The tokens that end a text: those that the metadata names, that of the sequence first, then those that are known by their text.

    As llama.cpp's `llama_vocab::impl::load` (src/llama-vocab.cpp) finds them, but among control and user-defined tokens alone. In harmony `<|end|>`
    ends a message and not the turn, and Gemma 4 has a `</s>` that ends nothing, even if the metadata names them.
    """
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    named = [file.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    known: dict[str, int] = {}
    if "tokenizer.ggml.token_type" in file:
        types, tokens = file.integers("tokenizer.ggml.token_type"), file.strings("tokenizer.ggml.tokens")
        for index in np.flatnonzero(np.isin(types[: len(tokens)], (_CONTROL, _USER_DEFINED))).tolist():
            if tokens[index] in END_TEXTS:
                known.setdefault(tokens[index], index)
    passed: set[object] = set()
    if {"<|call|>", "<|return|>"} <= known.keys() or {"<|calls|>", "<|flush|>"} <= known.keys():
        passed.add(known.pop("<|end|>", None))
    if "<|tool_response>" in known:
        passed.add(known.pop("</s>", None))
    stated = (
        token for token in named if isinstance(token, int) and not isinstance(token, bool) and token not in passed
    )
    return list(dict.fromkeys([*stated, *known.values()]))
