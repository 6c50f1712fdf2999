"""Harmony, the format of gpt-oss: every message has a header with a channel, and a call its recipient."""

import re

from headrace.parsers.table import Go, Header, Kind, ReasoningTable, State, Table, Writing

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def read_header(text: str) -> Header | None:
    """`assistant<|channel|>commentary to=functions.f <|constrain|>json`: what follows its `<|message|>`."""
    text = text[text.rfind("<|start|>") + 1 :]
    recipient = _RECIPIENT.search(text)
    if recipient is not None:
        name = recipient[1].removeprefix("functions.")
        return Header("arguments", name) if name else None
    channel = _CHANNEL.search(text)
    return Header("reasoning" if channel is not None and channel[1] == "analysis" else "content")


_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TEXT = {
    **{end: Go("between", closes=True) for end in _ENDS},
    "<|start|>": Go("header", closes=True),
    "<|channel|>": Go("header", closes=True, keep=True),
}

HARMONY = Table(
    name="gpt-oss",
    aliases=("openai", "openai_gptoss", "harmony", "gpt_oss"),
    fingerprints=(("<|channel|>", "<|message|>"),),
    has_reasoning=True,
    has_headers=True,
    reasoning=ReasoningTable("analysis", opens=("<|channel|>analysis<|message|>",), closes=("<|end|>",)),
    writings=(Writing("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),),
    turn_ends=("<|return|>", "<|call|>"),
    start="header",
    prompts=(
        ("<|channel|>analysis<|message|>", "reasoning"),
        ("<|channel|>final<|message|>", "content"),
        ("<|channel|>commentary<|message|>", "content"),
    ),
    states={
        "header": State(
            Kind.HEADER,
            {
                "<|message|>": Go("content"),
                "<|channel|>": Go("header"),
                "<|constrain|>": Go("header"),
                "<|start|>": Go("header"),
            },
            read_header=read_header,
        ),
        "content": State(Kind.CONTENT, _TEXT),
        "reasoning": State(Kind.REASONING, _TEXT),
        "arguments": State(
            Kind.ARGUMENTS,
            {
                **{end: Go("between", end=True, closes=True) for end in _ENDS},
                "<|start|>": Go("header", end=True, closes=True),
                "<|channel|>": Go("header", end=True, closes=True, keep=True),
            },
        ),
        "between": State(Kind.SPACE, {"<|start|>": Go("header")}),
    },
)
