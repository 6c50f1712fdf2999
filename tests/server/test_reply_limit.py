"""Chats that give no limit end at --default-max-tokens, in every API; other routes and limits that are given are not touched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import running_server

from headrace.config.server_args import ServerArgs
from headrace.processes.model_files import reply_limit

MESSAGES = [{"role": "user", "content": "Hi"}]
WHOLE = "Hello, wörld"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server(default_max_tokens=5) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        server.frontend.script.text = WHOLE
        yield client


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({}, "Hello", "length"),
        ({"max_tokens": None}, "Hello", "length"),
        ({"max_tokens": 3}, "Hel", "length"),
        ({"max_completion_tokens": 300}, WHOLE, "stop"),
        ({"max_tokens": -1}, WHOLE, "stop"),
    ],
)
def test_chat_completions(client: httpx.Client, fields: dict[str, Any], text: str, reason: str):
    choice = client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [({}, "Hello", "length"), ({"num_predict": -1}, WHOLE, "stop"), ({"num_predict": 3}, "Hel", "length")],
)
def test_ollama_s_chats(client: httpx.Client, options: dict[str, Any], text: str, reason: str):
    body = {"model": "org/tiny", "messages": MESSAGES, "stream": False, "options": options}
    reply = client.post("/api/chat", json=body).json()
    assert (reply["message"]["content"], reply["done_reason"]) == (text, reason)


def test_responses(client: httpx.Client):
    reply = client.post("/v1/responses", json={"input": "Hi"}).json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 300}).json()["status"] == "completed"


def test_what_is_no_chat_is_not_limited(client: httpx.Client):
    choice = client.post("/v1/completions", json={"prompt": "Hi"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (WHOLE, "stop")


def test_clients_can_read_it(client: httpx.Client):
    assert client.get("/model_info").json()["default_max_tokens"] == 5


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"model_path": "smollm2"}, 1024),
        ({"model_path": "gemma3-270m"}, 1024),
        ({"model_path": "smollm2", "default_max_tokens": 0}, 0),
        ({"model_path": "org/name"}, 0),
        ({"model_path": "/a/file.gguf", "default_max_tokens": 7}, 7),
    ],
)
def test_small_models_have_one_by_themselves(options: dict[str, Any], limit: int):
    assert reply_limit(ServerArgs(**options)) == limit


def test_a_file_of_that_name_is_not_that_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").touch()
    (tmp_path / "gemma3-270m").mkdir()

    assert reply_limit(ServerArgs(model_path="smollm2")) == 0
    assert reply_limit(ServerArgs(model_path="gemma3-270m")) == 1024
