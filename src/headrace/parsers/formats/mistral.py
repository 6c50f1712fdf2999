"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or, newer, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from collections.abc import Callable

from headrace.parsers.json_text import JsonArguments, JsonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing


def call_id(name: str, number: int, draw: Callable[[int], str]) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return draw(9)


TABLE = Table(
    name="mistral",
    fingerprints=(("[TOOL_CALLS]",),),
    writings=(
        Writing("[TOOL_CALLS]{name}[ARGS]", needs="[ARGS]"),
        Writing('{"name": "{name}", "arguments": ', "}", section=("[TOOL_CALLS] [", "]"), separator=", ", escapes=True),
    ),
    opens={"[TOOL_CALLS]": Go("begin")},
    call_id=call_id,
    states={
        "begin": State(Kind.SPACE, {"[": Go("item")}, peek={"": "name"}),
        "item": State(Kind.READER, reader=lambda sink, schemas: JsonCall(sink), then="next"),
        "next": State(Kind.SPACE, {",": Go("item"), "]": Go("content")}),
        "name": State(Kind.NAME, {"[ARGS]": Go("arguments"), "[CALL_ID]": Go("id"), "{": Go("arguments", keep=True)}),
        "id": State(Kind.ID, {"[ARGS]": Go("arguments")}),
        "arguments": State(Kind.READER, reader=lambda sink, schemas: JsonArguments(sink)),
    },
)
