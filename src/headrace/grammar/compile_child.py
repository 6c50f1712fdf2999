"""A child that tries grammars: `python -m headrace.grammar.compile_child`. A grammar that costs too much costs it its life, not the server's.

Owns what the child is asked and answers, and on which short outputs it tries a grammar, since some are too complex only there; `compiler` is
the other side. Stdin is a socket. The child is sent a `Setup`, answers `Ready`, and from then on prints nothing and answers each `GrammarSpec`
with a `Verdict`. It ends when the socket closes or its parent ends.
"""

import random

import msgspec
import numpy as np

from headrace.child_pool.child_side import MIB, Frames, answer_all, resident_bytes, run
from headrace.errors import HeadraceError
from headrace.garbage import give_back_free_memory
from headrace.grammar.matcher import LibraryError, Matcher, MatcherTokens, Template
from headrace.grammar.source import TOO_COMPLEX, explain, library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec

STACK_BYTES = 8 * MIB
"""Of the thread that compiles. The server gives its own threads twice as much: what recurses too deeply ends a child."""

_MAX_CERTAIN_TOKENS = 64
"""How far a grammar is followed while only one token may come next."""

_MAX_OPTIONS = 4
_NUM_WALKS = 2
_WALK_TOKENS = 24
"""What is tried after that: so many of the next tokens, and so many outputs of so many tokens that are drawn at random."""


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. memory_bytes: what it may allocate beyond what it needs itself."""

    vocabulary: Vocabulary
    memory_bytes: int


class Passed(msgspec.Struct, frozen=True, tag=True):
    """A grammar that compiles and has a first mask.

    text: what the library takes. memory_bytes: what the compiled grammar occupies. left_bytes: by how much the child has grown since it was
    ready, once the grammar is gone.
    """

    text: str
    memory_bytes: int
    left_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A grammar that cannot be served, and why, in words for the client. left_bytes: as in `Passed`; 0 if there is no child left."""

    message: str
    left_bytes: int = 0


Verdict = Passed | Refused

VERDICTS: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Verdict)
_SETUPS = msgspec.msgpack.Decoder(Setup)
_SPECS = msgspec.msgpack.Decoder(GrammarSpec)


def try_grammar(tokens: MatcherTokens, spec: GrammarSpec) -> Verdict:
    """Compile a grammar and compute its first mask. It is gone when this returns.

    Objects of schemas are closed (`closed_objects`), unless the schema can only be followed as it is written. Then the refusal is of that, too.
    """
    closed = _tried(tokens, spec, closes_objects=True)
    has_schemas = spec.kind in ("json_schema", "structural_tag")
    if isinstance(closed, Refused) and has_schemas and closed.message != TOO_COMPLEX:
        return _tried(tokens, spec, closes_objects=False)
    return closed


def _tried(tokens: MatcherTokens, spec: GrammarSpec, closes_objects: bool) -> Verdict:
    give_back_free_memory()  # else what earlier grammars left would hide what this one takes
    before_bytes = resident_bytes()
    try:
        text = library_text(spec, tokens.special_texts, closes_objects)
        template = Template(tokens, text)
        probe(tokens, template)
    except LibraryError as error:
        return Refused(explain(spec, error.words).message)
    except HeadraceError as error:
        return Refused(error.message)
    except MemoryError:
        return Refused("compiling the grammar takes too much memory")
    except RecursionError:
        return Refused("the grammar is nested too deeply")
    give_back_free_memory()
    memory_bytes = resident_bytes() - before_bytes
    del template
    return Passed(text, max(memory_bytes, 0))


def serve(frames: Frames) -> None:
    """Try what the parent sends, until it closes the socket."""
    setup = frames.receive(_SETUPS)
    tokens = MatcherTokens(setup.vocabulary)
    limit_bytes = setup.memory_bytes
    del setup
    # The first grammar makes the library build tables that it keeps, which are no grammar's own.
    try_grammar(tokens, GrammarSpec("json_schema", '{"type": "object"}', ""))
    give_back_free_memory()
    answer_all(frames, _SPECS, lambda spec: try_grammar(tokens, spec), limit_bytes)


def main() -> None:
    run(serve, STACK_BYTES, "grammars")


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


if __name__ == "__main__":
    main()
