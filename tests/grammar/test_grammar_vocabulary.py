"""Tokens as bytes: what the client sees is what the grammar describes, written as the model itself would write it."""

import functools

import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headrace.errors import ConfigError
from headrace.grammar.matcher import Matcher, MatcherTokens, Template
from headrace.grammar.source import library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec
from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer
from smollm2_tokenizer import smollm2_tokenizer

SMOLLM2 = smollm2_tokenizer()
NUM_PADDED = 77
SIZE = SMOLLM2.vocab_size + NUM_PADDED
END_OF_TEXT, IM_START, IM_END = 0, 1, 2


def plain(tokenizer: Tokenizer):
    return functools.partial(tokenizer.encode, add_special_tokens=False)


@functools.cache
def smollm2_tokens() -> MatcherTokens:
    return MatcherTokens(Vocabulary.of(SMOLLM2, SIZE, [IM_END, END_OF_TEXT]), plain(SMOLLM2))


def matcher(tokens: MatcherTokens, kind: str, text: str) -> Matcher:
    return Template(tokens, library_text(GrammarSpec(kind, text, "field"))).start()


def allowed(tokens: MatcherTokens, mask: Matcher) -> set[int]:
    words = tokens.empty_mask()
    mask.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def forced(tokens: MatcherTokens, mask: Matcher) -> list[int]:
    """The only output of a grammar that has just one; where several tokens begin it, the smallest id."""
    ids = []
    while not mask.is_complete:
        ids.append(min(allowed(tokens, mask)))
        mask.accept(ids[-1])
    return ids


def sentencepiece_like() -> Tokenizer:
    """Begins a text with a space and drops the first space when it decodes, as Llama 2 does. "▁" is a token of its own, and "▁a" is one."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "abab",
    ]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("ab", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "[SEP]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


def test_ids_are_padded_to_the_logits_and_what_ends_an_output_is_no_text():
    vocabulary = Vocabulary.of(SMOLLM2, SIZE, [IM_END, END_OF_TEXT, IM_END, SIZE + 5])

    assert vocabulary.size == len(vocabulary.tokens) == SIZE
    assert vocabulary.eos_ids == [END_OF_TEXT, IM_END]
    assert vocabulary.special_ids == sorted(SMOLLM2.special_ids)
    assert b"".join(vocabulary.tokens[index] for index in SMOLLM2.encode("ein Café")) == "ein Café".encode()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vocabulary), type=Vocabulary) == vocabulary


def test_an_end_that_the_tokenizer_takes_for_text_is_special():
    text_token = SMOLLM2.token_to_id("a")

    vocabulary = Vocabulary.of(SMOLLM2, SIZE, [text_token])

    assert text_token in vocabulary.special_ids
    tokens = MatcherTokens(vocabulary)
    assert text_token not in allowed(tokens, matcher(tokens, "regex", "ab"))


def test_logits_may_be_fewer_than_tokens():
    vocabulary = Vocabulary.of(SMOLLM2, 1000, [IM_END])
    tokens = MatcherTokens(vocabulary, plain(SMOLLM2))

    assert vocabulary.size == 1000
    ids = forced(tokens, matcher(tokens, "regex", "incomprehensibilities"))
    assert max(ids) < 1000
    assert SMOLLM2.decode(ids) == "incomprehensibilities"


def test_tokens_that_depend_on_their_place_are_refused():
    with pytest.raises(ConfigError, match="no fixed bytes per token"):
        Vocabulary.of(wordpiece(), 4, [3])


def test_a_model_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        Vocabulary.of(SMOLLM2, SIZE, [])


class OddTokens:
    """A tokenizer with bytes that no text contains."""

    fixed_bytes = True
    vocab_size = 5
    special_ids = frozenset({4})

    def vocabulary_bytes(self) -> list[bytes]:
        return [b"a", b"\xff", b"\xff[0]", b"", b"<end>"]


def test_ids_without_text_are_never_allowed():
    tokens = MatcherTokens(Vocabulary.of(OddTokens(), 40, [4]))

    assert allowed(tokens, matcher(tokens, "regex", "(.|\n)*")) == {0, 4}
    assert allowed(tokens, matcher(tokens, "lark", 'start: "a" | <[1-39]>')) == {0}


def test_no_special_token_and_no_padding_is_ever_text():
    tokens = smollm2_tokens()
    anything = allowed(tokens, matcher(tokens, "regex", "(.|\n)*"))

    assert len(anything) > 40_000
    assert max(anything) < SMOLLM2.vocab_size
    assert anything & SMOLLM2.special_ids == {END_OF_TEXT, IM_END}  # "" is a whole output
    assert not allowed(tokens, matcher(tokens, "regex", "(.|\n)+")) & SMOLLM2.special_ids


@pytest.mark.parametrize("text", ["<|im_end|>", "<|endoftext|>x", '"<|im_start|>"'])
def test_the_text_of_a_special_token_is_written_with_ordinary_tokens(text: str):
    tokens = smollm2_tokens()

    ids = forced(tokens, matcher(tokens, "choice", f'["{text}"]'.replace('""', '"')))

    assert not set(ids) & SMOLLM2.special_ids
    assert text.strip('"') in SMOLLM2.decode(ids)


def test_what_is_certain_is_written_in_the_tokens_of_the_model():
    tokens = smollm2_tokens()
    text = '{"temperature_celsius": "unbelievable", "größe": 1234567}'

    ids = forced(tokens, matcher(tokens, "regex", text.replace("{", "\\{").replace("}", "\\}")))

    assert ids == SMOLLM2.encode(text, add_special_tokens=False)


def test_without_the_model_s_own_tokens_the_text_is_the_same():
    tokens = MatcherTokens(Vocabulary.of(SMOLLM2, SIZE, [IM_END]))

    ids = forced(tokens, matcher(tokens, "regex", "größe temperature"))

    assert SMOLLM2.decode(ids) == "größe temperature"


@pytest.mark.parametrize("wrong", [[], [5], [1, 1, 1], [20_000]], ids=str)
def test_an_encoder_that_writes_something_else_is_not_believed(wrong: list[int]):
    tokens = MatcherTokens(Vocabulary.of(SMOLLM2, SIZE, [IM_END]), lambda text: wrong)

    ids = forced(tokens, matcher(tokens, "regex", "grün temperature"))

    assert SMOLLM2.decode(ids) == "grün temperature"


def test_a_long_certain_text_is_not_encoded_again_for_every_token():
    lengths = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return SMOLLM2.encode(text, add_special_tokens=False)

    tokens = MatcherTokens(Vocabulary.of(SMOLLM2, SIZE, [IM_END]), encode)
    text = "".join(f"line {number} of a long text, " for number in range(200))

    ids = forced(tokens, matcher(tokens, "choice", f'["{text}"]'))

    assert text in SMOLLM2.decode(ids)
    longest = max(map(len, Vocabulary.of(SMOLLM2, SIZE, [IM_END]).tokens))
    assert 0 < max(lengths) <= 4 * longest + 1 < len(text)


@pytest.mark.parametrize("text", ["ab", "abab ab", " ab", "  a", "ä b", "\na"])
def test_a_tokenizer_that_begins_with_a_space_writes_just_the_text(text: str):
    tokenizer = sentencepiece_like()
    tokens = MatcherTokens(Vocabulary.of(tokenizer, tokenizer.vocab_size, [2]), plain(tokenizer))

    ids = forced(tokens, matcher(tokens, "regex", text))

    # The output continues a prompt, so its first space is shown.
    decoder = IncrementalDecoder(tokenizer, context_ids=[tokenizer.token_to_id("b")])
    assert decoder.extend(ids) + decoder.flush() == text


def test_a_tokenizer_that_begins_with_a_space_uses_its_long_tokens():
    tokenizer = sentencepiece_like()
    tokens = MatcherTokens(Vocabulary.of(tokenizer, tokenizer.vocab_size, [2]), plain(tokenizer))

    ids = forced(tokens, matcher(tokens, "regex", "abab ab"))

    assert [tokenizer.id_to_token(index) for index in ids] == ["abab", "▁ab"]


def test_text_that_the_model_cannot_write_is_not_allowed():
    tokens = smollm2_tokens()  # no token has the byte 0xF1, with which U+40000 begins

    assert allowed(tokens, matcher(tokens, "regex", "(\U00040000|b)")) == {SMOLLM2.token_to_id("b")}
