"""How much work the library may spend on one grammar, as a function of the vocabulary.

Used wherever a matcher is built: in the child that tries a grammar and in the worker that follows it, so that what passed in one passes in the other.
"""

from llguidance import LLParserLimits

_VOCABULARY = 50_000
"""The vocabulary size that the limits of one mask are measured for. The work of a mask grows with the vocabulary's trie."""


def parser_limits(vocab_size: int) -> LLParserLimits:
    """The limits for a vocabulary of `vocab_size` tokens.

    step_lexer_fuel: at most some 30 ms a mask at the library's 14,000 a millisecond, some 200 ms for the worst regular expressions seen. It is
    renewed by every mask and by nothing else: whoever consumes many tokens without computing masks, as after a retraction, runs out of it.
    step_max_items: at most some 5 ms a mask (20,000 a millisecond) for each 50,000 tokens of the vocabulary; an ordinary schema needs more than
    the library's own 50,000 where V = 262,144. max_lexer_states: 1 to 2 kB each, so at most some 100 MB.
    Errors do not hold the grammar and the output: they go to clients and to the log.
    """
    scale = -(-vocab_size // _VOCABULARY)
    return LLParserLimits(
        step_lexer_fuel=400_000,
        step_max_items=100_000 * scale,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
