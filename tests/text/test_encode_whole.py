"""Texts and pairs as an encoder reads them: special tokens, types and cutting, against transformers' fast tokenizers."""

import json

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headrace.errors import RequestError
from headrace.text.tokenizers import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh"), "the", "cat"]
TEXTS = ["", "the cat", "abc cab " * 9, "  the   a ", "x", "[SEP] a", "cat " * 30]


def backend(strategy: str | None = None) -> tokenizers.Tokenizer:
    """A tokenizer of BERT's kind."""
    made = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    if strategy is not None:
        made.enable_truncation(16, strategy=strategy)
    return made


def theirs(texts, most, strategy="longest_first", side="right"):
    """What transformers makes of them."""
    fast = PreTrainedTokenizerFast(tokenizer_object=backend(), truncation_side=side, pad_token="[PAD]")
    cut = {} if most is None else {"truncation": strategy, "max_length": most}
    found = [fast(*((text,) if isinstance(text, str) else text), return_token_type_ids=True, **cut) for text in texts]
    return [(item["input_ids"], item["token_type_ids"]) for item in found]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [None, 3, 8])
def test_texts(most, side):
    assert Tokenizer(backend()).encode_whole(TEXTS, most, side) == theirs(TEXTS, most, side=side)


@pytest.mark.parametrize("most", [None, 5, 8, 13])
def test_pairs(most):
    # transformers takes an empty second text for none.
    pairs = [(a, b) for a in TEXTS for b in TEXTS if b]
    assert Tokenizer(backend()).encode_whole(pairs, most) == theirs(pairs, most)


def test_pairs_and_texts_in_one_call():
    mixed = ["the cat", ("a", "the cat"), "b"]
    assert Tokenizer(backend()).encode_whole(mixed, 4) == theirs(mixed, 4)


def test_a_checkpoint_says_which_text_of_a_pair_is_cut():
    pairs = [("the cat", "abc cab " * 9), ("a", "the " * 20)]
    assert Tokenizer(backend("only_second")).encode_whole(pairs, 9) == theirs(pairs, 9, "only_second")
    with pytest.raises(RequestError, match="cannot be truncated to 9 tokens"):
        Tokenizer(backend("only_second")).encode_whole([("abc cab " * 9, "a")], 9)


def test_what_leaves_no_room_for_a_token_is_refused():
    with pytest.raises(RequestError, match="no room beside the special tokens"):
        Tokenizer(backend()).encode_whole(["the cat"], 2)
    with pytest.raises(RequestError, match="no room"):
        Tokenizer(backend()).encode_whole([("the", "cat")], 3)


def test_text_that_is_not_unicode_is_refused():
    for text in ("a\ud800", ("a", "\ud800")):
        with pytest.raises(RequestError, match="lone surrogate"):
            Tokenizer(backend()).encode_whole([text])


def test_the_settings_of_the_file_are_read_before_they_are_switched_off():
    stated = json.loads(backend("only_second").to_str())["truncation"]
    assert stated["strategy"] == "OnlySecond"
    whole = Tokenizer(backend("only_second")).encode_whole(["cat " * 40])[0]
    assert len(whole[0]) == 42
