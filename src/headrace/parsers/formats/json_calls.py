"""Formats whose calls are JSON: Hermes, Llama 3, Mistral, DeepSeek to V3.1, Kimi K2."""

import re
from collections.abc import Callable
from functools import partial

from headrace.parsers.call_readers import JsonArguments, JsonCall
from headrace.parsers.table import Go, Kind, State, Table, Writing

# Hermes, and Qwen 2.5 and 3: a JSON object between `<tool_call>` tags.

HERMES = Table(
    name="hermes",
    aliases=("qwen", "qwen25"),
    fingerprints=(("<tool_call>",),),
    writings=(
        Writing('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n", escapes=True),
    ),
    opens={"<tool_call>": Go("call")},
    states={
        "call": State(Kind.READER, reader=JsonCall, then="end"),
        "end": State(Kind.SPACE, {"</tool_call>": Go("content")}),
    },
)


# Llama 3.1 to 4: a bare JSON object at the beginning of the output, or after `<|python_tag|>`; several are separated by `;`.

LLAMA3 = Table(
    name="llama3_json",
    aliases=("llama3", "llama4_json", "llama4"),
    fingerprints=(("<|python_tag|>",), ('"parameters": dictionary of argument name',), ("<|eot_id|>", '"parameters"')),
    writings=(Writing('{"name": "{name}", "parameters": ', "}", separator="; ", bare="{", escapes=True),),
    opens={"<|python_tag|>": Go("marked"), "<|python_start|>": Go("marked")},
    start="start",
    states={
        "start": State(Kind.SPACE, peek={"{": "bare"}),
        "bare": State(Kind.READER, reader=partial(JsonCall, is_bare=True), then="more"),
        "marked": State(Kind.READER, reader=JsonCall, then="more"),
        "more": State(
            Kind.SPACE, {";": Go("start"), ",": Go("start"), "<|python_end|>": Go("content")}, peek={"{": "bare"}
        ),
    },
)


# Mistral: `[TOOL_CALLS]` and a list of JSON objects, or, newer, `[TOOL_CALLS]name[ARGS]{...}` for each call.


def mistral_id(name: str, number: int, draw: Callable[[int], str]) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return draw(9)


MISTRAL = Table(
    name="mistral",
    fingerprints=(("[TOOL_CALLS]",),),
    writings=(
        Writing("[TOOL_CALLS]{name}[ARGS]", needs="[ARGS]"),
        Writing('{"name": "{name}", "arguments": ', "}", section=("[TOOL_CALLS] [", "]"), separator=", ", escapes=True),
    ),
    opens={"[TOOL_CALLS]": Go("begin")},
    call_id=mistral_id,
    states={
        "begin": State(Kind.SPACE, {"[": Go("item")}, peek={"": "name"}),
        "item": State(Kind.READER, reader=JsonCall, then="next"),
        "next": State(Kind.SPACE, {",": Go("item"), "]": Go("content")}),
        "name": State(Kind.NAME, {"[ARGS]": Go("arguments"), "[CALL_ID]": Go("id"), "{": Go("arguments", keep=True)}),
        "id": State(Kind.ID, {"[ARGS]": Go("arguments")}),
        "arguments": State(Kind.READER, reader=JsonArguments),
    },
)


# DeepSeek R1 and V3 write `function<sep>name` and fenced JSON, V3.1 `name<sep>` and JSON: one set of states reads both.

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_DEEPSEEK_OPENS = {_ALL_BEGIN: Go("section"), _BEGIN: Go("first")}
_DEEPSEEK_STATES = {
    "section": State(Kind.SPACE, {_BEGIN: Go("first"), _ALL_END: Go("content")}),
    "first": State(Kind.NAME, {"<｜tool▁sep｜>": Go("separated")}),
    "separated": State(Kind.SPACE, peek={"{": "arguments", "": "second"}),
    "second": State(Kind.NAME, {"```json": Go("arguments")}),
    "arguments": State(Kind.READER, reader=JsonArguments, then="after"),
    "after": State(
        Kind.SPACE,
        {"```": Go("after", closes=True), _END: Go("section", closes=True), _ALL_END: Go("content")},
    ),
}

DEEPSEEK_V3 = Table(
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
    opens=_DEEPSEEK_OPENS,
    states=_DEEPSEEK_STATES,
)

DEEPSEEK_V31 = Table(
    name="deepseek_v31",
    aliases=("deepseekv31",),
    fingerprints=((_ALL_BEGIN,),),
    writings=(Writing(f"{_BEGIN}{{name}}<｜tool▁sep｜>", _END, section=(_ALL_BEGIN, _ALL_END)),),
    opens=_DEEPSEEK_OPENS,
    states=_DEEPSEEK_STATES,
)


# Kimi K2: `functions.name:number` and JSON arguments between special tokens.

_KIMI_NAME = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi_name(text: str) -> str | None:
    """The name without its namespace and number."""
    found = _KIMI_NAME.fullmatch(text)
    return found[1] if found is not None else None


def kimi_id(name: str, number: int, draw: Callable[[int], str]) -> str:
    """The id that the model was trained to see: calls are numbered over the whole conversation."""
    return f"functions.{name}:{number}"


KIMI_K2 = Table(
    name="kimi_k2",
    fingerprints=((_SECTION,),),
    writings=(
        Writing(
            "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            section=(_SECTION, _SECTION_END),
        ),
    ),
    opens={_SECTION: Go("section"), "<|tool_call_begin|>": Go("name")},
    read_name=kimi_name,
    call_id=kimi_id,
    states={
        "section": State(Kind.SPACE, {"<|tool_call_begin|>": Go("name"), _SECTION_END: Go("content")}),
        "name": State(Kind.NAME, {"<|tool_call_argument_begin|>": Go("arguments")}),
        "arguments": State(Kind.READER, reader=JsonArguments, then="after"),
        "after": State(Kind.SPACE, {"<|tool_call_end|>": Go("section", closes=True), _SECTION_END: Go("content")}),
    },
)
