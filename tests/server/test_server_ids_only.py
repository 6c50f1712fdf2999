"""--skip-tokenizer-init over HTTP: ids in, ids out; whatever needs a text is a 400 that says why."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, make_app, running_server

from headrace.errors import ConfigError
from headrace.server.context import ServerStatus

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def ids_only() -> Iterator[Running]:
    with running_server(skip_tokenizer_init=True) as running:
        yield running


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES}, "messages"),
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": ["hi"]}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [1], "echo": True}, "echo"),
        ("/v1/completions", {"model": MODEL, "prompt": [1], "logprobs": 0}, "logprobs"),
        ("/tokenize", {"prompt": "hi"}, "prompt"),
        ("/v1/detokenize", {"tokens": [1]}, "tokens"),
    ],
)
def test_what_needs_a_tokenizer_is_refused(ids_only: Running, path: str, body: dict[str, Any], param: str):
    reply = httpx.post(ids_only.url + path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "no_tokenizer")
    assert "--skip-tokenizer-init" in error["message"]


def test_ids_are_taken(ids_only: Running):
    ids_only.frontend.reset()
    assert httpx.post(ids_only.url + "/v1/completions", json={"model": MODEL, "prompt": [65]}).status_code == 200
    assert httpx.post(ids_only.url + "/generate", json={"input_ids": [65]}).status_code == 200


def test_it_warms_up_with_an_id_and_not_with_a_chat():
    with running_server(skip_tokenizer_init=True) as running:
        assert running.status.started
    frontend = running.frontend
    with pytest.raises(ConfigError, match="--warmups chat"):
        make_app(frontend, ServerStatus(), skip_tokenizer_init=True, warmups="chat")
