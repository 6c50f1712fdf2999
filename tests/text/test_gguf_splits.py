"""How GGUF files have texts cut before byte pairs are merged, by the name of their pre-tokenizer. `python -m bench.gguf_tokenizers` compares the
ids of each with llama.cpp's."""

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from headrace.errors import ModelError
from headrace.text.tokenizers import Tokenizer, load_tokenizer
from headrace.text.tokenizers.gguf_splits import SPLITS

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CUTS: list[tuple[str, str, list[str]]] = [
    ("gpt-2", "it's 12345 x", ["it", "'s", " 12345", " x"]),
    ("smollm", "it's 123 x", ["it", "'s", " ", "1", "2", "3", " x"]),
    ("default", "it's $`12345' x", ["it", "'", "s", " ", "$", "`", "123", "45", "'", " x"]),
    ("falcon", "it's $`12345 x", ["it", "'", "s", " ", "$`", "123", "45", " x"]),
    ("llama-bpe", "IT'S 12345 x\n\n y", ["IT", "'S", " ", "123", "45", " x", "\n\n", " y"]),
    ("glm4", "IT'S 12345 x\n\n y", ["IT", "'S", " ", "123", "45", " x", "\n\n", " y"]),
    ("smaug-bpe", "IT'S 12345 x\n\n y", ["IT", "'S", " ", "123", "45", " x", "\n\n", " y"]),
    ("jais-2", "IT'S 1234 x       y\n\n z", ["IT", "'S", " ", "123", "4", " x", "    ", "  ", " y", "\n\n", " z"]),
    ("minicpm5", "IT'S 12345 ½ab", ["IT", "'S", " ", "123", "45", " ", "½", "ab"]),
    ("qwen2", "it's 12 ();\n\nx", ["it", "'s", " ", "1", "2", " ();\n\n", "x"]),
    ("stablelm2", "IT'S 12 e\u0301\n\nx", ["IT", "'S", " ", "1", "2", " e", "\u0301\n\n", "x"]),
    ("qwen35", "x\u030ca 12", ["x\u030ca", " ", "1", "2"]),
    ("laguna", "it's ();\n\n\nx\n y", ["it", "'s", " ();", "\n\n\n", "x", "\n", " y"]),
    ("ufakzeka", "Ankara'dan 12 ();\n\nx", ["Ankara", "'dan", " ", "1", "2", " ();\n\n", "x"]),
    ("seed-coder", "it's 12 ();\n\nx", ["it", "'s", " ", "1", "2", " ();", "\n\n", "x"]),
    ("bailingmoe", "it'S 12 ();\n\n x\n\ny", ["it", "'S", " ", "1", "2", " ();\n\n", " x", "\n\n", "y"]),
    ("exaone-moe", "to be or\n12 ();\n\nx", ["to be or", "\n", "1", "2", " ();\n", "\n", "x"]),
    ("tekken", "it's McDonald 12 a/\n/b", ["it", "'s", " Mc", "Donald", " ", "1", "2", " a", "/\n/", "b"]),
    ("gpt-4o", "it's McDonald 1234", ["it's", " Mc", "Donald", " ", "123", "4"]),
    ("granite-embed-multi-97m", "it's McDonald 1234 e\u0301a", ["it's", " Mc", "Donald", " ", "123", "4", " e\u0301a"]),
    ("tiny_aya", "it's McDonald 12345 1234a", ["it's", " Mc", "Donald", " ", "12", "345", " ", "123", "4", "a"]),
    ("youtu", "it's McDonald 12 한글ㄱ，、你好", ["it's", " Mc", "Donald", " ", "1", "2", " ", "한글ㄱ", "，、", "你好"]),
    ("kimi-k2", "it's McDonald 1234 你好a 々", ["it's", " Mc", "Donald", " ", "123", "4", " ", "你好", "a", " ", "々"]),
    ("deepseek-v3", "it's 1234 ();\n\nx 你好a", ["it", "'s", " ", "123", "4", " ();\n\n", "x", " ", "你好", "a"]),
    ("spark2_5", "it's 12 ();\n\nx 你好a", ["it", "'s", " ", "1", "2", " ();", "\n", "\n", "x", " ", "你好", "a"]),
    ("afmoe", "a  12345 1234567b 你c ไทย", ["a", " ", " ", "12", "345", " ", "1", "234", "567", "b", " ", "你", "c", " ", "ไ", "ทย"]),
    ("deepseek-coder", "it's 12\n ();x 世界b", ["it", "'", "s", " ", "1", "2", "\n", " ();", "x", " ", "世界", "b"]),
    ("deepseek-llm", "it's 12 ();世界b。x", ["it", "'", "s", " ", "12", " ();", "世界", "b", "。", "x"]),
    ("bloom", "it's, 12 (x)", ["it's", ",", " 12", " (", "x", ")"]),
    ("viking", "it's, 12 x", ["it's", ",", " ", "1", "2", " x"]),
    ("superbpe", "to be or 1234567 not", ["to be or ", "1", "234", "567", " not"]),
    ("chameleon", "it's  12\tIMGIMGABCZ !?", ["it", "'", "s", "  ", "1", "2", "\t", "IMGIMGABCZ", " ", "!", "?"]),
]  # fmt: skip


def byte_pairs(
    path: Path, pre: Any, vocab: list[str], merges: list[str], model: str = "gpt2", **more: bool
) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_key_value("tokenizer.ggml.pre", pre, gguf.GGUFValueType.get_type(pre))
    writer.add_token_list([*vocab, "<s>"])
    writer.add_token_types([*[1] * len(vocab), 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(vocab))
    for key, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(path)


@pytest.mark.parametrize(("pre", "text", "pieces"), CUTS, ids=[pre for pre, _, _ in CUTS])
def test_each_kind_cuts_words_its_own_way(tmp_path, pre, text, pieces):
    tokenizer = byte_pairs(tmp_path / "m.gguf", pre, [*ALPHABET, "ab"], ["a b"])
    tokenizer.save(tmp_path)
    cut = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(text)

    assert [text[start:end] for _, (start, end) in cut] == pieces
    assert tokenizer.encode("")[:1] == [257] * SPLITS[pre].begins


def test_no_kind_is_without_a_text_above():
    assert {SPLITS[pre] for pre, _, _ in CUTS} == {splits for splits in SPLITS.values() if not splits.characters}
    assert len(SPLITS) == 90


@pytest.mark.parametrize(
    ("pre", "plainly"),
    [
        ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", *SPLITS["tiny_aya"].patterns[2:])),
        ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        ("afmoe", (r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", *SPLITS["afmoe"].patterns[3:])),
    ],
)
def test_digits_in_threes_are_those_of_the_pattern_that_looks_ahead_from_each(pre, plainly):
    """Which takes the square of the time."""
    ours, theirs = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
        for patterns in (SPLITS[pre].patterns, plainly)
    )
    draw = random.Random(3)
    for _ in range(2000):
        text = "".join(draw.choices("12345678½٣a_ .\n\u0301", k=draw.randint(1, 16)))
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_a_file_that_names_none_is_cut_as_llama_cpp_does_and_that_is_said(tmp_path, caplog):
    with caplog.at_level("WARNING", "headrace"):
        tokenizer = byte_pairs(tmp_path / "old.gguf", None, [*ALPHABET, "12", "123", "1234"], ["1 2", "12 3", "123 4"])

    assert [tokenizer.decode([index]) for index in tokenizer.encode("1234")] == ["123", "4"]
    assert "old.gguf does not name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize("pre", ["made-up", "gpt2", "whitespace", "qwen2 ", 7])
def test_others_are_refused_by_name(tmp_path, pre):
    with pytest.raises(ModelError) as refusal:
        byte_pairs(tmp_path / "m.gguf", pre, ["a", "b", "ab"], ["a b"])
    assert f"m.gguf: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; --tokenizer-path names" in str(
        refusal.value
    )


@pytest.mark.parametrize("model", ["none", "no_vocab", "whitespace", "hybriddna", "x" * 200])
def test_a_file_without_a_tokenizer_or_of_another_kind_is_refused_by_name(tmp_path, model):
    with pytest.raises(ModelError, match=f"tokenizer kind '{model[:70]}.* is not supported; known: bert, ") as refusal:
        byte_pairs(tmp_path / "m.gguf", "gpt-2", ["a"], [], model)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("pre", "begins"), [("gemma4", True), ("granite-embed-multi-311m", True), ("sarvam-moe", False)]
)
def test_byte_pairs_of_characters(tmp_path, pre, begins):
    """Gemma 4's first files say that no bos is added."""
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "▁", "▁a", "\n"]

    tokenizer = byte_pairs(tmp_path / "m.gguf", pre, vocab, ["▁ a"], add_bos_token=False)

    assert tokenizer.encode("a a\nb") == [260] * begins + [256, 258, 259, ord("b")]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_the_file_says_whether_bos_is_added(tmp_path, pre, add):
    tokenizer = byte_pairs(tmp_path / "m.gguf", pre, [*ALPHABET, "ab"], ["a b"], add_bos_token=add)
    assert tokenizer.encode("") == [257] * add
