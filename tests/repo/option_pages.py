"""The tables of docs/cli.md, docs/coming-from-sglang.md and docs/coming-from-vllm.md, as Markdown.

`python tests/repo/option_pages.py cli|sglang|vllm` prints them.
"""

import sys
from dataclasses import fields

from headrace.config.cli import ALIASES, ENV_VARS, choices_of, is_on, metavar_of
from headrace.config.other_servers import DROPPED, VALUES, Entry, table
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import flag


def options() -> str:
    """Every option of `headrace serve`: one table per group."""
    groups = {}
    for f in fields(ServerArgs):
        groups.setdefault(f.metadata["group"], []).append(f)
    blocks = []
    for group, members in groups.items():
        rows = "\n".join(f"| `{_spelling(f)}` | {_default_text(f)} | {_help_text(f)} |" for f in members)
        blocks.append(f"### {group}\n\n| option | default | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(blocks)


def _spelling(f) -> str:
    if f.type is bool:
        return flag(f.name)
    choices = choices_of(f.type)
    names = ", ".join((flag(f.name), *ALIASES.get(f.name, ())))
    return f"{names} {'{' + ','.join(choices) + '}' if choices else metavar_of(f.type)}"


def _default_text(f) -> str:
    if f.default is None or f.default == "":
        return ""
    if isinstance(f.default, bool):
        return "on" if f.default else "off"
    return f"`{f.default}`"


def _help_text(f) -> str:
    off = f" `{flag(f'no_{f.name}')}` turns it off." if is_on(f) else ""
    env = f" Also from the environment: `{ENV_VARS[f.name]}`." if f.name in ENV_VARS else ""
    return str(f.metadata["help"]).replace("|", "\\|") + off + env


def markdown(server: str) -> str:
    """The tables for one server."""
    mine = [entry for entry in table() if entry.both or getattr(entry, server)]
    aliases = [f"| {_names(entry.names)} | {_ours(entry)} | {entry.says} |" for entry in mine if entry.is_]
    values = [
        f"| `{flag(name)} {theirs}` | `{flag(name)} {ours}` | |"
        for name, pairs in VALUES.items()
        for theirs, ours in pairs.items()
        if name != "sampling_defaults" and theirs not in {"sglang", "vllm"} - {server}
    ]
    already = [
        f"| {_names(entry.names)} | {', '.join(f'`{value}`' for value in entry.values)} | {entry.already} | "
        f"{_unless(entry)} |"
        for entry in mine
        if entry.already
    ]
    already += [
        f"| `{flag(name)}` | {', '.join(f'`{value}`' for value in values.split())} | {says} |  |"
        for name, (says, values) in DROPPED.items()
    ]
    refused = [f"| {_names(entry.names)} | {entry.refused} |" for entry in mine if entry.refused]
    return "\n".join(
        [
            "### Other names\n\n| there | here | remark |\n|---|---|---|",
            *aliases,
            *values,
            "\n### Already so\n\nAccepted with a line of log. Values that are neither here nor in [cli.md](cli.md) are refused.\n",
            "| option | values | how it is here | contradicts |\n|---|---|---|---|",
            *already,
            "\n### Not supported\n\nRefused with this remark.\n\n| option | remark |\n|---|---|",
            *refused,
            "",
        ]
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}{'*' if name.endswith('-') else ''}`" for name in names)


def _ours(entry: Entry) -> str:
    words = (
        flag(name) if None not in entry.sets.values() and value == "true" else f"{flag(name)} {value or 'VALUE'}"
        for name, value in entry.sets.items()
    )
    return ", ".join(f"`{word}`" for word in words)


def _unless(entry: Entry) -> str:
    if entry.unless is None:
        return ""
    name, value = entry.unless
    return (
        f"`{flag(name)}`"
        if value == "true"
        else f"`{flag(f'no_{name}')}`"
        if value == "false"
        else f"`{flag(name)} {value}`"
    )


if __name__ == "__main__":
    print(options() if sys.argv[1:] == ["cli"] else markdown("vllm" if sys.argv[1:] == ["vllm"] else "sglang"))
