"""Routes of cached prefixes: what a body may say, and whose pin it becomes."""

import httpx
import pytest
from fake_frontend import FakeFrontend, FakePins, make_app

from headrace.server.context import ServerStatus


@pytest.fixture
def frontend():
    return FakeFrontend()


@pytest.fixture
def client(frontend):
    app, _ = make_app(frontend, ServerStatus(started=True))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


async def test_a_prompt_in_each_form_becomes_a_call_of_the_caller(client, frontend):
    text = {"prompt": "hello", "ttl": 60, "cache_salt": "s", "extra_key": "k"}
    chat = [{"role": "user", "content": "hello"}]
    for body in (text, {"input_ids": [1, 2, 3]}, {"messages": chat}, {"messages": chat, "add_generation_prompt": True}):
        reply = await client.post("/v1/cache/pin", json=body)
        assert (reply.status_code, reply.json()["id"]) == (200, FakePins.ID)
    (by_text, ttl_s, caller), (by_ids, default_s, _), (by_chat, *_), (longer, *_) = frontend.pins.asked
    assert (by_text.text, by_text.cache_salt, by_text.extra_key, ttl_s) == ("hello", "s", "k", 60)
    assert (by_ids.input_ids, default_s) == ([1, 2, 3], 300)
    assert caller.is_admin
    assert by_chat.input_ids == longer.input_ids[: len(by_chat.input_ids)] != longer.input_ids


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "ttl": 0}, "ttl"),
        ({"prompt": "a", "ttl": 1e9}, "ttl"),
        ({"prompt": "a", "ttl": "5m"}, "ttl"),
        ({"prompt": "a", "tokens": 3}, "tokens"),
        ({"prompt": "a", "model": "another"}, "model"),
        ({"prompt": "a" * 10**7}, "prompt"),
        ({"input_ids": [1] * 10**5}, "input_ids"),
        ({"input_ids": ["1"]}, "input_ids"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
async def test_other_bodies_are_refused_by_the_field(client, frontend, body, param):
    reply = await client.post("/v1/cache/pin", json=body)
    assert reply.status_code in (400, 404, 413), reply.text
    assert (reply.json()["error"]["param"] or "").split("[")[0].split(".")[0] == param, reply.text
    assert not frontend.pins.asked


async def test_a_pin_is_let_go_by_its_id(client, frontend):
    assert (await client.get("/v1/cache")).json()["pins"] == [{"id": FakePins.ID}]
    for body in ({"id": "pin_other"}, {"id": "../../x"}):
        reply = await client.post("/v1/cache/unpin", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "pin_not_found")
    for body in ({}, {"id": 1}, {"id": FakePins.ID, "all": True}):
        assert (await client.post("/v1/cache/unpin", json=body)).status_code == 400
    assert (await client.post("/v1/cache/unpin", json={"id": FakePins.ID})).json()["success"]
    assert (await client.get("/v1/cache")).json()["pins"] == []
