"""A child that tries grammars: `python -m headrace.grammar.compile_child`. A grammar that costs too much costs it its life, not the server's.

Owns what the child is asked and answers; `compile_pool` is the other side. Stdin is a socket. The child is sent a `Setup`, answers `Ready`, and
from then on prints nothing and answers each `GrammarSpec` with a `Verdict`. It ends when the socket closes or its parent ends.
"""

import msgspec

from headrace.child_pool.child_side import MIB, Ready, limit_memory, resident_bytes, run, say_no_more
from headrace.child_pool.frames import Frames
from headrace.errors import HeadraceError
from headrace.garbage import give_back_free_memory
from headrace.grammar.matcher import LibraryError, MatcherTokens, Template
from headrace.grammar.probe import probe
from headrace.grammar.refusals import TOO_COMPLEX
from headrace.grammar.source import explain, library_text
from headrace.grammar.vocabulary import Vocabulary
from headrace.messages.grammar import GrammarSpec

STACK_BYTES = 8 * MIB
"""Of the thread that compiles. The server gives its own threads twice as much: what recurses too deeply ends a child."""


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
    own_bytes = resident_bytes()
    limit_memory(limit_bytes)
    frames.send(Ready())
    say_no_more()
    while True:
        verdict = try_grammar(tokens, frames.receive(_SPECS))
        give_back_free_memory()
        frames.send(msgspec.structs.replace(verdict, left_bytes=max(resident_bytes() - own_bytes, 0)))


def main() -> None:
    """Entry of the child."""
    run(serve, STACK_BYTES, "grammars")


if __name__ == "__main__":
    main()
