"""Text and the tokens that it comes from: pieces join to the text, and marks stand where their tokens were."""

import random

import pytest
from fake_frontend import byte_tokenizer

from headrace.parsers.base import Piece
from headrace.server.chat.choice_stream import TokenPieces
from headrace.text.incremental import IncrementalDecoder
from headrace.text.stop import HoldBack
from headrace.text.tokenizers import Tokenizer

MARK = "<|user|>"
ALPHABET = ["a", "b", " ", "ö", "🙂", "STOP", "ST", MARK]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def ids_of(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    mark = tokenizer.special_tokens[MARK]
    return [token_id for part in parts for token_id in ([mark] if part == MARK else tokenizer.encode(part, False))]


def cut(items: list[int], chance: random.Random) -> list[list[int]]:
    """Runs of one to six items."""
    runs = []
    while items:
        count = chance.randint(1, 6)
        runs.append(items[:count])
        items = items[count:]
    return runs


@pytest.mark.parametrize("skips_special", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_pieces_join_to_the_text_and_marks_stand_in_their_places(tokenizer: Tokenizer, seed: int, skips_special: bool):
    chance = random.Random(seed)
    parts = chance.choices(ALPHABET, k=chance.randint(0, 12))
    mark = tokenizer.special_tokens[MARK]
    ids = ids_of(tokenizer, parts)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skips_special)
    hold_back = HoldBack(["STOP"])
    pieces = TokenPieces(tokenizer, frozenset({mark}), [], skip_special_tokens=skips_special)
    found: list[Piece] = []
    for run in cut(ids, chance):
        found += pieces.push(run, hold_back.push(decoder.extend(run)), is_last=False)
    found += pieces.push([], hold_back.held + decoder.flush(), is_last=True)
    shown = "".join(MARK if piece.token_id == mark else piece.text for piece in found)
    assert shown == "".join(parts)
    assert [piece.token_id for piece in found if piece.token_id >= 0] == ids
    assert all(not piece.text for piece in found if piece.token_id == mark)


def test_what_a_stop_string_cuts_is_not_given(tokenizer: Tokenizer):
    mark = tokenizer.special_tokens[MARK]
    pieces = TokenPieces(tokenizer, frozenset({mark}), [])
    ids = ids_of(tokenizer, ["a", "b", "STOP", MARK])
    assert "".join(piece.text for piece in pieces.push(ids[:3], "ab", is_last=False)) == "ab"
    assert pieces.push(ids[3:], "", is_last=True) == []


def test_a_mark_after_the_last_text_is_given(tokenizer: Tokenizer):
    mark = tokenizer.special_tokens[MARK]
    pieces = TokenPieces(tokenizer, frozenset({mark}), [])
    assert pieces.push(ids_of(tokenizer, ["a", MARK]), "a", is_last=True) == [Piece("a", 64), Piece("", mark)]


def test_a_mark_that_is_text_waits_until_its_text_is_whole(tokenizer: Tokenizer):
    mark = tokenizer.special_tokens[MARK]
    pieces = TokenPieces(tokenizer, frozenset({mark}), [], skip_special_tokens=False)
    assert pieces.push([mark], "<|us", is_last=False) == []
    assert pieces.push([], "er|>", is_last=False) == [Piece("", mark)]
    assert pieces.push([mark], "<|u", is_last=True) == [Piece("<|u")], "a stop string cut it"
