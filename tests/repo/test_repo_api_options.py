"""The types of the arguments of `Engine` and `Runtime` are those of what they become."""

import inspect
from typing import Any, get_type_hints

import pytest

from headrace.api.engine import Engine
from headrace.api.options import ChatOptions, GenerateOptions, SamplingOptions, ServerOptions
from headrace.api.runtime import Runtime
from headrace.config.server_args import ServerArgs
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.openai.protocol import ChatCompletionRequest

STRUCTS = {"response_format", "session_params", "thinking_budget", "image_data", "audio_data", "video_data"}
"""Objects in Python and JSON, structs within."""

ARGUMENTS = {"input_ids", "sampling_params", "stream"}


@pytest.mark.parametrize(
    ("options", "target", "is_complete"),
    [
        (ServerOptions, ServerArgs, True),
        (SamplingOptions, SamplingParams, True),
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
        assert unpacked(kind.__init__) == "ServerOptions"
        for name in ("generate", "async_generate"):
            assert unpacked(getattr(kind, name)) == "GenerateOptions"
        for name in ("chat", "async_chat"):
            assert unpacked(getattr(kind, name)) == "ChatOptions"
