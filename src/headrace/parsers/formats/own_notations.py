"""Formats whose calls are in a notation of their own: Python's (Llama 3.2 and 4, LFM2), Gemma's."""

from functools import partial

from headrace.parsers.call_readers import GemmaCall, PythonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing

# A list of Python calls: bare at the beginning of the output (Llama 3.2 and 4 with templates that ask for it), or between special tokens (LFM2).


def _list_states(end: str) -> dict[str, State]:
    """end: the terminal after the list."""
    return {
        "list": State(Kind.SPACE, {"[": Go("item")}),
        "item": State(Kind.READER, reader=PythonCall, then="next"),
        "next": State(Kind.SPACE, {",": Go("comma"), "]": Go("end", closes=True)}),
        "comma": State(Kind.SPACE, {"]": Go("end", closes=True)}, peek={"": "item"}),
        "end": State(Kind.SPACE, {end: Go("content")}),
    }


LFM2 = Table(
    name="lfm2",
    fingerprints=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    writings=(
        Writing(
            "{name}(",
            ")",
            arguments="python",
            section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            separator=", ",
        ),
    ),
    opens={"<|tool_call_start|>": Go("list")},
    states=_list_states("<|tool_call_end|>"),
)

PYTHONIC = Table(
    name="pythonic",
    aliases=("llama4_pythonic",),
    fingerprints=(("func_name1(params_name1=params_value1",),),
    writings=(Writing("{name}(", ")", arguments="python", section=("[", "]"), separator=", ", bare="["),),
    opens={"<|python_start|>": Go("list")},
    start="start",
    states={"start": State(Kind.SPACE, peek={"[": "list"}), **_list_states("<|python_end|>")},
)


# Gemma 4 and FunctionGemma: `call:name{key:value}`, with strings between delimiters of their own.


def _gemma(name: str, begin: str, end: str, delimiter: str) -> Table:
    return Table(
        name=name,
        fingerprints=((begin,),),
        writings=(Writing(f"{begin}call:{{name}}", end, arguments="gemma", delimiter=delimiter),),
        opens={begin: Go("call")},
        parts=(delimiter,),
        states={
            "call": State(Kind.READER, reader=partial(GemmaCall, delimiter=delimiter), then="end"),
            "end": State(Kind.SPACE, {end: Go("content")}),
        },
    )


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
