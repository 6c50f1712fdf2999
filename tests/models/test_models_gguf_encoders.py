"""Embedding models in GGUF files, whose tensors have the names that the gguf library gives them."""

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from encoder_harness import Texts, open_encoder, open_pooled, pooled, pooled_in_chunks, reference
from model_harness import BACKENDS

from headrace.checkpoint.pooling import read_pooling
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.text.tokenizers import load_tokenizer
from tiny_encoder import tiny_encoder

SENTENCES = ["", "The cat sat on the mat.", "Tokyo? 7 dogs, XYZ!", "a\tcat\n[SEP] 猫 café"]


def write(theirs: Any, folder: Path, pooling: gguf.PoolingType | None) -> Path:
    """The model and the tokenizer of a folder that `tiny_encoder` wrote, as llama.cpp's converter writes them."""
    config = theirs.config
    is_roberta = config.model_type == "xlm-roberta"
    name = "bert" if is_roberta else config.model_type
    arch = gguf.MODEL_ARCH[name.upper()]
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, name)
    first = config.pad_token_id + 1 if is_roberta else 0
    writer.add_context_length(config.max_position_embeddings - first)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if name == "bert":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        writer.add_token_type_count(config.type_vocab_size)
        (_add_unigram if is_roberta else _add_word_piece)(writer, folder)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in theirs.state_dict().items():
        if "pooler" in key or "position_ids" in key:
            continue
        found = names.get_name(key if name == "bert" else f"model.{key}", try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        writer.add_tensor(found, tensor[first if "position_embeddings" in key else 0 :].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_word_piece(writer: gguf.GGUFWriter, folder: Path) -> None:
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = [re.fullmatch(r"\[\w+\]", token) is not None for token in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [
            token if is_special else token.removeprefix("##") if token.startswith("##") else f"▁{token}"
            for token, is_special in zip(tokens, special, strict=True)
        ]
    )
    kinds = gguf.TokenType
    writer.add_token_types([int(kinds.CONTROL if is_special else kinds.NORMAL) for is_special in special])
    gguf.SpecialVocab(folder, load_merges=False).add_to_gguf(writer)


def _add_unigram(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Every token of the folder's tokenizer as a piece of the same score."""
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = [re.fullmatch(r"<\w+>|</s>", token) is not None for token in tokens]
    writer.add_tokenizer_model("t5")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([int(kinds.CONTROL if is_special else kinds.NORMAL) for is_special in special])
    writer.add_token_scores([0.0 if is_special else -1.0 for is_special in special])
    for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unknown", "<unk>"), ("padding", "<pad>")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary[token])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def test_a_bert_has_the_vectors_of_transformers(tmp_path: Path):
    theirs = tiny_encoder(tmp_path, pooling=None)
    file = write(theirs, tmp_path, gguf.PoolingType.MEAN)

    model, pooling = open_encoder(file)

    assert (pooling.pooling, pooling.normalize) == ("mean", True)
    texts = Texts([[2, 7, 9, 11, 3], [2, 3]], [[0, 0, 0, 1, 1], [0, 0]])
    torch.testing.assert_close(pooled(model, texts), reference(theirs, texts, pooling), atol=2e-6, rtol=0)


def test_an_xlm_roberta_has_the_vectors_of_transformers(tmp_path: Path):
    """The table of positions in the file begins after the padding id, and its tokenizer is a unigram model."""
    theirs = tiny_encoder(tmp_path, "xlm-roberta", pooling=None)
    file = write(theirs, tmp_path, gguf.PoolingType.CLS)
    tokenizer = load_tokenizer(file)
    ids = [tokenizer.encode(text) for text in ("cat", "paris", "")]
    assert all((row[0], row[-1]) == (tokenizer.bos_id, *tokenizer.eos_ids) for row in ids)

    model, pooling = open_encoder(file)

    assert (pooling.pooling, pooling.normalize) == ("cls", True)
    texts = Texts([*ids, list(range(5, 40))])
    torch.testing.assert_close(pooled(model, texts), reference(theirs, texts, pooling), atol=2e-6, rtol=0)


def test_its_tokenizer_gives_the_ids_of_the_one_it_was_made_of(tmp_path: Path):
    file = write(tiny_encoder(tmp_path, pooling=None), tmp_path, None)
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    ours = load_tokenizer(file)

    for text in SENTENCES[:3]:
        assert ours.encode(text) == original.encode(text).ids, text
    # What a user writes is text, whatever it looks like.
    assert ours.encode(SENTENCES[3]).count(ours.token_to_id("[SEP]")) == 1


def test_a_decoder_that_says_how_it_pools_is_an_embedding_model(tmp_path: Path):
    theirs = tiny_encoder(tmp_path, "qwen3", pooling=None)
    ids = [5, 9, 7, 12, 3]

    runner, model = open_pooled(write(theirs, tmp_path, gguf.PoolingType.LAST), BACKENDS[-1])

    want = reference(theirs, Texts([ids]), model.pooler.config)[0]
    assert model.pooler.config.pooling == "last"
    torch.testing.assert_close(pooled_in_chunks(runner, model, ids, []), want, atol=2e-5, rtol=0)


def test_without_a_pooling_a_decoder_generates_and_a_bert_reads_its_first_token(tmp_path: Path):
    (tmp_path / "a").mkdir()
    decoder = open_checkpoint(write(tiny_encoder(tmp_path / "a", "qwen3", pooling=None), tmp_path / "a", None))
    assert read_pooling(decoder.path, decoder.config, False) is None

    _, pooling = open_encoder(write(tiny_encoder(tmp_path / "b", pooling=None), tmp_path / "b", None))
    assert pooling.pooling == "cls"


def test_a_cross_encoder_is_refused_by_its_pooling(tmp_path: Path):
    file = write(tiny_encoder(tmp_path, pooling=None), tmp_path, gguf.PoolingType.RANK)

    with pytest.raises(ModelError, match=r"bert\.pooling_type 4 is not supported"):
        open_checkpoint(file)
