"""One transcript of each format, with and without special tokens: the same message however it is cut."""

from dataclasses import dataclass

import pytest
from parser_harness import Output, make_format

from headrace.errors import ConfigError
from headrace.parsers.registry import choose, names

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TOOLS = [
    {"name": "get_weather", "parameters": SCHEMA},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
ARGUMENTS = {"city": 'Pa"ri\\s\n<b> é', "days": 7, "ratio": 0.5, "deep": None, "tags": ["a,b", "c]"], "where": {"x": 1}}
JSON = (
    '{"city": "Pa\\"ri\\\\s\\n<b> é", "days": 7, "ratio": 0.5, "deep": null, "tags": ["a,b", "c]"], "where": {"x": 1}}'
)


@dataclass(frozen=True)
class Transcript:
    """special: the terminals that are added tokens of the model's tokenizer."""

    tool_parser: str
    text: str
    special: tuple[str, ...] = ()
    reasoning_parser: str | None = None
    reasoning: str = ""
    content: str = ""
    calls: tuple = (("get_weather", ARGUMENTS), ("now", {}))
    texts_match: bool = True


DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
ALL, CALL, SEP, END, ALL_END = DEEPSEEK
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
VALUES = (
    ("city", 'Pa"ri\\s\n<b> é', "true"),
    ("days", "7", "false"),
    ("ratio", "0.5", "false"),
    ("deep", "null", "false"),
    ("tags", '["a,b", "c]"]', "false"),
    ("where", '{"x": 1}', "false"),
)


def dsml(section):
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n' for key, value, kind in VALUES
    )
    return (
        f'<｜DSML｜{section}>\n<｜DSML｜invoke name="get_weather">\n{parameters}</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{section}>'
    )


def glm(newline):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{newline}<arg_value>{value}</arg_value>{newline}" for key, value, _ in VALUES
    )
    return f"<tool_call>get_weather{newline}{pairs}</tool_call>\n<tool_call>now{newline}</tool_call>"


MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n'
    + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value, _ in VALUES)
    + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
QWEN_CODER = (
    "<tool_call>\n<function=get_weather>\n"
    + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value, _ in VALUES)
    + "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
GEMMA = 'call:get_weather{city:%Pa"ri\\s\n<b> é%,days:7,ratio:0.5,deep:null,tags:[%a,b%,%c]%],where:{x:1}}'
PYTHON = """[get_weather(city='Pa"ri\\\\s\\n<b> \\u00e9', days=7, ratio=0.5, deep=None, tags=["a,b", 'c]'], where={"x": 1}), now()]"""

TRANSCRIPTS = {
    "hermes": Transcript(
        "hermes",
        f'<think>\nhm\n</think>\n\nSure.\n<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ("<tool_call>", "</tool_call>", *THINK),
        "qwen3",
        "hm",
        "Sure.",
    ),
    "llama3 bare": Transcript(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {JSON}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
    ),
    "llama3 marked": Transcript(
        "llama3",
        f'Sure. <|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
        ("<|python_tag|>",),
        content="Sure.",
    ),
    "llama4 json": Transcript(
        "llama4",
        f'<|python_start|>{{"name": "get_weather", "parameters": {JSON}}}<|python_end|>And?',
        ("<|python_start|>", "<|python_end|>"),
        content="And?",
        calls=(("get_weather", ARGUMENTS),),
    ),
    "mistral list": Transcript(
        "mistral",
        f'Sure.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}, "id": "123456789"}}, {{"name": "now", "arguments": {{}}}}]',
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        content="Sure.",
    ),
    "mistral": Transcript(
        "mistral",
        f"[THINK]hm[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        "mistral",
        "hm",
        "Sure.",
    ),
    "mistral without a mark before arguments": Transcript(
        "mistral", f"[TOOL_CALLS]get_weather{JSON}[TOOL_CALLS]now{{}}", ("[TOOL_CALLS]",)
    ),
    "pythonic": Transcript("pythonic", PYTHON),
    "llama4": Transcript(
        "llama4_pythonic", f"<|python_start|>{PYTHON}<|python_end|>", ("<|python_start|>", "<|python_end|>")
    ),
    "lfm2": Transcript(
        "lfm2",
        f"Sure.<|tool_call_start|>{PYTHON}<|tool_call_end|>And?",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        content="Sure.And?",
    ),
    "deepseek v3": Transcript(
        "deepseekv3",
        f"Sure.{ALL}{CALL}function{SEP}get_weather\n```json\n{JSON}\n```{END}\n{CALL}function{SEP}now\n```json\n{{}}\n```{END}{ALL_END}",
        DEEPSEEK,
        content="Sure.",
    ),
    "deepseek v3.1": Transcript(
        "deepseekv31",
        f"<think>hm</think>Sure.{ALL}{CALL}get_weather{SEP}{JSON}{END}{CALL}now{SEP}{{}}{END}{ALL_END}",
        (*DEEPSEEK, *THINK),
        "deepseek-r1",
        "hm",
        "Sure.",
    ),
    "deepseek v3.2": Transcript("deepseekv32", "Sure.\n\n" + dsml("function_calls"), ("｜DSML｜",), content="Sure."),
    "deepseek v4": Transcript(
        "deepseek_v4", "<think>hm</think>" + dsml("tool_calls"), ("｜DSML｜", *THINK), "deepseek-v3", "hm"
    ),
    "qwen3 coder": Transcript("qwen3_coder", "Sure.\n" + QWEN_CODER, ("<tool_call>", "</tool_call>"), content="Sure."),
    "qwen3 coder without the first tag": Transcript(
        "qwen3_coder", QWEN_CODER.removeprefix("<tool_call>\n"), ("<tool_call>", "</tool_call>")
    ),
    "glm 4.5": Transcript(
        "glm45",
        "<think>hm</think>\nSure.\n" + glm("\n"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK),
        "glm45",
        "hm",
        "Sure.",
    ),
    "glm 4.7": Transcript(
        "glm47", glm(""), ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ),
    "kimi k2": Transcript(
        "kimi_k2",
        f"Sure.{KIMI[0]}{KIMI[1]}functions.get_weather:0{KIMI[2]}{JSON}{KIMI[3]}{KIMI[1]}functions.now:1{KIMI[2]}{{}}{KIMI[3]}{KIMI[4]}",
        KIMI,
        content="Sure.",
    ),
    "minimax m2": Transcript(
        "minimax-m2", "Sure.\n" + MINIMAX, ("<minimax:tool_call>", "</minimax:tool_call>"), content="Sure."
    ),
    "gpt-oss": Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Sure.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        HARMONY,
        reasoning="hm",
        content="Sure.",
    ),
    "gemma 4": Transcript(
        "gemma4",
        "<|channel>thought\nhm<channel|>Sure.<|tool_call>"
        + GEMMA.replace("%", '<|"|>')
        + "<tool_call|><|tool_call>call:now{}<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        "gemma4",
        "hm",
        "Sure.",
    ),
    "functiongemma": Transcript(
        "functiongemma",
        "<start_function_call>"
        + GEMMA.replace("%", "<escape>")
        + "<end_function_call><start_function_call>call:now{}<end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
}


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(name, with_special):
    transcript = TRANSCRIPTS[name]
    format = make_format(
        transcript.tool_parser, transcript.reasoning_parser, transcript.special if with_special else ()
    )
    parsed = Output(format, transcript.text, tools=TOOLS).check()

    assert parsed.decoded == list(transcript.calls)
    assert (parsed.content, parsed.reasoning) == (transcript.content, transcript.reasoning)


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_an_output_that_is_cut_off_streams_what_it_gives_at_once(name, with_special):
    """At every point: the message is a beginning of the whole one, however it was delivered."""
    transcript = TRANSCRIPTS[name]
    format = make_format(
        transcript.tool_parser, transcript.reasoning_parser, transcript.special if with_special else ()
    )
    output = Output(format, transcript.text, tools=TOOLS)
    whole = output.whole()
    for end in range(0, len(output.pieces), 3):
        part = Output(format, "", tools=TOOLS)
        part.pieces = output.pieces[:end]
        parsed = part.whole()
        assert part.parse([[piece] for piece in part.characters()]) == parsed
        assert [call[0] for call in parsed.calls] == [call[0] for call in whole.calls[: len(parsed.calls)]]


def ids(parser_name, text, **options):
    return Output(make_format(parser_name), text, **options).check(num_random=2).ids


def test_a_call_of_gpt_oss_without_arguments_has_none():
    text = "<|channel|>commentary to=functions.now<|message|><|call|>"

    assert Output(make_format("gpt-oss", None, HARMONY), text).check().calls == (("now", "{}"),)


def test_an_escaped_quote_closes_no_triple_quotes():
    format = make_format("pythonic")

    assert Output(format, '''[f(a="""x\\"""y""", b=2)]''').check().decoded == [("f", {"a": 'x"""y', "b": 2})]


def test_a_mark_behind_an_opening_quote_ends_the_call():
    format = make_format("llama4_pythonic", None, ("<|python_start|>", "<|python_end|>"))
    parsed = Output(format, '<|python_start|>[f(a="<|python_end|>b').check()

    assert (parsed.content, [name for name, _ in parsed.calls]) == ("b", ["f"])


def test_gpt_oss_without_tools_writes_text():
    text = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    parsed = Output(make_format("gpt-oss", None, HARMONY), text, reads_tools=False).check()

    assert (parsed.content, parsed.calls) == ("{}", ())


def test_ids_of_formats_that_have_rules_for_them():
    two = f"{KIMI[0]}{KIMI[1]}functions.f:0{KIMI[2]}{{}}{KIMI[3]}{KIMI[1]}g{KIMI[2]}{{}}{KIMI[3]}{KIMI[4]}"

    assert ids("kimi_k2", two) == ("functions.f:0", "functions.g:1")
    assert ids("kimi_k2", two, num_calls_before=3) == ("functions.f:3", "functions.g:4")
    assert [len(id) for id in ids("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}")] == [9, 9]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]g[ARGS]{}") == ("123456789", "abcdefghi")


CHOICES = {
    "hermes+think": "<tool_call>\n{'name': x, 'arguments': y} <think>",
    "qwen3_coder+think": "<tool_call>\n<function=f>\n<parameter=a> </think>",
    "glm45+think": "<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value> <think>",
    "glm47+think": "<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value> <think>",
    "deepseek_v3": f"{ALL}{CALL}function{SEP}f\n```json",
    "deepseek_v31+think": f"{ALL}{CALL}f{SEP} </think>",
    "deepseek_v32+think": "<｜DSML｜function_calls> <think>",
    "kimi_k2": KIMI[0],
    "minimax_m2+think": "<minimax:tool_call><invoke name= <parameter name= <think>",
    "gpt-oss": "<|start|>assistant<|channel|>final<|message|>",
    "gemma4": "<|tool_call>call: <|channel>thought",
    "functiongemma": "<start_function_call>call:",
    "lfm2": "<|tool_call_start|>[",
    "mistral": "[TOOL_CALLS] [THINK]",
    "llama3_json": '<|python_tag|> {"name": function name, "parameters": dictionary of argument name and its value}',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "think": "<think>",
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_chat_template_shows_the_format(name):
    assert choose(template=CHOICES[name], special={}).name == name


def test_names_choose_and_switch_off():
    assert choose(template="", special={}) is None
    assert choose(template="<tool_call> <think>", special={}, tool_parser="none", reasoning_parser="none") is None
    assert choose(template="<tool_call>", special={}, tool_parser="glm45").name == "glm45"
    with pytest.raises(ConfigError, match=r"'nonsense'.*hermes"):
        choose(template="", special={}, tool_parser="nonsense")
    with pytest.raises(ConfigError, match=r"'nonsense'.*deepseek-r1"):
        choose(template="", special={}, reasoning_parser="nonsense")
    for kind in names():
        assert len(set(kind)) == len(kind)
    for name in names().tool_parsers:
        assert choose(template="", special={}, tool_parser=name).has_tools
    for name in names().reasoning_parsers:
        # gpt-oss is one format for both.
        assert choose(
            template=CHOICES["gpt-oss"] if name in names().tool_parsers else "", special={}, reasoning_parser=name
        ).has_reasoning
