"""Hermes, and Qwen 2.5 and 3: a JSON object between `<tool_call>` tags."""

from headrace.parsers.json_text import JsonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing

TABLE = Table(
    name="hermes",
    aliases=("qwen", "qwen25"),
    fingerprints=(("<tool_call>",),),
    writings=(
        Writing('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n", escapes=True),
    ),
    opens={"<tool_call>": Go("call")},
    states={
        "call": State(Kind.READER, reader=lambda sink, schemas: JsonCall(sink), then="end"),
        "end": State(Kind.SPACE, {"</tool_call>": Go("content")}),
    },
)
