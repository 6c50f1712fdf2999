"""Options of models that make vectors: what is refused by name, and what an encoder sets itself."""

import pytest

from headrace.config.checks import ENCODER_RUNNING, ENCODER_STEP_TOKENS, check_pooling, encoder_args
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

USELESS = {
    "lora_paths": "a=b",
    "max_total_tokens": 4096,
    "kv_cache_dtype": "float32",
    "enable_torch_compile": True,
    "cuda_graph_max_bs": 8,
}


@pytest.mark.parametrize("name", USELESS)
def test_an_encoder_refuses_what_it_has_no_use_for(name):
    args = ServerArgs(**{name: USELESS[name]})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: .*leave the option out"):
        check_pooling(args, is_encoder=True)
    check_pooling(args, is_encoder=False)


@pytest.mark.parametrize("is_encoder", [False, True])
def test_what_guesses_or_divides_a_model_is_refused_for_all_that_make_vectors(is_encoder):
    for options, message in (
        ({"speculative_algorithm": "ngram"}, "generates no tokens"),
        ({"tp_size": 2}, "--dp-size"),
        ({"model_impl": "transformers"}, "models that generate"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_pooling(ServerArgs(**options), is_encoder)


def test_a_step_takes_the_longest_text_whole():
    short, long = encoder_args(ServerArgs(), 512), encoder_args(ServerArgs(), 8192)
    assert (short.chunked_prefill_size, short.max_prefill_tokens) == (ENCODER_STEP_TOKENS, ENCODER_STEP_TOKENS)
    assert (long.chunked_prefill_size, long.max_prefill_tokens) == (8192, 8192)
    assert short.max_running_requests == ENCODER_RUNNING
    assert encoder_args(ServerArgs(max_running_requests=9), 512).max_running_requests == 9
    assert encoder_args(short, 512) == short, "the scheduler's process does it again"


def test_steps_that_would_cut_a_text_are_refused():
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 128: .*512 tokens is computed in one step"):
        encoder_args(ServerArgs(chunked_prefill_size=128), 512)
    assert encoder_args(ServerArgs(chunked_prefill_size=128, context_length=100), 512).chunked_prefill_size >= 100
