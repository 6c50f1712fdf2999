"""MiniMax M2: parameters between tags."""

from headrace.parsers.formats.tags import invocations

TABLE = invocations(
    "minimax_m2",
    aliases=("minimax-m2",),
    fingerprints=(("<minimax:tool_call>",),),
    sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
)
