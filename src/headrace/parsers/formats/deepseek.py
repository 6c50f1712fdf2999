"""DeepSeek: R1, V3 and V3.1 with JSON between special tokens, V3.2 and V4 with parameters between DSML tags.

R1 and V3 write `function<sep>name` and fenced JSON, V3.1 `name<sep>` and JSON: one table reads both.
"""

from headrace.parsers.formats.tags import invocations
from headrace.parsers.json_text import JsonArguments
from headrace.parsers.table import Go, Kind, State, Table, Writing

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_OPENS = {_ALL_BEGIN: Go("section"), _BEGIN: Go("first")}
_STATES = {
    "section": State(Kind.SPACE, {_BEGIN: Go("first"), _ALL_END: Go("content")}),
    "first": State(Kind.NAME, {"<｜tool▁sep｜>": Go("separated")}),
    "separated": State(Kind.SPACE, peek={"{": "arguments", "": "second"}),
    "second": State(Kind.NAME, {"```json": Go("arguments")}),
    "arguments": State(Kind.READER, reader=lambda sink, schemas: JsonArguments(sink), then="after"),
    "after": State(
        Kind.SPACE,
        {"```": Go("after", closes=True), _END: Go("section", closes=True), _ALL_END: Go("content")},
    ),
}

V3 = Table(
    name="deepseek_v3",
    aliases=("deepseekv3",),
    fingerprints=((_ALL_BEGIN, "```json"),),
    writings=(
        Writing(
            f"{_BEGIN}function<｜tool▁sep｜>{{name}}\n```json\n",
            f"\n```{_END}",
            section=(_ALL_BEGIN, _ALL_END),
            separator="\n",
        ),
    ),
    opens=_OPENS,
    states=_STATES,
)

V31 = Table(
    name="deepseek_v31",
    aliases=("deepseekv31",),
    fingerprints=((_ALL_BEGIN,),),
    writings=(Writing(f"{_BEGIN}{{name}}<｜tool▁sep｜>", _END, section=(_ALL_BEGIN, _ALL_END)),),
    opens=_OPENS,
    states=_STATES,
)

V32 = invocations(
    "deepseek_v32",
    aliases=("deepseekv32", "deepseek_v4", "deepseekv4"),
    fingerprints=(("｜DSML｜",),),
    sections=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    prefix="｜DSML｜",
    writing=Writing(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        arguments="tags",
        parameter=('<｜DSML｜parameter name="{key}" string="{is_string}">', "</｜DSML｜parameter>\n"),
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    ),
    has_types=True,
)
