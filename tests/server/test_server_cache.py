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


def marked(**mark):
    return {"type": "text", "text": "You know the rules of chess. " * 4, "cache_control": {"type": "ephemeral", **mark}}


async def test_marks_of_anthropic_s_messages_become_pins_if_the_server_says_so(frontend):
    question = {"role": "user", "content": [{"type": "text", "text": "Which is the strongest piece?"}]}
    body = {"model": "", "max_tokens": 4, "system": [marked(ttl="1h")], "messages": [question]}
    whole = body | {"cache_control": {"type": "ephemeral"}}
    for option, asked, num_pins in (("ignore", whole, 0), ("pin", body, 1), ("pin", whole, 2)):
        app, _ = make_app(frontend, ServerStatus(started=True), anthropic_cache_control=option)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            reply = (await client.post("/v1/messages", json=asked)).json()
            pins = frontend.asked_pins[-1]
            assert len(pins) == num_pins
            prompt = frontend.calls[-1].input_ids
            if pins:
                text = frontend.tokenizer.decode(prompt[: pins[0].num_tokens])
                assert text.rstrip("\n").rstrip().endswith(("rules of chess.", "<|user|>"))
                assert (pins[0].ttl_s, pins[0].is_hint) == (3600, True)
            if num_pins == 2:
                assert (pins[1].num_tokens, pins[1].ttl_s) == (len(prompt), 300)
            usage, kept = reply["usage"], max((pin.num_tokens for pin in pins), default=0)
            assert usage["cache_read_input_tokens"] == 2
            counts = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
            assert counts == len(prompt)
            page_size = app.context.model.ready.page_size if hasattr(app, "context") else None
            assert usage["cache_creation_input_tokens"] == (0 if not pins else pytest.approx(kept - 2, abs=16)), (
                page_size
            )


async def test_marks_that_are_none_are_refused(frontend):
    app, _ = make_app(frontend, ServerStatus(started=True), anthropic_cache_control="pin")
    question = {"role": "user", "content": "x"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for system in ([marked(ttl="2h")], [marked(scope="x")], [marked()] * 5):
            body = {"model": "", "max_tokens": 4, "system": system, "messages": [question]}
            reply = await client.post("/v1/messages", json=body)
            assert reply.status_code == 400
            assert "cache_control" in reply.text
        assert not frontend.calls


async def test_slots_of_llama_cpp_are_saved_restored_and_erased(frontend):
    app, _ = make_app(frontend, ServerStatus(started=True), session_dir="/kept")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for slot in (2, -1, None, "x"):
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
                ("/v1/completions", {"prompt": "hello"}),
            ):
                reply = await client.post(path, json={"model": "", "max_tokens": 1, "id_slot": slot, **body})
                assert reply.status_code == 200, reply.text
        assert frontend.slots.asked == [2, 2, 0, 0, 0, 0, 0, 0]

        saved = (await client.post("/slots/2?action=save", json={"filename": "a.bin"})).json()
        restored = (await client.post("/slots/0?action=restore", json={"filename": "a.bin"})).json()
        erased = (await client.post("/slots/2?action=erase")).json()
        assert (saved["n_saved"], restored["n_restored"], erased) == (8, 0, {"id_slot": 2, "n_erased": 8})
        assert frontend.slots.asked[8:] == [("save", 2, "a.bin"), ("restore", 0, "a.bin"), ("erase", 2)]

        for path, name in (
            ("/slots/x?action=save", "a"),
            ("/slots/-1?action=save", "a"),
            ("/slots/0?action=load", "a"),
            ("/slots/0", "a"),
            ("/slots/0?action=save", "../a"),
            ("/slots/0?action=save", "a\n"),
            ("/slots/0?action=save", ""),
            ("/slots/0?action=restore", None),
        ):
            reply = await client.post(path, json={} if name is None else {"filename": name})
            assert reply.status_code == 400, (path, name, reply.text)
        assert len(frontend.slots.asked) == 11


async def test_slots_need_a_folder(client):
    for action in ("save", "restore", "erase"):
        reply = await client.post(f"/slots/0?action={action}", json={"filename": "x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unsupported_route")
        assert "--session-dir" in reply.text
