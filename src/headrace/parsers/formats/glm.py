"""GLM 4.5 to 4.7: the name after `<tool_call>`, then keys and values between tags, with or without line breaks."""

from headrace.parsers.table import Go, Kind, State, Table

TABLE = Table(
    name="glm45",
    aliases=("glm", "glm46", "glm47"),
    fingerprints=(("<arg_key>",),),
    opens={"<tool_call>": Go("name")},
    states={
        "name": State(
            Kind.NAME, {"<arg_key>": Go("key", begin=True), "</tool_call>": Go("content", begin=True, end=True)}
        ),
        "key": State(Kind.KEY, {"</arg_key>": Go("between")}),
        "between": State(Kind.SPACE, {"<arg_value>": Go("value")}),
        "value": State(Kind.VALUE, {"</arg_value>": Go("more")}),
        "more": State(Kind.SPACE, {"<arg_key>": Go("key"), "</tool_call>": Go("content", end=True)}),
    },
)
