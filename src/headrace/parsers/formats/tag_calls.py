"""Formats whose parameters are text between tags: MiniMax M2, DeepSeek from V3.2 on, GLM 4.5 to 4.7, Qwen3-Coder."""

from collections.abc import Sequence

from headrace.parsers.table import Go, Kind, State, Table, Writing


def invocations(
    name: str,
    *,
    sections: Sequence[tuple[str, str]],
    writing: Writing,
    prefix: str = "",
    has_types: bool = False,
    aliases: Sequence[str] = (),
    fingerprints: Sequence[Sequence[str]] = (),
) -> Table:
    """A table of `invoke` and `parameter` tags. sections: tags around all calls. prefix: of the tags' names. has_types: a parameter has
    `string="true"` or `string="false"`, which says whether its value is text or JSON."""
    ends = {end: Go("content") for _, end in sections}
    values = {'">': Go("value")}
    if has_types:
        values['" string="true">'] = Go("value", value="string")
        values['" string="false">'] = Go("value", value="json")
    return Table(
        name=name,
        aliases=aliases,
        fingerprints=fingerprints,
        writings=(writing,),
        opens={begin: Go("section") for begin, _ in sections},
        states={
            "section": State(Kind.SPACE, {f'<{prefix}invoke name="': Go("name"), **ends}),
            "name": State(Kind.NAME, {'">': Go("parameters", begin=True)}),
            "parameters": State(
                Kind.SPACE,
                {f'<{prefix}parameter name="': Go("key"), f"</{prefix}invoke>": Go("section", end=True, closes=True)},
            ),
            "key": State(Kind.KEY, values),
            "value": State(Kind.VALUE, {f"</{prefix}parameter>": Go("parameters")}),
        },
    )


MINIMAX_M2 = invocations(
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

DEEPSEEK_V32 = invocations(
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


# GLM 4.5 to 4.7: the name after `<tool_call>`, then keys and values between tags, with or without line breaks.

_GLM_OPENS = {"<tool_call>": Go("name")}
_GLM_STATES = {
    "name": State(Kind.NAME, {"<arg_key>": Go("key", begin=True), "</tool_call>": Go("content", begin=True, end=True)}),
    "key": State(Kind.KEY, {"</arg_key>": Go("between")}),
    "between": State(Kind.SPACE, {"<arg_value>": Go("value")}),
    "value": State(Kind.VALUE, {"</arg_value>": Go("more")}),
    "more": State(Kind.SPACE, {"<arg_key>": Go("key"), "</tool_call>": Go("content", end=True)}),
}

GLM45 = Table(
    name="glm45",
    aliases=("glm", "glm46"),
    fingerprints=(("<arg_key>",),),
    writings=(
        Writing(
            "<tool_call>{name}\n",
            "</tool_call>",
            arguments="tags",
            parameter=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
            separator="\n",
        ),
    ),
    opens=_GLM_OPENS,
    states=_GLM_STATES,
)

GLM47 = Table(
    name="glm47",
    fingerprints=(("</arg_key><arg_value>",),),
    writings=(
        Writing(
            "<tool_call>{name}",
            "</tool_call>",
            arguments="tags",
            parameter=("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
        ),
    ),
    opens=_GLM_OPENS,
    states=_GLM_STATES,
)


# Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: `<function=name>` and `<parameter=name>` tags, each value on lines of its own.

QWEN3_CODER = Table(
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
