"""HTTP requests are counted by declared route and status: once each, and without names that clients can invent."""

import contextlib
import re
from collections import Counter

import httpx
import pytest
from fake_frontend import MODEL, Running, Script, running_server

from headrace.server.middleware import CLIENT_GONE, UNKNOWN_ROUTE, RequestCounter, RouteNames
from headrace.server.route_table import route_table


def test_each_request_counts_once_under_its_declared_route(client: httpx.Client, server: Running):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    client.post("/v1/chat/completions", json=chat)
    client.post("/v1/chat/completions", json=chat | {"stream": True})
    client.post("/v1/chat/completions", json={"model": MODEL})
    client.get("/v1/chat/completions")
    client.get("/v1/requests/known")
    client.get("/v1/requests/some/other")
    client.get("/v1/models/" + MODEL)
    client.get("/health", headers={"origin": "https://evil.example"})
    client.get("/nowhere/1")
    client.get("/nowhere/2")

    assert Counter(server.frontend.replies) == {
        ("/v1/chat/completions", 200): 2,
        ("/v1/chat/completions", 400): 1,
        ("/v1/chat/completions", 405): 1,
        ("/v1/requests/{id:path}", 200): 1,
        ("/v1/requests/{id:path}", 404): 1,
        ("/v1/models/{id:path}", 200): 1,
        ("/health", 403): 1,
        (UNKNOWN_ROUTE, 404): 2,
    }


def test_refused_keys_and_failures_count_under_the_route_too():
    with running_server(api_key="secret") as running:
        running.frontend.script = Script(error=RuntimeError("a bug"), fail_at=0)
        httpx.get(running.url + "/v1/requests/a")
        httpx.get(running.url + "/nowhere")
        httpx.post(running.url + "/generate", json={"text": "a"}, headers={"authorization": "Bearer secret"})

        assert running.frontend.replies == [("/v1/requests/{id:path}", 401), (UNKNOWN_ROUTE, 401), ("/generate", 500)]


def test_every_declared_path_is_its_own_label(server: Running):
    paths = [spec.path for spec in route_table(server.app.state.context)]
    names = RouteNames(paths)

    assert {path: names.of(re.sub(r"{\w+(:path)?}", "x", path)) for path in paths} == {path: path for path in paths}


@pytest.mark.parametrize("error", [None, OSError("lost")])
async def test_a_request_without_a_reply_counts_as_one_whose_client_left(error):
    async def app(scope, receive, send):
        if error is not None:
            raise error

    counted = []
    counter = RequestCounter(app, RouteNames(["/a"]), lambda *reply: counted.append(reply))
    with contextlib.suppress(OSError):
        await counter({"type": "http", "path": "/a"}, None, None)

    assert counted == [("/a", CLIENT_GONE)]


def test_nothing_is_counted_without_metrics():
    with running_server(disable_metrics=True) as running:
        assert httpx.get(running.url + "/health").status_code == 200
        assert running.frontend.replies == []
