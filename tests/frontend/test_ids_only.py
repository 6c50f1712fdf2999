"""A server without a tokenizer: what the front end refuses, and that no id ever has a text."""

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, RequestError
from headrace.frontend.tokenize import NoTokenizer
from headrace.text.incremental import IncrementalDecoder


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"text": "hi"}, "text"),
        ({"input_ids": [1], "return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "x"}}, "stop_regex"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {"bad_words": ["x"]}]}, "bad_words"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {"json_schema": "true"}]}, "json_schema"),
        ({"input_ids": [1], "sampling_params": {"choice": ["a"]}}, "choice"),
    ],
)
async def test_what_needs_a_tokenizer_is_refused_by_its_name(make_frontend, fields, param):
    frontend = make_frontend(skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="--skip-tokenizer-init") as caught:
        await frontend.start(**fields)
    assert (caught.value.param, caught.value.code) == (param, "no_tokenizer")
    assert frontend.is_clean


async def test_ids_stop_by_ids(make_frontend):
    frontend = make_frontend(skip_tokenizer_init=True)
    [answer] = await frontend.call(input_ids=[5, 6], sampling_params={"stop_token_ids": [7], "stop": []})
    assert answer["output_ids"] == [5, 6]
    with pytest.raises(RequestError, match="capacity_of_str_len"):
        await frontend.manager.open_session(capacity_of_str_len=5)
    assert await frontend.manager.open_session()


def test_no_id_has_a_text_and_no_text_has_ids():
    tokenizer = NoTokenizer()
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    assert tokenizer.decode([0, 5, 99999]) == ""
    assert "".join([decoder.push(i) for i in (0, 5, 99999)]) + decoder.flush() == ""
    with pytest.raises(RequestError):
        tokenizer.encode("a")


@pytest.mark.parametrize("other", [{"tokenizer_path": "t"}, {"chat_template": "{{ x }}"}])
def test_what_needs_a_tokenizer_is_refused_at_start(other):
    with pytest.raises(ConfigError, match="cannot be combined with --skip-tokenizer-init"):
        ServerArgs(skip_tokenizer_init=True, **other)
