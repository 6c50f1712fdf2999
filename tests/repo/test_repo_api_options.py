"""The types of the arguments of `Engine` and `Runtime` are those of what they become."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from headrace.api.engine import Engine
from headrace.api.options import ChatOptions, EngineOptions, GenerateOptions, SeveralSamples
from headrace.api.runtime import Runtime
from headrace.config.other_servers import table
from headrace.config.server_options import ServerOptions
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.openai.protocol import ChatCompletionRequest

STRUCTS = {"response_format", "session_params", "thinking_budget", "image_data", "audio_data", "video_data"}
"""Objects in Python and JSON, structs within."""

ARGUMENTS = {"input_ids", "sampling_params", "stream"}


@pytest.mark.parametrize(
    ("options", "target", "is_complete"),
    [
        (SeveralSamples, SamplingParams, True),
        (GenerateOptions, GenerateReqInput, True),
        (ChatOptions, ChatCompletionRequest, False),
    ],
)
def test_the_names_and_types_are_the_target_s(options: Any, target: Any, is_complete: bool) -> None:
    shown, real = get_type_hints(options), get_type_hints(target)
    where = f"headrace/api/options.py: {options.__name__}"
    for name, kind in shown.items():
        assert name in real, f"{where} has {name}, which {target.__name__} has not"
        assert name in STRUCTS or kind == real[name], f"{where}: {name} must be {real[name]}"
    if is_complete:
        # What is not supported yet is an object, and left out.
        missing = {name: kind for name, kind in real.items() if name not in shown and kind != object | None}
        assert missing.keys() <= ARGUMENTS, f"{where} lacks {missing}"


def test_every_way_to_ask_has_the_types() -> None:
    def unpacked(method: Any) -> str:
        (last,) = [p for p in inspect.signature(method).parameters.values() if p.kind is p.VAR_KEYWORD]
        return last.annotation.__args__[0].__name__

    for kind in (Engine, Runtime):
        assert unpacked(kind.__init__) == "EngineOptions"
        for name in ("generate", "async_generate"):
            assert unpacked(getattr(kind, name)) == "GenerateOptions"
        for name in ("chat", "async_chat"):
            assert unpacked(getattr(kind, name)) == "ChatOptions"


def test_the_names_of_other_servers_are_those_that_the_command_line_translates() -> None:
    shown = {field.name for field in fields(EngineOptions)} - {field.name for field in fields(ServerOptions)}
    known = {name for entry in table() if entry.is_ for name in entry.names if name.startswith("--")}
    assert shown == {name[2:].replace("-", "_") for name in known} | {"model"}


TYPED = """
from headrace import Engine, Runtime
from headrace.api.options import SamplingOptions

engine, runtime = Engine("smollm2", max_model_len=512), Runtime("smollm2", tensor_parallel_size=2)
reveal_type(engine.generate("a", {"temperature": 0}))  # "dict[str, Any]"
reveal_type(engine.generate(["a"], {"n": 2}))  # "list[dict[str, Any]]"
reveal_type(engine.generate("a", {"n": 2}))  # "Any"
reveal_type(engine.generate("a", stream=True))  # "typing.Generator[dict[str, Any], None, None]"
reveal_type(runtime.generate("a"))  # "dict[str, Any]"
reveal_type(runtime.generate(["a"]))  # "list[dict[str, Any]]"
engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})
params: SamplingOptions = {"temprature": 0}  # typeddict-unknown-key
engine.generate("a", {"temprature": 0})  # call-overload
engine.generate(["a"], [{"max_tokens": 1}])  # list-item
runtime.generate("a", {"temprature": 0})  # call-overload
Engine("a", max_modl_len=3)  # call-arg
Engine(model_path="a", tp_size=2, load_format="gguf", seed=1)
Engine("a", tp_size="2")  # arg-type
Runtime("a", start_timeout_s=9.0, dtype="bfloat16")
Runtime("a", dtype="bfloat15")  # arg-type
"""


def test_a_type_checker_knows_the_answers_and_finds_wrong_names(tmp_path: Path) -> None:
    """Each line gives what its comment says, and no other is marked."""
    file = tmp_path / "typed.py"
    file.write_text(TYPED)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(file)]
    lines = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.splitlines()
    told = [line.partition("typed.py:")[2].split(": ", 1) for line in lines if "typed.py:" in line]
    marked = {int(number): text for number, text in told if "error" in text or "Revealed type" in text}
    for number, line in enumerate(TYPED.splitlines(), 1):
        expected = line.partition("  # ")[2]
        assert (expected in marked.pop(number, "")) if expected else number not in marked, (line, lines)
    assert marked == {}
