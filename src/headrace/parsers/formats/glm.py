"""GLM 4.5 to 4.7: the name after `<tool_call>`, then keys and values between tags, with or without line breaks."""

from headrace.parsers.table import Go, Kind, State, Table, Writing

_OPENS = {"<tool_call>": Go("name")}
_STATES = {
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
    opens=_OPENS,
    states=_STATES,
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
    opens=_OPENS,
    states=_STATES,
)
