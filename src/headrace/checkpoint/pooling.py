"""What an embedding model, classifier or reward model makes of its hidden states: `PoolingConfig`, read from the files of a checkpoint. No torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from headrace.checkpoint.files import read_json_if_there, read_json_list, read_json_object
from headrace.checkpoint.model_config import ModelConfig
from headrace.errors import ModelError

_MAX_LABELS = 100_000

T = TypeVar("T")

PoolingKind = Literal["cls", "mean", "last"]
PooledTask = Literal["embed", "classify"]


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A `Dense` module of sentence-transformers: activation(W x + b). folder: of the checkpoint, where its weights are."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the hidden states of a text become one vector.

    task: embed = the vector stands for the text. classify = it has a number (a logit) for each label; with one label it is a score: the relevance
    of a document for a query (cross-encoders), or a reward.
    pooling: of the first token, the mean of all, or of the last. dense: applied in order. normalize: to length 1, after all else.
    max_tokens: the context unless --context-length says otherwise; longer inputs are cut if the request asks for it, and else refused.
    None = the positions of the model.
    labels: names of the numbers of `classify`, in order. activation: what clients see of `classify` unless they ask for the numbers themselves.
    matryoshka: whether the first numbers of a vector alone are a vector, too, once they are normalised. is_pair: whether the model was made
    for pairs of texts. dimensions: of the vector. lower_case: texts are written in lower case before the tokenizer sees them.
    """

    task: PooledTask
    pooling: PoolingKind
    dimensions: int
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    labels: tuple[str, ...] = ()
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    matryoshka: bool = False
    is_pair: bool = False
    lower_case: bool = False

    def summary(self) -> str:
        """For people: "embeddings of 384 numbers (mean, normalised) of texts of at most 256 tokens"."""
        limit = "" if self.max_tokens is None else f" of at most {self.max_tokens} tokens"
        if self.task == "embed":
            normalised = ", normalised" if self.normalize else ""
            return f"embeddings of {self.dimensions} numbers ({self.pooling}{normalised}) of texts{limit}"
        if self.dimensions == 1:
            return f"a score of {'a pair of texts' if self.is_pair else 'a text'}{limit}"
        return f"scores for {self.dimensions} labels of a text{limit}"


_ST_CLASSIFIER_KEY = "sbert_ce_default_activation_function"
_MODES: dict[str, PoolingKind] = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
}
"""How modules.json calls them, in `pooling_mode_<name>` or as the value of `pooling_mode`."""
_CLASSIFIER, _REWARD = "ForSequenceClassification", "ForRewardModel"
_OTHER_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
_BARE = re.compile(r"(?![A-Za-z0-9]*(LMHead|DoubleHeads)Model$)[A-Za-z0-9]+Model")
"""Names of classes without an output projection. The oldest with one are called `GPT2LMHeadModel` and the like."""
_ACTIVATIONS: dict[str, Literal["none", "sigmoid", "softmax"]] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_DENSE_ACTIVATIONS: dict[str, Literal["identity", "tanh"]] = {"Identity": "identity", "Tanh": "tanh"}


def read_pooling(path: Path, config: ModelConfig, is_embedding: bool) -> PoolingConfig | None:
    """What the model in the folder (or file) `path` makes of its hidden states; None = it generates.

    is_embedding: a decoder of which nothing else says so is served for its hidden states.

    - `architectures` names a model `ForSequenceClassification`, or a decoder `ForRewardModel`: classify, whatever the rest says.
    - `modules.json` (sentence-transformers): embed, as its modules say.
    - A GGUF file that says how it pools (`gguf_names.py`): embed, to length 1, as llama.cpp's server does.
    - An encoder without it: embed with the first token, to length 1, as text-embeddings-inference and vLLM do for the BERT family.
    - A decoder that `is_embedding`, or of which the checkpoint is a bare model without output projection: embed with the last
      token, to length 1, as vLLM and SGLang do.

    Raises ModelError for files that cannot be read, and for whatever is not served; it names the cause.
    """
    folder = path if path.is_dir() else None
    is_encoder = config.encoder is not None
    names = config.architectures
    if any(name.endswith(_CLASSIFIER) for name in names):
        return _classifier(config, _labels(config.raw, 2))
    if not is_encoder and any(name.endswith(_REWARD) for name in names):
        return _classifier(config, _labels(config.raw, 1))
    if is_encoder and (other := [name for name in names if name.endswith(_OTHER_HEADS)]):
        raise ModelError(f"config.json: the head of architecture {other[0]:.80} is not supported")
    modules = None if folder is None else folder / "modules.json"
    if folder is not None and modules is not None and modules.is_file():
        _check_reads_one_way(config)
        return _modular(folder, read_json_list(modules), config)
    stated = None if folder is not None else config.raw.get("gguf_pooling")
    is_bare = bool(names) and all(map(_BARE.fullmatch, names))
    if not (is_encoder or is_embedding or stated is not None or (is_bare and folder is not None)):
        return None
    _check_reads_one_way(config)
    return PoolingConfig(
        task="embed",
        pooling=_MODES[stated] if stated is not None else "cls" if is_encoder else "last",
        dimensions=config.hidden_size,
        normalize=True,
        max_tokens=None if folder is None else _max_tokens(folder, config),
        lower_case=folder is not None and _lower_case(folder),
        matryoshka=_is_matryoshka(config, {}),
    )


def dense_folders(folder: Path) -> list[str]:
    """The folders of the Dense modules of a checkpoint, whose weights are part of it. Raises ModelError as `read_pooling` does."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    return [name for kind, name in _modules(read_json_list(file)) if kind == "Dense"]


def _check_reads_one_way(config: ModelConfig) -> None:
    """Raises ModelError for a decoder that was trained to see later tokens, too."""
    for key, both_ways in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.encoder is None and config.raw.get(key) is both_ways:
            raise ModelError(
                f"config.json: {key} is {str(both_ways).lower()}; a decoder whose tokens see later ones is not supported"
            )


def _classifier(config: ModelConfig, labels: tuple[str, ...]) -> PoolingConfig:
    stated = _stated_activation(config.raw)
    encoder = config.encoder
    activation: Literal["none", "sigmoid", "softmax"]
    if stated is not None:
        activation = stated
    elif len(labels) == 1:
        # A cross-encoder says how relevant a document is; what a reward model says has no bounds.
        activation = "none" if encoder is None else "sigmoid"
    else:
        activation = "sigmoid" if config.raw.get("problem_type") == "multi_label_classification" else "softmax"
    return PoolingConfig(
        task="classify",
        pooling="last" if encoder is None else encoder.classifier_pooling,
        dimensions=len(labels),
        labels=labels,
        activation=activation,
        is_pair=stated is not None or (encoder is not None and len(labels) == 1),
    )


def _labels(raw: dict[str, Any], default: int) -> tuple[str, ...]:
    """Names of the labels in order. default: how many they are if the config leaves them out, as transformers does with two without names."""
    stated = raw.get("id2label")
    if stated is None:
        count = raw.get("num_labels", default)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= _MAX_LABELS:
            raise ModelError(f"config.json: num_labels is {count!r:.80}; expected 1 to {_MAX_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(stated, dict) or not stated or set(stated) != {str(index) for index in range(len(stated))}:
        raise ModelError("config.json: id2label must name the labels 0, 1, ...")
    return tuple(str(stated[str(index)]) for index in range(len(stated)))


def _stated_activation(raw: dict[str, Any]) -> Literal["none", "sigmoid", "softmax"] | None:
    """What sentence-transformers noted of a cross-encoder, under its older or its newer key; None if it noted nothing."""
    newer = raw.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    if name is None:
        name = raw.get(_ST_CLASSIFIER_KEY)
    return (
        None if name is None else _known(_ACTIVATIONS, _last_part(name), "config.json: the cross-encoder's activation")
    )


def _modular(folder: Path, listed: list[Any], config: ModelConfig) -> PoolingConfig:
    modules = [(kind, name) for kind, name in _modules(listed) if kind != "Dropout"]
    kinds = [kind for kind, _ in modules]
    in_order = ["Transformer", "Pooling"] + ["Dense"] * kinds.count("Dense")
    if kinds not in (in_order, [*in_order, "Normalize"]):
        raise ModelError(
            f"modules.json: the modules {', '.join(kinds)[:200]} are not supported; only Transformer, Pooling, any number of Dense and at "
            "most one Normalize, in this order, are"
        )
    dense = tuple(_dense(folder, name) for kind, name in modules if kind == "Dense")
    size = config.hidden_size
    for layer in dense:
        if layer.in_features != size:
            raise ModelError(f"{layer.folder}/config.json: in_features is {layer.in_features}, but it gets {size}")
        size = layer.out_features
    extra = read_json_if_there(folder / "config_sentence_transformers.json")
    return PoolingConfig(
        task="embed",
        pooling=_pooling(folder / modules[1][1] / "config.json"),
        dimensions=size,
        dense=dense,
        normalize=kinds[-1] == "Normalize",
        max_tokens=_max_tokens(folder, config),
        lower_case=_lower_case(folder),
        matryoshka=_is_matryoshka(config, extra),
    )


def _modules(listed: list[Any]) -> list[tuple[str, str]]:
    """(kind, folder) of each module; a folder lies in that of the checkpoint, "" is that itself."""
    found = []
    for entry in listed:
        kind, name = (entry.get("type"), entry.get("path", "")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(name, str):
            raise ModelError("modules.json: expected a list of modules with a type and a path")
        if name and (Path(name).name != name or name in (".", "..") or "\\" in name):
            raise ModelError(f"modules.json: {name!r:.80} is not a folder of the checkpoint")
        found.append((_last_part(kind), name))
    return found


def _pooling(file: Path) -> PoolingKind:
    config = read_json_object(file)
    stated = config.get("pooling_mode")
    if stated is None:
        modes = [key.removeprefix("pooling_mode_") for key in config if key.startswith("pooling_mode_") and config[key]]
    else:
        modes = [str(mode) for mode in stated] if isinstance(stated, list | tuple) else [str(stated)]
    where = f"{file.parent.name}/{file.name}"
    if len(modes) != 1:
        raise ModelError(f"{where}: {len(modes)} pooling modes ({', '.join(modes)[:200]}); exactly one is supported")
    return _known(_MODES, modes[0], f"{where}: pooling mode")


def _dense(folder: Path, name: str) -> DenseConfig:
    config = read_json_object(folder / name / "config.json")
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    for key, size in zip(("in_features", "out_features"), sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**31:
            raise ModelError(f"{name}/config.json: {key} is {size!r:.80}; expected a positive whole number")
    act = _last_part(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return DenseConfig(
        folder=name,
        in_features=cast(int, sizes[0]),
        out_features=cast(int, sizes[1]),
        bias=bool(config.get("bias", True)),
        activation=_known(_DENSE_ACTIVATIONS, act, f"{name}/config.json: activation_function"),
    )


def _max_tokens(folder: Path, config: ModelConfig) -> int | None:
    file = folder / "sentence_bert_config.json"
    stated = read_json_if_there(file).get("max_seq_length")
    if stated is None:
        return None
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 1:
        raise ModelError(f"{file.name}: max_seq_length is {stated!r:.80}; expected a positive whole number")
    return min(stated, config.max_position_embeddings)


def _lower_case(folder: Path) -> bool:
    return read_json_if_there(folder / "sentence_bert_config.json").get("do_lower_case") is True


def _is_matryoshka(config: ModelConfig, extra: dict[str, Any]) -> bool:
    """Whether anything says that shorter vectors were trained, too. extra: config_sentence_transformers.json."""
    keys = ("is_matryoshka", "matryoshka_dimensions", "matryoshka_dims", "truncate_dim")
    return any(bool(fields.get(key)) for fields in (config.raw, extra) for key in keys)


def _known(table: Mapping[str, T], name: str, what: str) -> T:
    if name not in table:
        raise ModelError(f"{what} {name!r:.80} is not supported; known: {', '.join(table)}")
    return table[name]


def _last_part(name: object) -> str:
    return str(name).rpartition(".")[2]
