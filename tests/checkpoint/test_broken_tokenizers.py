"""GGUF tokenizers with wrong metadata, folders with wrong companions: a tokenizer that encodes, or one line; never another error, or an abort."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from headrace.errors import ModelError
from headrace.text.tokenizers import Tokenizer, load_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a", *BYTES]
TYPES = [2, 3, 3, 1, 1, 1, 1, 1, *[6] * 256]
GOOD: dict[str, Any] = {
    "tokens": TOKENS,
    "token_type": TYPES,
    "scores": [-float(index) for index in range(len(TOKENS))],
    "merges": ["a b", "▁ a"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
    "cls_token_id": 1,
    "seperator_token_id": 2,
    "add_bos_token": True,
    "add_eos_token": True,
}
KINDS = ("gpt2", "gemma4", "llama", "t5", "bert", "plamo2", "rwkv")
ODD = ("$A", "$B:1", "a:1", ":", " ", "<s> ", "\\", "(", "\ud7ff", "\u0000", "a" * 5000)
WRONG: list[dict[str, Any]] = [
    *({key: None} for key in GOOD),
    *({key: GOOD[key][:-1]} for key in ("tokens", "token_type", "scores")),
    *({key: [*GOOD[key], GOOD[key][0]]} for key in ("tokens", "token_type", "scores")),
    *({key: "x"} for key in ("tokens", "token_type", "scores", "merges")),
    *({key: [1.5, 2.5]} for key in ("tokens", "token_type", "merges")),
    *({key: 2**40} for key in GOOD),
    *({key: -1} for key in GOOD),
    *({key: len(TOKENS)} for key in GOOD),
    {"tokens": ["a"] * len(TOKENS)},
    {"tokens": [""] * len(TOKENS)},
    {"tokens": [*TOKENS[:-1], ""]},
    *({"tokens": [TOKENS[0], odd, *TOKENS[2:]]} for odd in ODD),
    *({"tokens": [*TOKENS[:2], odd, *TOKENS[3:]]} for odd in ODD),
    *({"token_type": [kind] * len(TOKENS)} for kind in (0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1)),
    *({"scores": [value] * len(TOKENS)} for value in (0.0, 1.5, -1e38, float("nan"), float("inf"), -float("inf"))),
    *({"merges": [merge]} for merge in ("", " ", "  ", "a", "a ", " a", "a  b", "a b ", "x y", "a a", "b a", "<s> a")),
    {"merges": ["a b"] * 50},
    *({"precompiled_charsmap": value} for value in ("x", 7, [7], [2**31 - 1] * 9, [0] * 9)),
    *({"normalizer.lowercase": value} for value in ("x", 7)),
    *({"pre": value} for value in ("", "x", 7, ["llama-bpe"], "llama-bpe", "superbpe", "gemma4", "whitespace")),
    *({"add_space_prefix": value, "remove_extra_whitespaces": value} for value in ("x", 7, True, False)),
]  # fmt: skip


def write(path, kind: str, metadata: dict[str, Any]):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    kinds = {str: "string", bool: "bool", int: "int64", float: "float32", list: "array"}
    for key, value in metadata.items():
        if value is not None:
            getattr(writer, f"add_{kinds[type(value)]}")(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def found(file: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or why there is none. One that finds and decodes tokens only takes whatever the whole one takes."""
    try:
        tokenizer = load_tokenizer(file)
    except ModelError as error:
        return None, error.message
    for one in (tokenizer, load_tokenizer(file, encodes=False)):
        one.decode(range(-1, tokenizer.vocab_size + 1))
    return tokenizer, ""


@pytest.mark.parametrize("kind", KINDS)
def test_any_wrong_metadata_make_a_tokenizer_or_one_line(kind, tmp_path):
    good = dict(GOOD)
    if kind == "rwkv":
        good["tokens"] = [*TOKENS[:8], *(repr(bytes([byte]))[2:-1] for byte in range(256))]
        good["tokens"][4:6] = ["aa", "bb"]  # which are bytes, too
        good["token_type"] = [*TYPES[:8], *[1] * 256]
    good |= {"pre": "gpt-2"}
    assert load_tokenizer(write(tmp_path / "m.gguf", kind, good)).encode("a b", add_special_tokens=False)
    refused = 0
    for wrong in WRONG:
        file = write(tmp_path / "m.gguf", kind, good | wrong)
        tokenizer, line = found(file)
        if tokenizer is None:
            refused += 1
            assert "m.gguf" in line, wrong
            assert "\n" not in line, wrong
            assert len(line) < 400, wrong
            continue
        for text in ("", "a b ab é\n", "</s>$A<s>a:1 <unk>", "a" * 300):
            for special in (False, True):
                ids = tokenizer.encode(text, allow_special=special)
                assert all(0 <= index < tokenizer.vocab_size for index in ids), (wrong, text)
                tokenizer.decode(ids)
    assert refused > 10


HALF = "\ud800"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": HALF}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": HALF}}}),
        ("tokenizer_config.json", {"chat_template": HALF}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": HALF}]}),
        ("special_tokens_map.json", {"additional_special_tokens": [HALF]}),
        ("chat_template.json", {"chat_template": HALF}),
    ],
)
def test_a_folder_with_half_of_a_surrogate_pair_is_refused_in_words(file, content, tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 1
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match="surrogate"):
        load_tokenizer(tmp_path)
