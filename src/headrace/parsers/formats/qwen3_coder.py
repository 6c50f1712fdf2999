"""Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: `<function=name>` and `<parameter=name>` tags, each value on lines of its own."""

from headrace.parsers.table import Go, Kind, State, Table, Writing

TABLE = Table(
    name="qwen3_coder",
    aliases=("qwen3_xml", "step3p5", "nemotron_3", "nemotron3"),
    fingerprints=(("<function=", "<parameter="),),
    writings=(
        Writing(
            "<tool_call>\n<function={name}>\n",
            "</function>\n</tool_call>",
            arguments="tags",
            parameter=("<parameter={key}>\n", "\n</parameter>\n"),
            separator="\n",
        ),
    ),
    # Some of these models leave out the first tag.
    opens={"<tool_call>": Go("open"), "<function=": Go("name")},
    states={
        "open": State(Kind.SPACE, {"<function=": Go("name")}),
        "name": State(Kind.NAME, {">": Go("parameters", begin=True)}),
        "parameters": State(
            Kind.SPACE,
            {
                "<parameter=": Go("key"),
                "</function>": Go("after", end=True, closes=True),
                "</tool_call>": Go("content", end=True),
            },
        ),
        "key": State(Kind.KEY, {">": Go("value")}),
        "value": State(Kind.VALUE, {"</parameter>": Go("parameters")}, trim_newline=True),
        "after": State(Kind.SPACE, {"</tool_call>": Go("content")}),
    },
)
