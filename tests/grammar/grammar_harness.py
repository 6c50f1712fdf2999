"""Matchers over SmolLM2's vocabulary, without a model: do they take a text, and what do they write when the choice is random?"""

import json
import random
from functools import cache

import llguidance
import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.grammar.source import explain, library_text
from headrace.grammar.vocabulary import parser_limits
from headrace.messages.grammar import GrammarKind, GrammarSpec
from smollm2_tokenizer import smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()


class _Vocabulary:
    is_tokenizer_wrapper = True
    eos_token_id = TOKENIZER.eos_ids[0]
    bos_token_id = None
    special_token_ids = sorted(TOKENIZER.special_ids)
    tokens = [
        str(TOKENIZER.id_to_token(i)).encode() if i in TOKENIZER.special_ids else TOKENIZER.token_bytes(i)
        for i in range(TOKENIZER.vocab_size)
    ]

    def __call__(self, text):
        return TOKENIZER.encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False)


LIBRARY = llguidance.LLTokenizer(_Vocabulary(), slices=llguidance.LLTokenizer.json_slices())
LIMITS = parser_limits(LIBRARY.vocab_size)

# Tokens that end something, so that a random walk comes to an end.
CLOSING = tuple(
    TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ('"', "}", "]", '"}', '"]', "0", "null")
)


def matcher(kind: GrammarKind, value, special_tokens=None, closes_objects=False) -> llguidance.LLMatcher:
    """A matcher after its first mask. value: text, or what becomes text as JSON. Raises RequestError for what is refused."""
    spec = GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value), "field")
    text = library_text(spec, special_tokens or {}, closes_objects)
    made = llguidance.LLMatcher(LIBRARY, text, log_level=0, limits=LIMITS)
    if not made.is_error():
        made.compute_bitmask()
    if made.is_error():
        raise explain(spec, made.get_error())
    return made


def takes(template: llguidance.LLMatcher, text: str | list[int]) -> bool:
    """Whether the output may be this text (or these tokens) as a whole."""
    ids = TOKENIZER.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    copy = template.deep_copy()
    for token in ids:
        copy.compute_bitmask()
        assert not copy.is_error(), copy.get_error()
        if copy.try_consume_tokens([token]) != 1:
            return False
    return copy.is_accepting()


def json_takes(schema, value, **options) -> bool:
    """Whether a schema's output may be this value, as `json.dumps` writes it."""
    return takes(matcher("json_schema", schema), json.dumps(value, ensure_ascii=False, **options))


def refusal(kind: GrammarKind, value) -> str:
    """The message with which a grammar is refused. It names the field."""
    with pytest.raises(RequestError) as refused:
        matcher(kind, value)
    assert refused.value.param == "field"
    assert len(refused.value.message) <= 600
    return refused.value.message


def random_output(template: llguidance.LLMatcher, rng: random.Random, max_tokens: int = 400) -> str | None:
    """A text of randomly drawn tokens that the masks allow, or None if it has not ended by then."""
    copy = template.deep_copy()
    ids: list[int] = []
    while len(ids) < max_tokens:
        bits = np.unpackbits(np.frombuffer(copy.compute_bitmask(), np.uint8), bitorder="little")
        assert not copy.is_error(), copy.get_error()
        if copy.is_stopped() or (copy.is_accepting() and rng.random() < 0.3):
            return TOKENIZER.decode(ids)
        closing = [token for token in CLOSING if bits[token]]
        allowed = closing if closing and rng.random() < 0.5 else np.flatnonzero(bits).tolist()
        token = rng.choice(allowed)
        if token in TOKENIZER.eos_ids:
            return TOKENIZER.decode(ids)
        assert copy.consume_token(token)
        ids.append(token)
    return None


@cache
def special(text: str) -> int:
    """The id of a special token."""
    return TOKENIZER.special_tokens[text]
