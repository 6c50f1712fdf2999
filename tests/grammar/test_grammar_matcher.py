"""The mask of one sequence: what may come next, the end of an output, and the way back."""

import functools
import json
import threading

import numpy as np
import pytest

from headrace.errors import ExecutionError
from headrace.grammar import matcher
from headrace.grammar.matcher import LibraryError, Matcher, MatcherTokens, Template
from headrace.grammar.source import library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec, TokenMask
from smollm2_tokenizer import smollm2_tokenizer

SMOLLM2 = smollm2_tokenizer()
SIZE = SMOLLM2.vocab_size + 13  # no multiple of 32
EOS = 2
OTHER_EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["alpha", "beta", "betamax"]},
        "tags": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
INSTANCE = '{"name": "Zoë", "kind": "betamax", "tags": [1, 22]}'


@pytest.fixture(scope="module")
def tokens() -> MatcherTokens:
    vocabulary = Vocabulary.of(SMOLLM2, SIZE, [EOS, OTHER_EOS])
    return MatcherTokens(vocabulary, functools.partial(SMOLLM2.encode, add_special_tokens=False))


@pytest.fixture(scope="module")
def template(tokens: MatcherTokens) -> Template:
    return compiled(tokens, "json_schema", json.dumps(SCHEMA))


def compiled(tokens: MatcherTokens, kind: str, text: str) -> Template:
    return Template(tokens, library_text(GrammarSpec(kind, text, "field")))


def allowed(tokens: MatcherTokens, mask: TokenMask) -> list[int]:
    words = tokens.empty_mask()
    words[:] = -1
    mask.fill(words)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert ids.size == 0 or ids[-1] < SMOLLM2.vocab_size
    return ids.tolist()


def write(mask: TokenMask, text: str) -> None:
    for index in SMOLLM2.encode(text, add_special_tokens=False):
        mask.accept(index)


def follow(tokens: MatcherTokens, mask: TokenMask, text: str) -> None:
    """As the sampler does: a mask before every token, and one after the last."""
    for index in SMOLLM2.encode(text, add_special_tokens=False):
        allowed(tokens, mask)
        mask.accept(index)
    allowed(tokens, mask)


def token(text: str) -> int:
    (index,) = SMOLLM2.encode(text, add_special_tokens=False)
    return index


def test_the_text_of_a_grammar_is_allowed_token_by_token(tokens: MatcherTokens, template: Template):
    mask = template.start()
    for index in SMOLLM2.encode(INSTANCE, add_special_tokens=False):
        assert index in allowed(tokens, mask)
        assert not mask.is_complete
        mask.accept(index)

    assert mask.is_complete
    assert allowed(tokens, mask) == [OTHER_EOS, EOS]


def test_an_output_may_end_only_when_it_is_whole(tokens: MatcherTokens):
    mask = compiled(tokens, "regex", "a{3}").start()
    for _ in range(3):
        assert not {EOS, OTHER_EOS} & set(allowed(tokens, mask))
        assert not mask.is_complete
        with pytest.raises(ExecutionError, match="does not follow the grammar"):
            mask.accept(EOS)
        mask.accept(token("a"))
    assert mask.is_complete


def test_an_output_that_may_go_on_is_not_complete_but_may_end(tokens: MatcherTokens):
    mask = compiled(tokens, "regex", "a*").start()
    for _ in range(4):
        assert {EOS, OTHER_EOS, token("a")} <= set(allowed(tokens, mask))
        assert not mask.is_complete
        mask.accept(token("a"))
    mask.accept(OTHER_EOS)
    assert mask.is_complete
    assert allowed(tokens, mask) == [OTHER_EOS, EOS]


def test_after_the_end_only_the_end_may_follow(tokens: MatcherTokens):
    mask = compiled(tokens, "regex", "ab?").start()
    mask.accept(token("a"))
    mask.accept(EOS)
    with pytest.raises(ExecutionError):
        mask.accept(token("b"))
    mask.accept(EOS)  # a step that was in flight
    mask.rollback(2)

    assert not mask.is_complete
    mask.accept(token("b"))
    assert mask.is_complete


@pytest.mark.parametrize("num_eos", [1, 2])
@pytest.mark.parametrize("grammar, text", [("a{3}", "aaa"), ("a*", "aaa"), ("aaab?", "aaa")])
def test_a_rollback_goes_back_over_the_end(tokens: MatcherTokens, grammar: str, text: str, num_eos: int):
    mask = compiled(tokens, "regex", grammar).start()
    before = []
    for char in text:
        before.append(allowed(tokens, mask))
        mask.accept(token(char))
    whole = allowed(tokens, mask)
    for _ in range(num_eos):
        mask.accept(EOS)

    mask.rollback(num_eos)
    assert allowed(tokens, mask) == whole
    mask.rollback(2)
    assert allowed(tokens, mask) == before[1]
    mask.accept(token("a"))
    mask.accept(token("a"))
    mask.accept(EOS)
    mask.rollback(num_tokens=4)
    assert allowed(tokens, mask) == before[0]
    assert not mask.is_complete


def test_a_refused_token_changes_nothing(tokens: MatcherTokens, template: Template):
    mask = template.start()
    write(mask, '{"name": "Zoë", "kind": "')
    want = allowed(tokens, mask)
    for index in (token("x"), EOS, SIZE - 1, SIZE + 40):
        assert index not in want
        with pytest.raises(ExecutionError, match=f"token {index} does not follow the grammar"):
            mask.accept(index)
        assert allowed(tokens, mask) == want
    mask.rollback(len(SMOLLM2.encode('{"name": "Zoë", "kind": "', add_special_tokens=False)))
    write(mask, INSTANCE)
    assert mask.is_complete


@pytest.mark.parametrize("slow_s", [-1.0, 1000.0], ids=["slow", "fast"])
def test_a_slow_matcher_follows_as_a_fast_one(tokens: MatcherTokens, template: Template, slow_s: float, monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_S", slow_s)
    mask = template.start()
    for _ in range(2):
        for index in SMOLLM2.encode(INSTANCE, add_special_tokens=False):
            assert index in allowed(tokens, mask)
            mask.accept(index)
        assert mask.is_complete
        mask.rollback(len(SMOLLM2.encode(INSTANCE, add_special_tokens=False)))
        assert not mask.is_complete
    allowed(tokens, mask)
    with pytest.raises(ExecutionError):
        mask.accept(token("x"))


@pytest.mark.parametrize("seed", range(6))
def test_going_back_and_starting_again_give_the_same_masks(tokens: MatcherTokens, template: Template, seed: int):
    rng = np.random.default_rng(seed)
    mask, ids, masks = template.start(), [], []
    while len(ids) < 60 and not (ids and ids[-1] in (EOS, OTHER_EOS)):
        masks.append(allowed(tokens, mask))
        ids.append(int(rng.choice(masks[-1])))
        mask.accept(ids[-1])
    for kept in sorted(rng.integers(0, len(ids), 5).tolist(), reverse=True):
        mask.rollback(len(ids) - kept)
        del ids[kept:]
        again = template.start()
        for index in ids:
            again.accept(index)

        assert allowed(tokens, mask) == allowed(tokens, again) == masks[kept]


def test_copies_do_not_know_of_each_other(tokens: MatcherTokens, template: Template):
    first = allowed(tokens, template.start())
    finished = template.start()
    write(finished, INSTANCE)

    assert allowed(tokens, template.start()) == first
    assert finished.is_complete


def test_copies_are_made_and_used_in_many_threads(tokens: MatcherTokens, template: Template):
    ids = SMOLLM2.encode(INSTANCE, add_special_tokens=False)
    wrong = []

    def follow() -> None:
        for _ in range(20):
            mask = template.start()
            for index in ids:
                if index not in allowed(tokens, mask):
                    wrong.append(index)
                mask.accept(index)
            if not mask.is_complete:
                wrong.append(-1)

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


@pytest.mark.parametrize("text", ["start: <[49160]>", 'start: <|im_end|> "x"'], ids=["padding", "an end within"])
def test_a_grammar_that_names_what_is_no_text_allows_nothing(tokens: MatcherTokens, text: str):
    with pytest.raises(LibraryError, match="allows no text of this model"):
        compiled(tokens, "lark", text)


def test_a_grammar_that_allows_nothing_has_no_first_mask(tokens: MatcherTokens):
    with pytest.raises(LibraryError):
        compiled(tokens, "json_schema", '{"$ref": "#"}')


def test_what_the_library_refuses_is_said_in_its_words(tokens: MatcherTokens):
    with pytest.raises(LibraryError) as failed:
        compiled(tokens, "regex", "a(b")
    assert "unclosed" in failed.value.words


def test_a_long_output_is_followed_again_without_its_masks(tokens: MatcherTokens, monkeypatch):
    """The library limits what it spends on tokens between two masks, so there is a mask now and then."""
    grammar = compiled(tokens, "regex", "([a-z]+[0-9]{1,9} ?)*")
    rng = np.random.default_rng(5)
    mask, ids = grammar.start(), []
    while len(ids) < 200:
        ids.append(int(rng.choice(sorted(set(allowed(tokens, mask)) - {EOS, OTHER_EOS}))))
        mask.accept(ids[-1])
    want = allowed(tokens, mask)
    masks_after = []

    def fill(self, words) -> None:
        masks_after.append(self._num_told)
        real(self, words)

    real = Matcher.fill
    monkeypatch.setattr(Matcher, "fill", fill)
    again = grammar.start()
    for index in ids:
        again.accept(index)

    assert masks_after == list(range(16, 200, 16))
    assert allowed(tokens, again) == want


def test_a_grammar_that_becomes_too_complex_fails_from_then_on(tokens: MatcherTokens):
    mask = compiled(tokens, "regex", "secret(a?){3000}a{3000}").start()
    with pytest.raises(ExecutionError) as failed:
        follow(tokens, mask, "secretaaaa")
    assert "cannot be followed after" in failed.value.message
    assert "secret" not in failed.value.message  # neither grammar nor output

    for act in (lambda: allowed(tokens, mask), lambda: mask.accept(token("a")), lambda: mask.rollback(1)):
        with pytest.raises(ExecutionError, match="cannot be followed after"):
            act()
    assert not mask.is_complete


def test_outputs_that_share_a_spent_lexer_fail_instead_of_going_wrong(tokens: MatcherTokens):
    """What one output takes of the library's limits, it takes from all: their masks would be wrong from then on."""
    grammar = compiled(tokens, "regex", "secret(a?){3000}a{3000}|plain[a-z]*")
    beside = grammar.start()
    follow(tokens, beside, "plainly")
    assert not grammar.is_spent
    with pytest.raises(ExecutionError):
        follow(tokens, grammar.start(), "secretaaaa")

    assert grammar.is_spent
    for mask in (beside, grammar.start()):
        with pytest.raises(LibraryError, match="cannot be followed after") as failed:
            allowed(tokens, mask)
        assert "too many expressions" in failed.value.words
        assert not mask.is_complete


def test_a_mask_of_another_size_is_an_error(tokens: MatcherTokens, template: Template):
    with pytest.raises(ValueError):
        template.start().fill(np.zeros(SIZE // 32 - 1, np.int32))
    with pytest.raises(AssertionError):
        template.start().fill(np.zeros(2 * tokens.empty_mask().size, np.int32)[::2])


def test_a_matcher_is_a_token_mask(template: Template):
    mask: TokenMask = template.start()
    assert isinstance(mask, Matcher)
