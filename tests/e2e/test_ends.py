"""What ends an answer: the ends of the model in every API, and in chats also the end of a turn. A bias makes the model write one token alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, serving

CONFIG_END, TURN_END, TOKENIZER_END, OTHER = 17, 2, 0, 300
"""What config.json says, what the chat template writes after a reply, what tokenizer_config.json says, and a token that ends nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> str:
    folder = tmp_path_factory.mktemp("ends")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    for name, change in (
        ("config.json", {"eos_token_id": CONFIG_END}),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
    ):
        file = Path(folder, name)
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with serving(model, "--max-total-tokens", "4096", "--tokenizer-worker-num", "2") as it:
        yield it


def ending(server: ServerProcess, route: str, token_id: int, **fields: Any) -> tuple[str, Any, int]:
    """Why a call ended that could hardly write another token than this, by which token, and how many tokens it has."""
    shown = {"messages": [{"role": "user", "content": "hi"}]} if route.startswith("chat") else {"prompt": "hi"}
    body = {**shown, "temperature": 0, "max_tokens": 6, "logit_bias": {str(token_id): 100}, **fields}
    reply = server.post(f"/v1/{route}", body)
    choice = reply["choices"][0]
    assert choice["stop_reason"] is None
    return choice["finish_reason"], choice["matched_stop"], reply["usage"]["completion_tokens"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("token_id", [CONFIG_END, TOKENIZER_END, TURN_END, OTHER])
def test_an_answer_ends_with_the_ends_of_all_files_and_a_chat_with_that_of_a_turn(server, route, token_id):
    ends = {CONFIG_END, TOKENIZER_END} | ({TURN_END} if route == "chat/completions" else set())
    stopped = ("stop", token_id, 1)

    assert ending(server, route, token_id) == (stopped if token_id in ends else ("length", None, 6))
    assert ending(server, route, token_id, ignore_eos=True) == ("length", None, 6)


@pytest.mark.parametrize("token_id", [CONFIG_END, TOKENIZER_END, TURN_END])
def test_no_end_comes_before_the_least_number_of_tokens(server, token_id):
    assert ending(server, "chat/completions", token_id, min_tokens=4) == ("stop", token_id, 5)


def test_no_text_is_left_of_an_end(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logit_bias": {str(TURN_END): 100}}
    choice = server.post("/v1/chat/completions", chat | {"skip_special_tokens": False})["choices"][0]

    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_an_output_that_follows_a_grammar_may_end_with_the_turn(server, route):
    finish, matched, count = ending(server, route, TURN_END, max_tokens=40, regex="[ab]{3}")

    assert (finish, matched) == ("stop", TURN_END)
    assert count > 1
