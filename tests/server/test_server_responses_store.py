"""Responses that are kept: by whom they can be read, and when they go."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import Running, running_server

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, NotFoundError
from headrace.server.responses.store import ResponseStore

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys.toml"
    keys.write_text(
        '[[keys]]\nname = "one"\nkey = "first-key-of-the-file"\n[[keys]]\nname = "two"\nkey = "second-key-of-the-file"\n'
    )
    keys.chmod(0o600)
    options = {"api_key": "user-key-1234567", "admin_api_key": "admin-key-1234567", "api_key_file": str(keys)}
    with running_server(fake_context_length=4096, max_stored_responses=16, **options) as server:
        yield server


@pytest.fixture
def server(running: Running) -> Running:
    running.frontend.reset()
    return running


def client_with(server: Running, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=20, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with client_with(server, "user-key-1234567") as found:
        yield found


def made(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = client.post(PATH, json={"input": "a", "max_output_tokens": 200} | fields)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


def prompt_of(server: Running) -> str:
    return server.frontend.tokenizer.decode(server.frontend.calls[-1].input_ids or [], False)


def test_a_response_is_continued(client: httpx.Client, server: Running):
    server.frontend.script.text = '<think>hm</think>One.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "name": "f"}]
    first = made(client, input="Q1", instructions="I1", tools=tools)
    assert first["store"] is True
    call = first["output"][-1]
    server.frontend.script.text = "Two."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "R"}
    second = made(client, input=[output], previous_response_id=first["id"], instructions="I2")
    assert second["previous_response_id"] == first["id"]
    third = made(client, input="Q3", previous_response_id=second["id"])
    prompt = prompt_of(server)
    assert "I1" not in prompt
    assert "I2" not in prompt
    assert prompt == (
        '<|user|>Q1\n<|assistant|>One.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        "<|user|><tool_response>\nR\n</tool_response>\n<|assistant|>Two.\n<|user|>Q3\n<|assistant|>"
    )
    listed = client.get(f"{PATH}/{third['id']}/input_items", params={"order": "asc"}).json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output", "message", "message"]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Q1"}]
    assert (listed["has_more"], listed["first_id"]) == (False, listed["data"][0]["id"])


def test_a_response_is_read_and_forgotten(client: httpx.Client):
    response = made(client)
    assert client.get(f"{PATH}/{response['id']}").json() == response
    assert client.get(f"{PATH}/{response['id']}", params={"stream": "true"}).status_code == 400
    assert client.post(f"{PATH}/{response['id']}/cancel").status_code == 400
    deleted = client.delete(f"{PATH}/{response['id']}")
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    for reply in (
        client.get(f"{PATH}/{response['id']}"),
        client.delete(f"{PATH}/{response['id']}"),
        client.post(f"{PATH}/{response['id']}/cancel"),
        client.get(f"{PATH}/{response['id']}/input_items"),
        client.post(PATH, json={"input": "a", "previous_response_id": response["id"]}),
    ):
        assert reply.status_code == 404, reply.text
        assert response["id"] in reply.json()["error"]["message"]
    assert client.get(f"{PATH}/a/b").status_code == 404
    assert client.get(f"{PATH}/a/b/c").status_code == 404


def test_a_streamed_response_is_kept_as_it_ended(client: httpx.Client, server: Running):
    text = client.post(PATH, json={"input": "a", "stream": True}).text
    response_id = text.split('"id":"', 1)[1].split('"', 1)[0]
    kept = client.get(f"{PATH}/{response_id}").json()
    assert (kept["status"], kept["output"][0]["content"][0]["text"]) == ("completed", server.frontend.script.text)


def test_store_false_keeps_nothing(client: httpx.Client):
    response = made(client, store=False)
    assert response["store"] is False
    assert client.get(f"{PATH}/{response['id']}").status_code == 404


def test_what_no_text_can_hold_is_no_fault_of_the_server(client: httpx.Client):
    for body in (b'{"input": "\\ud800"}', b'{"input": "a", "metadata": {"a": "\\udc00"}}'):
        reply = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), reply.text


def test_items_are_listed_in_pages(client: httpx.Client):
    response = made(client, input=[{"role": "user", "content": str(number), "id": f"m{number}"} for number in range(5)])
    path = f"{PATH}/{response['id']}/input_items"

    def ids(**query: Any) -> list[str]:
        return [item["id"] for item in client.get(path, params=query).json()["data"]]

    assert ids() == ["m4", "m3", "m2", "m1", "m0"]
    assert ids(limit=2, after="m3") == ["m2", "m1"]
    assert ids(order="asc", limit=2) == ["m0", "m1"]
    assert client.get(path, params={"limit": 2}).json()["has_more"] is True
    assert client.get(path, params={"after": "other"}).status_code == 404
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "random"}):
        assert client.get(path, params=query).status_code == 400, query


def test_an_item_is_referred_to(client: httpx.Client, server: Running):
    response = made(client)
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    made(client, input=[{"role": "user", "content": "Q"}, reference, {"role": "user", "content": "again"}])
    assert prompt_of(server) == "<|user|>Q\n<|assistant|>Hello, wörld 🙂!\n<|user|>again\n<|assistant|>"
    reply = client.post(PATH, json={"input": [{"type": "item_reference", "id": "msg_0"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input")


def test_only_the_key_that_made_a_response_sees_it(client: httpx.Client, server: Running):
    names = ("user-key-1234567", "admin-key-1234567", "first-key-of-the-file", "second-key-of-the-file")
    for owner in names:
        with client_with(server, owner) as theirs:
            response = made(theirs)
        for name in names:
            with client_with(server, name) as other:
                seen = other.get(f"{PATH}/{response['id']}").status_code == 200
                assert seen == (name == owner)
                item = {"type": "item_reference", "id": response["output"][0]["id"]}
                assert (other.post(PATH, json={"input": [item]}).status_code == 200) == (name == owner)
                continued = {"input": "a", "previous_response_id": response["id"], "store": False}
                assert (other.post(PATH, json=continued).status_code == 200) == (name == owner)
        with client_with(server, owner) as theirs:
            theirs.delete(f"{PATH}/{response['id']}")


def response(name: str, size: int = 10) -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "id": f"msg_{name}", "content": "x" * size}]}


def test_the_oldest_goes_when_there_are_too_many():
    store = ResponseStore(2)
    for name in ("a", "b", "c"):
        store.put("me", response(name), None, [])
    assert len(store) == 2
    with pytest.raises(NotFoundError):
        store.get("me", "a")
    assert json.loads(store.get("me", "c").response) == response("c")
    assert set(store.items_of("me", ("msg_a", "msg_b", "msg_c"))) == {"msg_b", "msg_c"}
    assert store.items_of("other", ("msg_b",)) == {}


def test_bytes_are_bounded_and_the_tenant_with_the_most_pays():
    store = ResponseStore(100, max_bytes=2000)
    store.put("all", response("s"), None, [], "small")
    for number in range(20):
        store.put("all", response(f"r{number}", 300), None, [], "large")
    assert store.get("all", "s")
    assert 3 <= len(store) <= 6
    store.put("all", response("huge", 3000), None, [], "large")
    with pytest.raises(NotFoundError):
        store.get("all", "huge")


def test_one_large_response_of_a_tenant_outlives_the_many_small_ones_of_another():
    store = ResponseStore(10, max_bytes=100_000)
    store.put("all", response("large", 10_000), None, [], "few")
    for number in range(30):
        store.put("all", response(f"r{number}"), None, [], "many")
    assert store.get("all", "large")
    assert len(store) == 10
    store.delete("all", "large")
    store.put("all", response("last"), None, [], "many")
    assert len(store) == 10, "one alone may have all"


def test_a_response_counts_with_what_it_continues():
    store = ResponseStore(100, max_bytes=4000)
    before = None
    for number in range(30):
        store.put("me", response(f"r{number}", 200), before, [])
        try:
            before = store.get("me", f"r{number}")
        except NotFoundError:
            break
        assert len(before.items()) == number + 1
    assert number < 20, "a conversation has an end"
    store.delete("me", f"r{number - 1}")
    assert before is not None
    assert before.num_bytes <= 4000


def test_workers_would_keep_their_own():
    with pytest.raises(ConfigError, match="--max-stored-responses"):
        ServerArgs(max_stored_responses=1, tokenizer_worker_num=2)
