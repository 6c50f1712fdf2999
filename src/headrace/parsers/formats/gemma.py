"""Gemma 4 and FunctionGemma: `call:name{key:value}`, with strings between delimiters of their own."""

from headrace.parsers.gemma_call import GemmaCall
from headrace.parsers.table import Go, Kind, State, Table, Writing

_STRING = '<|"|>'
_ESCAPE = "<escape>"

GEMMA4 = Table(
    name="gemma4",
    fingerprints=(("<|tool_call>",),),
    writings=(Writing("<|tool_call>call:{name}", "<tool_call|>", arguments="gemma", delimiter=_STRING),),
    opens={"<|tool_call>": Go("call")},
    parts=(_STRING,),
    states={
        "call": State(Kind.READER, reader=lambda sink, schemas: GemmaCall(sink, _STRING), then="end"),
        "end": State(Kind.SPACE, {"<tool_call|>": Go("content")}),
    },
)

FUNCTION_GEMMA = Table(
    name="functiongemma",
    fingerprints=(("<start_function_call>",),),
    writings=(
        Writing("<start_function_call>call:{name}", "<end_function_call>", arguments="gemma", delimiter=_ESCAPE),
    ),
    opens={"<start_function_call>": Go("call")},
    parts=(_ESCAPE,),
    states={
        "call": State(Kind.READER, reader=lambda sink, schemas: GemmaCall(sink, _ESCAPE), then="end"),
        "end": State(Kind.SPACE, {"<end_function_call>": Go("content")}),
    },
)
