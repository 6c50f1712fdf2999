"""Tokenizers of the kinds t5, rwkv and plamo2 in GGUF files: the ids of sentencepiece and of llama.cpp's llama-tokenize."""

import io
import os
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers

from headrace.errors import ModelError
from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Vocabulary = list[tuple[str, int, float]]  # text, type, score

DECOMPOSED = [
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "e\u0301\u0323 cafe\u0301",
    "\ufb01\u0301n",
    "\uff33at \u2460",
    "a\u0300\u0300",
]
TEXTS = [
    "", " ", "   ", "the cat sat on the mat", "  two  spaces\tand\ttabs\r\nand lines\n\n\n", "trailing  ", "naïve café", "cat<s>sat </s>",
    "世界 hello", "\x00\x01 \x7f", "👩‍👩‍👧 ok", "\ufeffthe\u200bcat", "▁the▁cat", *DECOMPOSED, "the cat " * 300, "\u0300" * 80,
]  # fmt: skip


def write(path: Path, kind: str, vocabulary: Vocabulary, name: str = "m", **metadata: Any) -> Path:
    """A GGUF file with nothing but a tokenizer, which llama-tokenize reads, too."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    for key, value in {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 64,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([text for text, _, _ in vocabulary])
    writer.add_token_types([number for _, number, _ in vocabulary])
    writer.add_token_scores([score for _, _, score in vocabulary])
    for key, value in metadata.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bytes):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@cache
def unigram(add_prefix: bool = True, merge_spaces: bool = True) -> sentencepiece.SentencePieceProcessor:
    """A small trained unigram model with the normalizer of T5 and XLM-RoBERTa."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["the cat sat on the mat", "a naïve café in the world", "hello hello world 123 456"] * 20
        ),
        model_writer=model,
        model_type="unigram",
        vocab_size=60,
        add_dummy_prefix=add_prefix,
        remove_extra_whitespaces=merge_spaces,
        normalization_rule_name="nmt_nfkc",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@cache
def charsmap() -> bytes:
    proto = sentencepiece_model_pb2.ModelProto.FromString(unigram().serialized_model_proto())
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def t5_file(path: Path) -> Path:
    pieces = [
        "▁",
        "▁the",
        "▁c",
        "at",
        "a",
        "t",
        "c",
        "s",
        "▁s",
        "▁<",
        "<",
        "s>",
        ">",
        "h",
        "e",
        "he",
        "é",
        "한",
        "f",
        "i",
        "n",
        "▁fi",
    ]
    vocabulary: Vocabulary = [
        ("<pad>", CONTROL, 0.0),
        ("</s>", CONTROL, 0.0),
        ("<unk>", UNKNOWN, 0.0),
        ("<s>", CONTROL, 0.0),
    ]
    vocabulary += [(piece, NORMAL, -2.0 - 0.375 * index) for index, piece in enumerate(pieces)]
    vocabulary += [("<tool>", USER, 0.0), ("[PAD27]", UNUSED, -10000.0)]
    ids = {"bos_token_id": 3, "eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0}
    return write(
        path,
        "t5",
        vocabulary,
        **ids,
        add_bos_token=True,
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=charsmap(),
    )


def rwkv_file(path: Path) -> Path:
    words = [
        b"th",
        b"the",
        b" the",
        b" cat",
        b"  ",
        b"    ",
        b"\n\n",
        "世界".encode(),
        "世".encode()[:2],
        b"\\x41",
        b"'s",
        b"<s",
        b" \xf0\x9f",
    ]
    tokens = [bytes([byte]) for byte in range(256)] + words
    vocabulary: Vocabulary = [("<s>", CONTROL, 0.0), *((repr(token)[2:-1], NORMAL, 0.0) for token in tokens)]
    vocabulary += [("[PAD270]", UNUSED, 0.0), ("<|user|>", USER, 0.0)]
    return write(path, "rwkv", vocabulary, bos_token_id=0, eos_token_id=0, add_bos_token=True)


def plamo_file(path: Path) -> Path:
    pieces = {"t": -6.5, "th": -5.25, "the": -4.0, " the": -4.5, "he": -5.0, "e": -5.0, " ": -3.0, "  ": -5.0, "a": -5.5, "at": -6.0, "cat": -7.0,
              " c": -6.25, "c": -6.0, "ab": -4.0, "ba": -4.0, "b": -4.0, "世界": -9.0, "\n": -3.5, "\ufeff": -4.0}  # fmt: skip
    special = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>"]
    vocabulary: Vocabulary = [(text, CONTROL if index else UNKNOWN, 0.0) for index, text in enumerate(special)]
    vocabulary += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    vocabulary += [(text, NORMAL, score) for text, score in pieces.items()]
    vocabulary += [("[PAD1]", UNUSED, -1000.0)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 3, "unknown_token_id": 0, "eot_token_id": 4}
    return write(path, "plamo2", vocabulary, **ids, add_bos_token=True, add_space_prefix=False)


FILES = {"t5": t5_file, "rwkv": rwkv_file, "plamo2": plamo_file}


@pytest.mark.parametrize(("add_prefix", "merge_spaces"), [(True, True), (True, False), (False, False)])
def test_unigram_pieces_are_those_of_sentencepiece(tmp_path, add_prefix, merge_spaces):
    oracle = unigram(add_prefix, merge_spaces)
    vocabulary: Vocabulary = []
    for index in range(oracle.vocab_size()):
        kind = UNKNOWN if oracle.is_unknown(index) else CONTROL if oracle.is_control(index) else NORMAL
        vocabulary.append((oracle.id_to_piece(index), kind, oracle.get_score(index)))
    file = write(
        tmp_path / "m.gguf",
        "t5",
        vocabulary,
        unknown_token_id=0,
        eos_token_id=2,
        add_space_prefix=add_prefix,
        remove_extra_whitespaces=merge_spaces,
        precompiled_charsmap=charsmap(),
    )
    tokenizer = load_tokenizer(file)

    # Of spaces alone sentencepiece puts one more before them; llama.cpp does not.
    for text in TEXTS if merge_spaces else [text for text in TEXTS if text.strip(" ")]:
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text), text
        assert tokenizer.encode(text) == [*oracle.encode(text), 2], text
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"


# Recorded from `llama-tokenize` of llama.cpp (llama_cpp_python 0.3.36) on these files: ids without and with special tokens parsed. None: llama.cpp
# reads the text of a special token as that token although it was told not to; a user's text never becomes one here.
RECORDED: dict[str, list[tuple[str, list[int] | None, list[int]]]] = {
    "t5": [
        ("the cat", [5, 6, 7], [5, 6, 7]),
        ("  the  <s>", [5, 13, 15], [5, 3]),
        ("<s>the</s>", [13, 15, 9, 19, 14, 2, 15], [3, 5, 1]),
        ("a<tool>cat ", [4, 8, 26, 6, 7], [4, 8, 26, 6, 7]),
        ("\uff1c\uff53\uff1e", [13, 15], [13, 15]),
        ("\u1112\u1161\u11ab e\u0301", [4, 21, 4, 20], [4, 21, 4, 20]),
        ("\ufb01n xyz", [25, 24, 4, 2], [25, 24, 4, 2]),
        ("<s", [13, 11], [13, 11]),
        ("世<s>世", [4, 2, 14, 15, 2], [4, 2, 3, 4, 2]),
        ("[PAD27]", [4, 2], [4, 2]),
    ],
    "rwkv": [
        ("the cat\n\n", [258, 260, 263], [258, 260, 263]),
        ("  the     cat", [261, 258, 262, 260], [261, 258, 262, 260]),
        ("世界世", [264, 265, 151], [264, 265, 151]),
        ("\\x41A's", [266, 66, 267], [266, 66, 267]),
        ("<s>the", None, [0, 258]),
        ("[PAD270]<|user|>", [270, 271], [270, 271]),
        (" \U0001f600", [269, 153, 129], [269, 153, 129]),
        ("\x00\xff", [1, 196, 192], [1, 196, 192]),
    ],
    "plamo2": [
        ("the cat", [263, 267, 271], [263, 267, 271]),
        ("\ufeffthe\ufeff", [263, 279], [263, 279]),
        ("aba", [274, 269], [274, 269]),
        ("世界世\n", [277, 233, 189, 155, 278], [277, 233, 189, 155, 278]),
        ("<|plamo:bos|>the", None, [1, 263]),
        ("<0x41>[", [65, 53, 125, 57, 54, 67, 96], [65, 53, 125, 57, 54, 67, 96]),
        ("  the", [267, 264], [267, 264]),
        ("\U0001f600\xe9", [245, 164, 157, 133, 200, 174], [245, 164, 157, 133, 200, 174]),
    ],
}


@pytest.fixture(params=sorted(FILES))
def tokenizer(request, tmp_path) -> tuple[str, Tokenizer]:
    return request.param, load_tokenizer(FILES[request.param](tmp_path / "m.gguf"))


def test_ids_are_those_of_llama_cpp(tokenizer):
    kind, ours = tokenizer
    for text, plain, special in RECORDED[kind]:
        if plain is not None:
            assert ours.encode(text, add_special_tokens=False) == plain, text
        assert ours.encode(text, add_special_tokens=False, allow_special=True) == special, text
        assert ours.encode(text, allow_special=True) == ([3, *special, 1] if kind == "t5" else special), text


def test_users_never_make_special_tokens(tokenizer):
    kind, ours = tokenizer
    for special in ours.special_tokens:
        for text in (special, f"cat{special} {special}the", f"{special}" * 3):
            unknown = {2} if kind == "t5" else set()
            assert not (set(ours.encode(text, add_special_tokens=False)) & ours.special_ids) - unknown, text


def test_nor_the_token_that_ends_a_text_where_the_file_has_it_as_user_defined(tmp_path):
    """As Phi 3's files do with `</s>`."""
    vocabulary: Vocabulary = [("<unk>", UNKNOWN, 0.0), ("</s>", USER, 0.0), *((char, NORMAL, -1.0) for char in "</s>a")]
    ours = load_tokenizer(
        write(tmp_path / "m.gguf", "llama", vocabulary, eos_token_id=1, unknown_token_id=0, add_space_prefix=False)
    )

    assert ours.encode("a</s>") == [6, 2, 3, 4, 5]
    assert ours.encode("a</s>", allow_special=True) == [6, 1]


@pytest.mark.parametrize(("name", "kept"), [("Phi-3 mini", 0), ("phi3", 0), ("Llama", 1)])
def test_special_tokens_of_phi_3_take_the_spaces_after_them(tmp_path, name, kept):
    """The format does not say so; llama.cpp goes by the name of the model."""
    vocabulary: Vocabulary = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("<|user|>", CONTROL, 0.0)]
    vocabulary += [("\n", NORMAL, -1.0), ("a", NORMAL, -1.0)]
    file = write(tmp_path / "m.gguf", "llama", vocabulary, name, unknown_token_id=0, add_space_prefix=False)

    ids = load_tokenizer(file).encode("<s>\n<|user|>\na", allow_special=True)

    assert ids == [1, 3, 2, *[3] * kept, 4]


@pytest.mark.parametrize(
    ("stated", "ids"),
    [
        ({"normalizer.lowercase": True}, [4]),
        ({"normalizer.lowercase": False}, [5]),
        ({"normalizer.lowercase": True, "normalizer.strip_accents": False}, [2]),
        ({"normalizer.lowercase": False, "normalizer.strip_accents": True}, [3]),
    ],
)
def test_a_file_says_how_word_pieces_are_normalised(tmp_path, stated, ids):
    vocabulary: Vocabulary = [("[CLS]", CONTROL, 0.0), ("[SEP]", CONTROL, 0.0), ("[UNK]", UNKNOWN, 0.0)]
    vocabulary += [(text, NORMAL, 0.0) for text in ("▁E", "▁e", "▁É")]
    file = write(tmp_path / "m.gguf", "bert", vocabulary, **stated)

    assert load_tokenizer(file).encode("É", add_special_tokens=False) == ids


@pytest.mark.parametrize("falls_back", [False, True])
def test_nor_do_users_of_a_unigram_tokenizer_in_a_folder(tmp_path, falls_back):
    """The library's unigram model finds special tokens as it finds any piece, and `<s>` scores best of all."""
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("▁", -2.0),
        ("a", -2.5),
        ("<", -3.0),
        ("s", -3.25),
        (">", -4.0),
        ("▁<", -4.5),
        ("s>", -7.0),
    ]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] if falls_back else []
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, falls_back))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)

    assert ours.encode("<s>a") == [7, 8, 3]
    assert ours.encode("<s>a", allow_special=True) == [1, 2, 3]
    sign = [9 + byte for byte in "é".encode()] if falls_back else [0]
    assert ours.encode("éé<s> é") == [2, *sign, *(sign if falls_back else []), 4, 8, 2, *sign]


def test_texts_come_back_token_by_token(tokenizer):
    kind, ours = tokenizer
    for text in ("the cat", " the   cat\n", "世界 é 👩‍👩‍👧 x", "a▁b <0x41>"):
        ids = ours.encode(text, add_special_tokens=False)
        decoder = IncrementalDecoder(ours, skip_special_tokens=False)
        pieces = [decoder.push(index) for index in ids]
        assert "".join([*pieces, decoder.flush()]) == ours.decode(ids, skip_special_tokens=False)
        if kind != "t5":
            assert ours.decode(ids) == text
    assert ours.decode(ours.encode("the cat")) == "the cat"
    assert ours.fixed_bytes


def test_the_place_of_a_token_in_the_text_is_known(tmp_path):
    """Also where characters were replaced by fewer or more, or left out."""
    ours = load_tokenizer(t5_file(tmp_path / "m.gguf"))
    text = "cat \ufb01n\u200b \u1112\u1161\u11ab\u0007 the"
    assert [ours.beginnings([text], most)[0] for most in (1, 2, 3, 4, 6)] == [
        "c", "cat", "cat \ufb01", "cat \ufb01n", "cat \ufb01n\u200b \u1112\u1161\u11ab",
    ]  # fmt: skip


def test_long_texts_take_time_in_proportion(tokenizer):
    """Slices of a text are cut by halves: 100,000 characters are no more than a moment."""
    _, ours = tokenizer
    once = ours.encode("the cat\n", add_special_tokens=False)
    assert len(ours.encode("the cat\n" * 10_000, add_special_tokens=False)) >= 10_000 * (len(once) - 1)


def test_what_cannot_be_a_tokenizer_is_refused(tmp_path):
    def refused(name: str, kind: str, vocabulary: Vocabulary, **metadata: Any) -> str:
        with pytest.raises(ModelError) as error:
            load_tokenizer(write(tmp_path / f"{name}.gguf", kind, vocabulary, **metadata))
        return str(error.value)

    pieces: Vocabulary = [("<unk>", UNKNOWN, 0.0), ("a", NORMAL, -1.0)]
    assert "lacks tokens of single bytes" in refused("a", "rwkv", pieces)
    assert "lacks tokens of single bytes" in refused("b", "plamo2", pieces)
    assert "no unknown token" in refused("c", "t5", pieces)
    assert "not a number" in refused("d", "t5", [("a", NORMAL, float("nan"))], unknown_token_id=0)
    for broken in (b"\x01", b"\xff\xff\xff\x7f" * 4):
        assert "precompiled_charsmap is broken" in refused(
            "e", "t5", pieces, unknown_token_id=0, precompiled_charsmap=broken
        )
    assert "known: bert, gemma4, gpt2, llama, plamo2, rwkv, t5" in refused("f", "whitespace", pieces)


@pytest.mark.parametrize("size", [1, 3, 64, 300])
def test_a_charsmap_of_noise_does_no_harm(tmp_path, size):
    noise = bytes((index * 7919 + index * index * 31) % 256 for index in range(size * 4))
    pieces: Vocabulary = [("<unk>", UNKNOWN, 0.0), ("a", NORMAL, -1.0), ("▁", NORMAL, -1.0)]
    charsmap = (size * 4).to_bytes(4, "little") + noise + b"x\0y"
    ours = load_tokenizer(write(tmp_path / "m.gguf", "t5", pieces, unknown_token_id=0, precompiled_charsmap=charsmap))

    for text in TEXTS:
        assert set(ours.encode(text, add_special_tokens=False)) <= {0, 1, 2}


def test_a_kind_that_tokenizer_json_has_not_cannot_be_saved(tokenizer, tmp_path):
    with pytest.raises(ModelError, match=r"cannot be written as tokenizer\.json"):
        tokenizer[1].save(tmp_path)


XLM_ROBERTA: dict[str, list[int]] = {
    "": [0, 2],
    "Hello World!": [0, 35378, 6661, 38, 2],
    "  two  spaces\tand\nlines ": [0, 6626, 32628, 7, 136, 124519, 2],
    "na\xefve cafe\u0301 e\u0301\u0302": [0, 24, 9392, 272, 26216, 393, 245914, 2],
    "\u1112\u1161\u11ab\u1100\u1173\u11af": [0, 170252, 2],
    "\u4e16\u754c \uff21\uff22\uff23": [0, 6, 3221, 47457, 2],
    "\uff1c\uff53\uff1e<s>": [0, 4426, 7, 74047, 7, 2740, 2],
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 3.14e-10": [
        0,
        6,
        244785,
        6,
        244785,
        6,
        245719,
        1031,
        2592,
        13,
        9193,
        2,
    ],
    "\x00a\u200bb": [0, 6, 3, 11, 876, 2],
    "[PAD250001]": [0, 378, 116908, 2588, 188735, 268, 2],
}

# --- llama.cpp's own vocabularies, where GGML_VOCABULARIES names its folder `models`

VOCABULARIES = os.environ.get("GGML_VOCABULARIES", "")


@pytest.mark.skipif(not VOCABULARIES, reason="GGML_VOCABULARIES is not set")
def test_vocabularies_of_llama_cpp_give_the_ids_recorded_beside_them():
    """`.inp` has texts, `.out` their ids."""
    found = 0
    for out in sorted(Path(VOCABULARIES).glob("ggml-vocab-*.gguf.out")):
        texts = out.with_suffix(".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        ids = [[int(index) for index in line.split()] for line in out.read_text().splitlines()]
        ours = load_tokenizer(out.with_suffix(""))
        found += 1
        # Qwen's own tokenizer composes characters first; llama.cpp does not.
        composes = "qwen" in out.name
        for text, want in zip(texts, ids, strict=False):
            if composes and not unicodedata.is_normalized("NFC", text):
                continue
            assert ours.encode(text, add_special_tokens=False) == want, (out.name, text)
    assert found


@pytest.mark.skipif(not VOCABULARIES, reason="GGML_VOCABULARIES is not set")
def test_the_vocabulary_of_xlm_roberta_gives_the_ids_of_llama_tokenize():
    ours = load_tokenizer(Path(VOCABULARIES) / "ggml-vocab-nomic-bert-moe.gguf")
    for text, want in XLM_ROBERTA.items():
        assert ours.encode(text) == want, text
