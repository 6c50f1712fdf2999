"""What a checkpoint says of how its hidden states are pooled, in every spelling; what is not served is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.model_config import ModelConfig, load_model_config, parse_hf_config
from headrace.checkpoint.pooling import PoolingConfig, dense_folders, read_pooling
from headrace.errors import ModelError

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
}
_BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 128, **_SIZES}
_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "num_key_value_heads": 2,
    **_SIZES,
}
_TANH = "torch.nn.modules.activation.Tanh"


def modules(*kinds: str) -> list[dict[str, Any]]:
    """modules.json; a kind's folder is that of its place."""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def written(folder: Path, config: dict[str, Any], files: dict[str, Any] | None = None) -> Path:
    """A checkpoint without weights. files: by path."""
    for name, value in ({"config.json": config} | (files or {})).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    return folder


def pooling_of(folder: Path, is_embedding: bool = False) -> PoolingConfig | None:
    return read_pooling(folder, load_model_config(folder), is_embedding)


def embedding(folder: Path, is_embedding: bool = False) -> PoolingConfig:
    found = pooling_of(folder, is_embedding)
    assert found is not None
    return found


def pooling_file(**modes: bool) -> dict[str, Any]:
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{name}": value for name, value in modes.items()}}


def test_sentence_transformers_says_all(tmp_path: Path):
    folder = written(
        tmp_path,
        _BERT,
        {
            "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
            "1_Pooling/config.json": pooling_file(cls_token=False, mean_tokens=True, max_tokens=False),
            "2_Dense/config.json": {"in_features": 64, "out_features": 24, "bias": False, "activation_function": _TANH},
            "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
            "config_sentence_transformers.json": {"matryoshka_dims": [24, 12]},
        },
    )

    found = embedding(folder)

    assert (found.task, found.pooling, found.normalize, found.dimensions) == ("embed", "mean", True, 24)
    assert (found.max_tokens, found.matryoshka) == (100, True)
    dense = found.dense[0]
    assert (dense.folder, dense.in_features, dense.bias, dense.activation) == ("2_Dense", 64, False, "tanh")
    assert dense_folders(folder) == ["2_Dense"]


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        (pooling_file(cls_token=True, mean_tokens=False), "cls"),
        (pooling_file(cls_token=False, lasttoken=True), "last"),
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_pooling_is_read_in_either_spelling_and_nothing_is_normalised_without_a_module(
    tmp_path: Path, stated: dict[str, Any], pooling: str
):
    kinds = modules("Transformer", "Pooling")
    for entry, kind in zip(
        kinds, ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"), strict=True
    ):
        entry["type"] = f"sentence_transformers.{kind}"

    found = embedding(written(tmp_path, _BERT, {"modules.json": kinds, "1_Pooling/config.json": stated}))

    assert (found.pooling, found.normalize, found.dimensions, found.max_tokens) == (pooling, False, 64, None)


def test_max_tokens_is_at_most_the_context(tmp_path: Path):
    roberta = _BERT | {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 130}

    found = embedding(written(tmp_path, roberta, {"sentence_bert_config.json": {"max_seq_length": 512}}))

    assert found.max_tokens == load_model_config(tmp_path).max_position_embeddings == 128


def test_an_encoder_without_modules_is_an_embedding_of_its_first_token(tmp_path: Path):
    found = embedding(written(tmp_path, _BERT | {"architectures": ["BertForMaskedLM"]}))

    assert (found.task, found.pooling, found.normalize) == ("embed", "cls", True)


def test_a_decoder_generates_unless_something_says_that_it_does_not(tmp_path: Path):
    written(tmp_path, _QWEN3)
    assert pooling_of(tmp_path) is None
    asked = embedding(tmp_path, is_embedding=True)
    assert (asked.pooling, asked.normalize, asked.dimensions) == ("last", True, 64)

    assert embedding(written(tmp_path, _QWEN3 | {"architectures": ["Qwen3Model"]})) == asked


def test_a_file_pools_only_if_it_is_asked_to(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.touch()
    config = parse_hf_config(_QWEN3)

    assert read_pooling(file, config, False) is None
    pooled = read_pooling(file, config, True)
    assert pooled is not None
    assert pooled.pooling == "last"


CLASSIFIERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cross-encoder": ({"id2label": {"0": "LABEL_0"}}, {"activation": "sigmoid", "is_pair": True, "dimensions": 1}),
    "two labels, which transformers leaves out": (
        {},
        {"labels": ("LABEL_0", "LABEL_1"), "activation": "softmax", "is_pair": False},
    ),
    "three labels": (
        {"id2label": {"2": "c", "0": "a", "1": "b"}},
        {"labels": ("a", "b", "c"), "activation": "softmax", "pooling": "cls"},
    ),
    "several may be right": (
        {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
        {"activation": "sigmoid"},
    ),
    "identity, older key": (
        {"id2label": {"0": "a"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"activation": "none", "is_pair": True},
    ),
    "sigmoid, newer key": (
        {
            "id2label": {"0": "a"},
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0"},
        },
        {"activation": "sigmoid"},
    ),
    "a pair with three labels": (
        {"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"activation": "none", "is_pair": True, "dimensions": 3},
    ),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(tmp_path: Path, name: str):
    changes, want = CLASSIFIERS[name]

    found = embedding(written(tmp_path, _BERT | {"architectures": ["BertForSequenceClassification"]} | changes))

    assert found.task == "classify"
    assert {key: getattr(found, key) for key in want} == want


@pytest.mark.parametrize("architecture", ["Qwen3ForSequenceClassification", "Qwen2ForRewardModel"])
def test_a_reward_is_the_number_itself_at_the_last_token(tmp_path: Path, architecture: str):
    found = embedding(written(tmp_path, _QWEN3 | {"architectures": [architecture], "num_labels": 1}))

    assert (found.task, found.pooling, found.activation, found.is_pair) == ("classify", "last", "none", False)


def test_modernbert_says_what_its_classifier_reads():
    config = parse_hf_config({"model_type": "modernbert", "classifier_pooling": "mean", **_SIZES})
    config = load_with(config, ("ModernBertForSequenceClassification",))

    found = read_pooling(Path("nowhere"), config, False)

    assert found is not None
    assert found.pooling == "mean"


def load_with(config: ModelConfig, architectures: tuple[str, ...]) -> ModelConfig:
    """The config with these architectures."""
    return parse_hf_config(config.raw | {"architectures": list(architectures)})


_MODULES = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": pooling_file(mean_tokens=True)}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two poolings": (
        _BERT,
        _MODULES | {"1_Pooling/config.json": pooling_file(cls_token=True, mean_tokens=True)},
        "2 pooling modes",
    ),
    "max pooling": (_BERT, _MODULES | {"1_Pooling/config.json": pooling_file(max_tokens=True)}, "'max_tokens'"),
    "no pooling": (_BERT, _MODULES | {"1_Pooling/config.json": pooling_file(mean_tokens=False)}, "0 pooling modes"),
    "another module": (
        _BERT,
        _MODULES | {"modules.json": modules("Transformer", "Pooling", "WeightedLayerPooling")},
        "WeightedLayerPooling",
    ),
    "another order": (
        _BERT,
        _MODULES | {"modules.json": modules("Transformer", "Pooling", "Normalize", "Dense")},
        "in this order",
    ),
    "a folder elsewhere": (
        _BERT,
        {"modules.json": [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../1_Pooling"}]},
        "not a folder of the checkpoint",
    ),
    "a module without a type": (_BERT, {"modules.json": [{"path": ""}]}, "a type and a path"),
    "modules of another form": (_BERT, {"modules.json": {}}, "not a JSON array"),
    "a dense layer of another size": (
        _BERT,
        _MODULES
        | {
            "modules.json": modules("Transformer", "Pooling", "Dense"),
            "2_Dense/config.json": {"in_features": 32, "out_features": 8, "activation_function": _TANH},
        },
        "in_features is 32, but it gets 64",
    ),
    "a dense layer of another activation": (
        _BERT,
        _MODULES
        | {
            "modules.json": modules("Transformer", "Pooling", "Dense"),
            "2_Dense/config.json": {"in_features": 64, "out_features": 8, "activation_function": "torch.nn.ELU"},
        },
        "'ELU'",
    ),
    "labels with a gap": (
        _BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "2": "b"}},
        {},
        "id2label",
    ),
    "another head": (_BERT | {"architectures": ["BertForTokenClassification"]}, {}, "BertForTokenClassification"),
    "an activation that is not known": (
        _BERT | {"architectures": ["BertForSequenceClassification"], "sbert_ce_default_activation_function": "a.b.Elu"},
        {},
        "'Elu'",
    ),
    "a decoder that sees later tokens": (_QWEN3 | {"is_causal": False}, _MODULES, "is_causal is false"),
    "a max_seq_length of zero": (
        _BERT,
        _MODULES | {"sentence_bert_config.json": {"max_seq_length": 0}},
        "max_seq_length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(tmp_path: Path, name: str):
    config, files, message = REFUSED[name]

    with pytest.raises(ModelError, match=message):
        pooling_of(written(tmp_path, config, files))


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel", "XLNetLMHeadModel", "GPT2DoubleHeadsModel", "XLMWithLMHeadModel"]
)  # fmt: skip
def test_a_class_with_an_output_projection_generates_whatever_its_name_ends_with(tmp_path: Path, name: str):
    assert pooling_of(written(tmp_path, _QWEN3 | {"architectures": [name]})) is None
    assert embedding(
        written(tmp_path, _QWEN3 | {"architectures": [name.replace("LMHead", "").replace("DoubleHeads", "")]})
    )
