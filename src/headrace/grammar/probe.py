"""Tries a compiled grammar on a few short outputs: some are too complex only there.

Owns which outputs. Runs in a compile child, so that a grammar that cannot be followed is refused before an output has begun; what it finds is the
same every time.
"""

import random

import numpy as np

from headrace.grammar.matcher import Matcher, MatcherTokens, Template

_MAX_CERTAIN_TOKENS = 64
"""How far a grammar is followed while only one token may come next."""

_MAX_OPTIONS = 4
_NUM_WALKS = 2
_WALK_TOKENS = 24
"""What is tried after that: so many of the next tokens, and so many outputs of so many tokens that are drawn at random."""


def probe(tokens: MatcherTokens, template: Template) -> None:
    """Follow what is certain to the first choice, and from there a few tokens and a few short outputs: some grammars are too complex only there.

    Raises LibraryError if a mask on the way cannot be computed.
    """
    certain: list[int] = []
    matcher = template.start()
    words = tokens.empty_mask()
    for _ in range(_MAX_CERTAIN_TOKENS):
        matcher.fill(words)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if len(ids) > 1 or matcher.is_complete:
            break
        certain += ids
        matcher.accept(ids[0])
    else:
        return
    for token_id in ids[:_MAX_OPTIONS]:
        if token_id not in tokens.eos_ids:
            option = template.start()
            for known in (*certain, token_id):
                option.accept(known)
            option.fill(words)
    for seed in range(_NUM_WALKS):
        walk = template.start()
        for known in certain:
            walk.accept(known)
        _walk(tokens, walk, random.Random(seed))


def _walk(tokens: MatcherTokens, matcher: Matcher, rng: random.Random) -> None:
    """Write what a grammar allows, at random, for some tokens or to the first end."""
    words = tokens.empty_mask()
    for _ in range(_WALK_TOKENS):
        matcher.fill(words)
        index = rng.choice(np.flatnonzero(words).tolist())
        bits = int(words[index])
        token_id = 32 * index + rng.choice([bit for bit in range(32) if bits >> bit & 1])
        if token_id in tokens.eos_ids:
            return
        matcher.accept(token_id)
