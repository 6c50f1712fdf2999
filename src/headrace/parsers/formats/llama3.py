"""Llama 3.1 to 4: a bare JSON object at the beginning of the output, or after `<|python_tag|>`; several are separated by `;`."""

from headrace.parsers.json_text import JsonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing

TABLE = Table(
    name="llama3_json",
    aliases=("llama3", "llama4_json", "llama4"),
    fingerprints=(("<|python_tag|>",), ('"parameters": dictionary of argument name',), ("<|eot_id|>", '"parameters"')),
    writings=(Writing('{"name": "{name}", "parameters": ', "}", separator="; ", bare="{", escapes=True),),
    opens={"<|python_tag|>": Go("marked"), "<|python_start|>": Go("marked")},
    start="start",
    states={
        "start": State(Kind.SPACE, peek={"{": "bare"}),
        "bare": State(Kind.READER, reader=lambda sink, schemas: JsonCall(sink, is_bare=True), then="more"),
        "marked": State(Kind.READER, reader=lambda sink, schemas: JsonCall(sink), then="more"),
        "more": State(
            Kind.SPACE, {";": Go("start"), ",": Go("start"), "<|python_end|>": Go("content")}, peek={"{": "bare"}
        ),
    },
)
