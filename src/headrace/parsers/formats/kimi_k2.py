"""Kimi K2: `functions.name:number` and JSON arguments between special tokens."""

import re
from collections.abc import Callable

from headrace.parsers.json_text import JsonArguments
from headrace.parsers.table import Go, Kind, State, Table, Writing

_NAME = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


def read_name(text: str) -> str | None:
    """The name without its namespace and number."""
    found = _NAME.fullmatch(text)
    return found[1] if found is not None else None


def call_id(name: str, number: int, draw: Callable[[int], str]) -> str:
    """The id that the model was trained to see: calls are numbered over the whole conversation."""
    return f"functions.{name}:{number}"


_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

TABLE = Table(
    name="kimi_k2",
    fingerprints=((_SECTION,),),
    writings=(
        Writing(
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            section=(_SECTION, _SECTION_END),
        ),
    ),
    opens={_SECTION: Go("section"), "<|tool_call_begin|>": Go("name")},
    read_name=read_name,
    call_id=call_id,
    states={
        "section": State(Kind.SPACE, {"<|tool_call_begin|>": Go("name"), _SECTION_END: Go("content")}),
        "name": State(Kind.NAME, {"<|tool_call_argument_begin|>": Go("arguments")}),
        "arguments": State(Kind.READER, reader=lambda sink, schemas: JsonArguments(sink), then="after"),
        "after": State(Kind.SPACE, {"<|tool_call_end|>": Go("section", closes=True), _SECTION_END: Go("content")}),
    },
)
