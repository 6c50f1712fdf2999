"""MiniMax M2: parameters between tags."""

from headrace.parsers.formats.tags import invocations
from headrace.parsers.table import Writing

TABLE = invocations(
    "minimax_m2",
    aliases=("minimax-m2",),
    fingerprints=(("<minimax:tool_call>",),),
    writing=Writing(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        arguments="tags",
        parameter=('<parameter name="{key}">', "</parameter>\n"),
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
    sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
)
