"""Formats in a notation of their own: calls as Python's (Llama 3.2 and 4, LFM2) and Gemma's, and Harmony (gpt-oss)."""

import re
from functools import partial

from headrace.parsers.call_readers import GemmaCall, PythonCall
from headrace.parsers.table import Go, Header, Kind, ReasoningTable, State, Table, Writing

# A list of Python calls: bare at the beginning of the output (Llama 3.2 and 4 with templates that ask for it), or between special tokens (LFM2).


def _list_states(end: str) -> dict[str, State]:
    """end: the terminal after the list."""
    return {
        "list": State(Kind.SPACE, {"[": Go("item")}),
        "item": State(Kind.READER, reader=PythonCall, then="next"),
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
    states=_list_states("<|tool_call_end|>"),
)

PYTHONIC = Table(
    name="pythonic",
    aliases=("llama4_pythonic",),
    fingerprints=(("func_name1(params_name1=params_value1",),),
    writings=(Writing("{name}(", ")", arguments="python", section=("[", "]"), separator=", ", bare="["),),
    opens={"<|python_start|>": Go("list")},
    start="start",
    states={"start": State(Kind.SPACE, peek={"[": "list"}), **_list_states("<|python_end|>")},
)


# Gemma 4 and FunctionGemma: `call:name{key:value}`, with strings between delimiters of their own.


def _gemma(name: str, begin: str, end: str, delimiter: str) -> Table:
    return Table(
        name=name,
        fingerprints=((begin,),),
        writings=(Writing(f"{begin}call:{{name}}", end, arguments="gemma", delimiter=delimiter),),
        opens={begin: Go("call")},
        parts=(delimiter,),
        states={
            "call": State(Kind.READER, reader=partial(GemmaCall, delimiter=delimiter), then="end"),
            "end": State(Kind.SPACE, {end: Go("content")}),
        },
    )


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")


# Harmony (gpt-oss): every message has a header with a channel, and a call its recipient.

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
