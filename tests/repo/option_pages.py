"""The tables of docs/coming-from-sglang.md and docs/coming-from-vllm.md, as Markdown.

`python tests/repo/option_pages.py sglang|vllm` prints them.
"""

import sys

from headrace.config.other_servers import VALUES, Alias, Already, Refused, Server, table


def markdown(server: Server) -> str:
    """The tables for one server."""
    mine = [entry for entry in table() if server in entry.servers]
    aliases = [
        f"| {_names(entry.names)} | {_ours(entry)} | {entry.says} |" for entry in mine if isinstance(entry, Alias)
    ]
    values = [
        f"| `{_flag(name)} {theirs}` | `{_flag(name)} {ours}` | |"
        for name, pairs in VALUES.items()
        for theirs, ours in pairs.items()
        if name != "sampling_defaults" and theirs not in {"sglang", "vllm"} - {server}
    ]
    already = [
        f"| {_names(entry.names)} | {', '.join(f'`{value}`' for value in entry.values)} | {entry.says} | "
        f"{_unless(entry)} |"
        for entry in mine
        if isinstance(entry, Already)
    ]
    refused = [f"| {_names(entry.names)} | {entry.says} |" for entry in mine if isinstance(entry, Refused)]
    return "\n".join(
        [
            "### Other names\n\n| there | here | remark |\n|---|---|---|",
            *aliases,
            *values,
            "\n### Already so\n\nAccepted with a line of log. Other values are refused.\n",
            "| option | values | how it is here | contradicts |\n|---|---|---|---|",
            *already,
            "\n### Not supported\n\nRefused with this remark.\n\n| option | remark |\n|---|---|",
            *refused,
            "",
        ]
    )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}{'*' if name.endswith('-') else ''}`" for name in names)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _ours(entry: Alias) -> str:
    words = (
        _flag(name) if entry.is_switch and value == "true" else f"{_flag(name)} {value or 'VALUE'}"
        for name, value in entry.sets.items()
    )
    return ", ".join(f"`{word}`" for word in words)


def _unless(entry: Already) -> str:
    if entry.unless is None:
        return ""
    name, value = entry.unless
    return (
        f"`{_flag(name)}`"
        if value == "true"
        else f"`{_flag(f'no_{name}')}`"
        if value == "false"
        else f"`{_flag(name)} {value}`"
    )


if __name__ == "__main__":
    print(markdown("vllm" if sys.argv[1:] == ["vllm"] else "sglang"))
