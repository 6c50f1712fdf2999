"""A list of Python calls: bare at the beginning of the output (Llama 3.2 and 4 with templates that ask for it), or between special tokens (LFM2)."""

from headrace.parsers.python_call import PythonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing


def _states(end: str) -> dict[str, State]:
    """end: the terminal after the list."""
    return {
        "list": State(Kind.SPACE, {"[": Go("item")}),
        "item": State(Kind.READER, reader=lambda sink, schemas: PythonCall(sink), then="next"),
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
    states=_states("<|tool_call_end|>"),
)

TABLE = Table(
    name="pythonic",
    aliases=("llama4_pythonic",),
    fingerprints=(("func_name1(params_name1=params_value1",),),
    writings=(Writing("{name}(", ")", arguments="python", section=("[", "]"), separator=", ", bare="["),),
    opens={"<|python_start|>": Go("list")},
    start="start",
    states={"start": State(Kind.SPACE, peek={"[": "list"}), **_states("<|python_end|>")},
)
