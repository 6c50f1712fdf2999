"""Calls as each format writes them: what a model of that family would generate for given names and arguments."""

import json


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def _json_calls(begin, end, separator, key="arguments", before="", after=""):
    def render(calls):
        texts = [f'{begin}{{"name": {dumps(name)}, "{key}": {dumps(arguments)}}}{end}' for name, arguments in calls]
        return before + separator.join(texts) + after

    return render


def _around(before, begin, middle, end, after, separator=""):
    def render(calls):
        texts = [
            f"{begin.replace('#', str(i))}{name}{middle.replace('#', str(i))}{dumps(arguments)}{end}"
            for i, (name, arguments) in enumerate(calls)
        ]
        return before + separator.join(texts) + after

    return render


def _tags(before, begin, parameter, end, after, separator=""):
    """begin: takes the name; parameter: the key, the value as text, and whether it is a string."""

    def render(calls):
        texts = []
        for name, arguments in calls:
            values = [
                parameter(key, value if isinstance(value, str) else dumps(value), isinstance(value, str))
                for key, value in arguments.items()
            ]
            texts.append(begin(name) + "".join(values) + end)
        return before + separator.join(texts) + after

    return render


def python_calls(before, after, written=repr):
    def render(calls):
        texts = [
            f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return f"{before}[{', '.join(texts)}]{after}"

    return render


def _gemma(begin, end, delimiter):
    def written(value):
        match value:
            case str():
                return f"{delimiter}{value}{delimiter}"
            case dict():
                return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
            case list():
                return "[" + ",".join(map(written, value)) + "]"
            case _:
                return dumps(value)

    def render(calls):
        return "".join(f"{begin}call:{name}{written(arguments)}{end}" for name, arguments in calls)

    return render


RENDERERS = {
    "hermes": _json_calls("<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3_json": _json_calls("", "", "; ", "parameters"),
    "mistral": _around("", "[TOOL_CALLS]", "[ARGS]", "", ""),
    "pythonic": python_calls("", ""),
    "lfm2": python_calls("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v3": _around(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _around(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _tags(
        "<｜DSML｜function_calls>\n",
        lambda name: f'<｜DSML｜invoke name="{name}">\n',
        lambda key, value, is_string: (
            f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">{value}</｜DSML｜parameter>\n'
        ),
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
    ),
    "qwen3_coder": _tags(
        "",
        lambda name: f"<tool_call>\n<function={name}>\n",
        lambda key, value, _: f"<parameter={key}>\n{value}\n</parameter>\n",
        "</function>\n</tool_call>",
        "",
        "\n",
    ),
    "glm45": _tags(
        "",
        lambda name: f"<tool_call>{name}\n",
        lambda key, value, _: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "</tool_call>",
        "",
        "\n",
    ),
    "glm47": _tags(
        "",
        lambda name: f"<tool_call>{name}",
        lambda key, value, _: f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        "</tool_call>",
        "",
    ),
    "kimi_k2": _around(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        ":#<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "minimax_m2": _tags(
        "<minimax:tool_call>\n",
        lambda name: f'<invoke name="{name}">\n',
        lambda key, value, _: f'<parameter name="{key}">{value}</parameter>\n',
        "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "gpt-oss": _around(
        "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", "<|call|><|start|>assistant"
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}

MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek_v3": tuple(
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    ),
    "deepseek_v31": tuple(
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    ),
    "deepseek_v32": ("｜DSML｜",),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": tuple(
        f"<|tool_call{name}|>" for name in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
    ),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
"""The added tokens of each family's tokenizers."""
