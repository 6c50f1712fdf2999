"""Deltas joined are the text of all ids, and no half character is ever shown."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer
from smollm2_tokenizer import smollm2_tokenizer

SMOLLM2 = smollm2_tokenizer()


def sentencepiece_like():
    """Pieces with a leading-space mark, byte fallback, and a decoder that drops the first space, as Llama 2 has."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "é", "世"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def wordpiece():
    """A tokenizer whose tokens change with their place."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", "!", "�", "##�"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


TOKENIZERS = {"byte level": SMOLLM2, "byte fallback": sentencepiece_like(), "word pieces": wordpiece()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_decoded_whole(kind, data, skip):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)

    deltas = [decoder.push(index) for index in ids]

    assert "".join(deltas) + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="aé世界😀👩‍👩‍👧\u0301\n ", max_size=30))
def test_no_replacement_character_is_shown_for_text_that_has_none(text):
    for tokenizer in (SMOLLM2, TOKENIZERS["byte fallback"]):
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoder = IncrementalDecoder(tokenizer)

        deltas = [decoder.push(index) for index in ids]

        assert "�" not in "".join(deltas)
        assert "".join(deltas) + decoder.flush() == text


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=12))
def test_any_bytes_decode_as_utf8_with_replacement(data):
    tokenizer = TOKENIZERS["byte fallback"]
    decoder = IncrementalDecoder(tokenizer, context_ids=[tokenizer.token_to_id("a")])

    text = decoder.extend(byte + 3 for byte in data) + decoder.flush()

    assert text == data.decode(errors="replace")


def test_an_unfinished_character_is_given_only_at_the_end():
    first, *rest = SMOLLM2.encode("世", add_special_tokens=False)
    assert rest  # it really takes several tokens
    decoder = IncrementalDecoder(SMOLLM2)

    assert decoder.push(first) == ""
    assert decoder.flush() == "�"


def test_special_tokens_are_shown_only_when_asked():
    ids = SMOLLM2.encode("<|im_start|>hi<|im_end|>", allow_special=True)

    assert IncrementalDecoder(SMOLLM2).extend(ids) == "hi"
    assert IncrementalDecoder(SMOLLM2, skip_special_tokens=False).extend(ids) == "<|im_start|>hi<|im_end|>"


def test_a_continuation_keeps_its_leading_space():
    tokenizer = TOKENIZERS["byte fallback"]
    word = tokenizer.token_to_id("▁a")

    assert IncrementalDecoder(tokenizer).push(word) == "a"
    assert IncrementalDecoder(tokenizer, context_ids=[word]).push(word) == " a"
    words = TOKENIZERS["word pieces"]
    hello, world = words.token_to_id("hello"), words.token_to_id("world")
    assert IncrementalDecoder(words, context_ids=[hello]).push(world) == " world"


def test_a_character_begun_in_the_prompt_is_completed():
    *begin, last = SMOLLM2.encode("世", add_special_tokens=False)

    assert IncrementalDecoder(SMOLLM2, context_ids=begin).push(last) == "世"


def test_a_decoder_without_fixed_bytes_holds_a_bounded_window():
    tokenizer = TOKENIZERS["word pieces"]
    decoder = IncrementalDecoder(tokenizer)
    bad = tokenizer.token_to_id("##�")

    deltas = [decoder.push(bad) for _ in range(200)]

    assert sum(map(bool, deltas)) >= 6
    assert "".join(deltas) + decoder.flush() == tokenizer.decode([bad] * 200)
