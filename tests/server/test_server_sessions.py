"""The session routes."""

import httpx
import pytest
from fake_frontend import Running


def test_open_gives_the_id_as_a_json_string(client: httpx.Client, server: Running):
    assert client.post("/open_session", json={}).json() == "s1"
    body = {"capacity_of_str_len": 1000, "session_id": "mine", "timeout": 5.0}
    assert client.post("/open_session", json=body).json() == "mine"
    assert server.frontend.opened == [(0, None, None), (1000, "mine", 5.0)]


def test_close_says_whether_there_was_one(client: httpx.Client, server: Running):
    assert client.post("/close_session", json={"session_id": "s1"}).json()["success"] is True
    reply = client.post("/close_session", json={"session_id": "other"})
    assert reply.status_code == 404
    assert server.frontend.closed == ["s1"]


@pytest.mark.parametrize("body", [{"session_id": 5}, {"timeout": "x"}, {"unknown": 1}])
def test_bad_bodies_are_refused(client: httpx.Client, body):
    assert client.post("/open_session", json=body).status_code == 400
    assert client.post("/close_session", json={}).status_code == 400
