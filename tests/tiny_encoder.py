"""Tiny random encoders and embedding models, in folders as transformers and sentence-transformers write them, with a tokenizer."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "fast",
    "what",
    "is",
    "capital",
    "of",
    "paris",
    "france",
    "rain",
    "in",
    "spain",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
MAX_POSITIONS = 96

_ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0}
_PADDED = {"max_position_embeddings": MAX_POSITIONS + 2, "layer_norm_eps": 1e-5, "type_vocab_size": 1}
KINDS: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER | _PADDED,
    "xlm-roberta": _ENCODER | _PADDED,
    "camembert": _ENCODER | _PADDED,
    "distilbert": {
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 96,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "modernbert": _ENCODER | {"local_attention": 8, "num_hidden_layers": 4},
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "llama": _DECODER,
}
"""Sizes of a model by Hugging Face model type."""

_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    num_labels: int = 0,
    pooling: str | None = "mean",
    normalize: bool = True,
    dense: int = 0,
    max_tokens: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """Write a model of `kind` (of KINDS) and its tokenizer; returns the transformers model, eager attention, float32.

    num_labels: > 0 for a `ForSequenceClassification` of as many labels, which has no modules.json. pooling: `cls`, `mean` or `lasttoken` of
    modules.json; None = the folder has none. normalize, dense: its last modules; a Dense layer of `dense` outputs with tanh, 0 = none.
    max_tokens: of sentence_bert_config.json. changes: to the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(kind)
    specials = {f"{name}_token_id": tokenizer.token_to_id(token) for name, token in _specials(kind).items()}
    ids = {key: token for key, token in specials.items() if kind == "modernbert" or key[:3] in ("pad", "bos", "eos")}
    sizes = copy.deepcopy(KINDS[kind]) | {"vocab_size": tokenizer.get_vocab_size()} | ids | changes
    if num_labels:
        sizes["num_labels"] = num_labels
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForSequenceClassification if num_labels else transformers.AutoModel
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, seed)
    model.eval().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", *(["token_type_ids"] if kind == "bert" else []), "attention_mask"],
        **{f"{name}_token": token for name, token in _specials(kind).items()},
    ).save_pretrained(folder)
    if pooling is not None and not num_labels:
        _write_modules(folder, config.hidden_size, pooling, normalize, dense, seed)
    if max_tokens is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    return model


def dense_of(folder: Path) -> torch.nn.Module | None:
    """The Dense module of a folder that `tiny_encoder` wrote, in plain torch; None if it has none."""
    file = folder / "2_Dense" / "model.safetensors"
    if not file.is_file():
        return None
    tensors = load_file(file)
    layer = torch.nn.Linear(*reversed(tensors["linear.weight"].shape))
    layer.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    return torch.nn.Sequential(layer, torch.nn.Tanh())


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data = noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor.data + 0.2 * noise


def _is_fairseq(kind: str) -> bool:
    return kind in ("roberta", "xlm-roberta", "camembert")


def _specials(kind: str) -> dict[str, str]:
    """Special tokens by their names in a tokenizer's config."""
    if _is_fairseq(kind):
        return {
            "bos": "<s>",
            "cls": "<s>",
            "pad": "<pad>",
            "eos": "</s>",
            "sep": "</s>",
            "unk": "<unk>",
            "mask": "<mask>",
        }
    found = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return found if kind in ("bert", "distilbert") else found | {"bos": "[CLS]", "eos": "[SEP]"}


def _tokenizer(kind: str) -> Tokenizer:
    """WordPiece over a few words and all letters; pairs get the token types 0 and 1 where the family has two."""
    specials = _FAIRSEQ if _is_fairseq(kind) else _BERT
    words = dict.fromkeys((*specials, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)))
    vocabulary = {word: index for index, word in enumerate(words)}
    names = _specials(kind)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=names["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = names["cls"], names["sep"]
    if kind in ("qwen2", "qwen3", "llama"):
        single, pair = f"$A {last}", f"$A $B:1 {last}:1"
    else:
        between, second = (f"{last} {last}", 0) if _is_fairseq(kind) else (last, 1)
        single, pair = f"{first} $A {last}", f"{first} $A {between} $B:{second} {last}:{second}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])]
    )
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _write_modules(folder: Path, size: int, pooling: str, normalize: bool, dense: int, seed: int) -> None:
    """modules.json and the folders that it names."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    flag = {"cls": "cls_token", "mean": "mean_tokens"}.get(pooling, pooling)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    flags = {f"pooling_mode_{mode}": mode == flag for mode in modes}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": size, **flags, "include_prompt": True})
    if dense:
        modules.append(("2_Dense", "Dense"))
        act = "torch.nn.modules.activation.Tanh"
        config = {"in_features": size, "out_features": dense, "bias": True, "activation_function": act}
        _write(folder / "2_Dense" / "config.json", config)
        layer = torch.nn.Linear(size, dense)
        randomise(layer, seed + 1)
        tensors = {f"linear.{name}": tensor.data.contiguous() for name, tensor in layer.named_parameters()}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    _write(folder / "modules.json", listed)


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value, indent=2))
