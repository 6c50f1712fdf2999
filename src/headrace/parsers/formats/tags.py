"""What formats share whose parameters are text between tags: `<invoke name="f"><parameter name="a">value</parameter></invoke>`."""

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
