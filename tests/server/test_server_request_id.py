"""`x-request-id`: the client's own, else the rid; on every reply."""

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server

from headrace.errors import CapacityError

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": MODEL, "prompt": "hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path,body", [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
def test_without_one_the_id_of_the_completion_is_given(client: httpx.Client, path: str, body: dict, stream: bool):
    reply = client.post(path, json=body | {"stream": stream})
    assert f'"id":"{reply.headers["x-request-id"]}"' in reply.text


def test_a_rid_is_given_back(client: httpx.Client):
    for path, body in (("/generate", {"text": "hi"}), ("/v1/completions", PROMPT)):
        assert client.post(path, json=body | {"rid": "mine"}).headers["x-request-id"] == "mine"
    reply = client.post("/generate", json={"text": "hi"})
    assert reply.json()["meta_info"]["id"] == reply.headers["x-request-id"]


def test_the_client_s_own_id_is_given_back_and_names_nothing(client: httpx.Client, server: Running):
    for _ in range(2):
        reply = client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "trace-7"})
        assert reply.headers.get_list("x-request-id") == ["trace-7"]
    assert len({call.rid for call in server.frontend.calls} | {"trace-7"}) == 3


@pytest.mark.parametrize("bad", ["", "a b", "x" * 200, "caf\u00e9"])
def test_an_id_that_is_not_sane_is_replaced(client: httpx.Client, bad: str):
    given = client.get("/ping", headers=[(b"x-request-id", bad.encode())]).headers["x-request-id"]
    assert given not in ("", bad)


def test_a_rid_that_no_header_can_hold_stays_out_of_it(client: httpx.Client):
    reply = client.post("/generate", json={"text": "hi", "rid": "a\r\nset-cookie: b"})
    assert "set-cookie" not in reply.headers
    assert reply.headers["x-request-id"]


def test_errors_have_one_too(client: httpx.Client, server: Running):
    server.frontend.script.fail_at, server.frontend.script.error = 0, CapacityError("full")
    replies = [
        client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "t"}),
        client.post("/v1/completions", content=b"{", headers={"x-request-id": "t", "content-type": "application/json"}),
        client.get("/nowhere", headers={"x-request-id": "t"}),
        client.get("/generate", headers={"x-request-id": "t"}),
    ]
    assert [reply.status_code for reply in replies] == [503, 400, 404, 405]
    assert {reply.headers["x-request-id"] for reply in replies} == {"t"}


def test_so_has_a_refused_key():
    with running_server(api_key="k") as running:
        reply = httpx.get(running.url + "/v1/models")
    assert reply.status_code == 401
    assert reply.headers["x-request-id"]


def test_a_page_of_an_allowed_origin_may_read_it():
    with running_server(allow_origins="https://a.example") as running:
        reply = httpx.get(running.url + "/ping", headers={"origin": "https://a.example"})
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
