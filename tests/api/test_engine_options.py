"""What `Engine(...)` and `Runtime(...)` take: options by our names and by those of SGLang and vLLM. No engine is started."""

import pydoc
from pathlib import Path
from typing import Any

import pytest

from headrace.api.arguments import generate_request
from headrace.api.engine import Engine
from headrace.api.options import option_values
from headrace.api.runtime import Runtime
from headrace.errors import ConfigError, ModelError, RequestError


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"model": "a", "max_model_len": 512}, {"model_path": "a", "context_length": 512}),
        ({"tensor_parallel_size": 2, "enforce_eager": True}, {"tp_size": 2, "disable_cuda_graph": True}),
        ({"gpu_memory_utilization": 0.5, "trust_remote_code": True}, {"mem_fraction_static": 0.5}),
        ({"max_num_batched_tokens": 64}, {"max_prefill_tokens": 64, "chunked_prefill_size": -1}),
        ({"dtype": "half", "quantization": "awq"}, {"dtype": "float16"}),
        ({"lora_paths": ["a=b", "c=d"], "max_model_len": None}, {"lora_paths": "a=b,c=d"}),
        ({"enable_prefix_caching": False}, {"disable_radix_cache": True}),
        ({"port": 5, "is_embedding": False, "api_key": None}, {"port": 5, "is_embedding": False, "api_key": None}),
    ],
)
def test_options_may_be_written_as_on_the_command_line(given: dict[str, Any], values: dict[str, Any]):
    assert option_values(None, given) == values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_modl_len": 3, "modle_path": "x"},
            "unknown option: max_modl_len.*, modle_path; did you mean model_path?",
        ),
        ({"max_model_len": 3, "context_length": 4}, "--context-length is set twice"),
        ({"context_length": 3, "max_model_len": 4}, "--context-length is set twice"),
        ({"max_model_len": "long"}, "max_model_len: --context-length must be a whole number, got 'long'"),
        ({"max_logprobs": 5}, "max_logprobs: --max-logprobs is not an option here"),
        ({"enable_prefix_caching": True, "disable_radix_cache": True}, "--enable-prefix-caching cannot be combined"),
    ],
)
@pytest.mark.parametrize("kind", [Engine, Runtime])
def test_what_is_wrong_is_told(kind: Any, given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        kind(**given)


def test_the_model_is_named_by_its_place_or_by_its_name():
    assert option_values("a", {"port": 0}) == {"model_path": "a", "port": 0}
    with pytest.raises(ModelError, match="/no/such/model"):
        Engine("/no/such/model")
    with pytest.raises(ConfigError, match="twice"):
        Engine("a", model_path="a")
    with pytest.raises(ConfigError, match="twice"):
        Runtime("a", model="a")
    assert option_values(Path("a"), {})["model_path"] == Path("a")


@pytest.mark.parametrize("kind", [Engine, Runtime])
@pytest.mark.parametrize("model", [600.0, ["a"]])
def test_only_the_model_is_given_by_its_place(kind: Any, model: Any):
    for named in ({}, {"model_path": "a"}):
        with pytest.raises(ConfigError, match=r"a name or a path, got .*; other arguments are given by their names"):
            kind(model, **named)


@pytest.mark.parametrize("kind", [Engine, Runtime])
def test_help_shows_the_options(kind: Any):
    text = pydoc.plain(pydoc.render_doc(kind))
    assert "max_total_tokens: int | None = None\n |          Size of the KV cache, in tokens" in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"temprature": 0}, "temperature"),
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"max_completion_tokens": 3}, "max_new_tokens"),
        ({"stop_token_id": [3]}, "stop_token_ids"),
    ],
)
def test_a_wrong_sampling_parameter_names_the_right_one(given: dict[str, Any], meant: str):
    (name,) = given
    with pytest.raises(
        RequestError, match=f"unknown field 'sampling_params.{name}'; did you mean 'sampling_params.{meant}'"
    ):
        generate_request("a", given, None, False, {})
