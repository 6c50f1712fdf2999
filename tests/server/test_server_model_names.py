"""One rule for names on every route: with and without `:latest`, the further names of `--served-model-name`, and adapters."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, FakeFrontend, Running, running_server
from fake_pooling import EMBEDDING, pooling_server

ALIAS, TAGGED = "gpt-5", "team/chat:8b"
USER = {"role": "user", "content": "hi"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [USER]},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [72]},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {},
    "/api/pull": {"stream": False},
}
OWN = [MODEL, f"{MODEL}:latest", ALIAS, f"{ALIAS}:latest", TAGGED, "default", "default:latest"]
ADAPTER = ["tuned", "tuned:latest", f"{MODEL}:tuned", f"{ALIAS}:tuned", f"{TAGGED}:tuned:latest"]
STRANGERS = ["other", "other:latest", f"{MODEL}:8b", "team/chat", "gpt-5:latest:latest", "latest", ":latest:latest"]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(served_model_name=f"{MODEL},{ALIAS},{TAGGED}") as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_knows_the_same_names(client: httpx.Client, server: Running, route: str):
    server.frontend.adapters.names.append("tuned")
    for names, adapter in ((OWN, None), (ADAPTER, "tuned")):
        for name in names:
            server.frontend.calls.clear()
            reply = client.post(route, json=ROUTES[route] | {"model": name})
            assert reply.status_code == 200, (name, reply.text)
            assert {call.lora_path for call in server.frontend.calls} <= {adapter}
            if route.startswith("/v1") and "model" in reply.json():
                assert reply.json()["model"] == (name if adapter else MODEL), "the first name is the one reported"
    for name in STRANGERS:
        assert client.post(route, json=ROUTES[route] | {"model": name}).status_code == 404, name


def test_lists_have_every_name(client: httpx.Client, server: Running):
    server.frontend.adapters.names.append("tuned")
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (MODEL, MODEL, None),
        (ALIAS, MODEL, None),
        (TAGGED, MODEL, None),
        ("tuned", "tuned", MODEL),
    ]
    anthropic = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert [card["id"] for card in anthropic] == [MODEL, ALIAS, TAGGED, "tuned"]
    for path in ("/api/tags", "/api/ps"):
        listed = client.get(path).json()["models"]
        assert [card["name"] for card in listed] == [f"{MODEL}:latest", f"{ALIAS}:latest", TAGGED, "tuned:latest"]
        assert [card["details"]["parent_model"] for card in listed] == ["", "", "", f"{MODEL}:latest"]
    for path in ("/model_info", "/server_info"):
        assert client.get(path).json()["served_model_name"] == MODEL


def test_what_is_listed_is_found(client: httpx.Client):
    """Names of `/api/tags` on `/v1` too: LibreChat and goose take them there."""
    names = [card["name"] for card in client.get("/api/tags").json()["models"]]
    names += [card["id"] for card in client.get("/v1/models").json()["data"]]
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        for name in names:
            found = client.get(f"/v1/models/{name}", headers=headers)
            assert (found.status_code, found.json()["id"]) == (200, name.removesuffix(":latest")), name
        assert client.get("/v1/models/other:latest", headers=headers).status_code == 404


def test_a_name_with_the_tag_is_found_without_it():
    with running_server(served_model_name=f"{MODEL},a:latest") as server, httpx.Client(base_url=server.url) as client:
        for name in ("a", "a:latest"):
            assert client.post("/v1/completions", json={"prompt": "hi", "model": name}).json()["model"] == MODEL


def test_an_adapter_may_not_have_a_name_of_the_model(client: httpx.Client):
    for name in (MODEL, ALIAS, f"{ALIAS}:latest"):
        reply = client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": "x"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_name")


def test_embeddings_and_the_other_routes_of_pooling_know_them_too():
    with pooling_server(EMBEDDING) as server, httpx.Client(base_url=server.url) as client:
        for route, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/api/embed", {"input": "a"}),
            ("/api/embeddings", {"prompt": "a"}),
        ):
            assert client.post(route, json=body | {"model": f"{MODEL}:latest"}).status_code == 200
            assert client.post(route, json=body | {"model": "other:latest"}).status_code == 404
        assert client.post("/v1/embeddings", json={"input": "a", "model": f"{MODEL}:latest"}).json()["model"] == MODEL


def test_a_refusal_says_what_is_served():
    with running_server(frontend=FakeFrontend(), served_model_name=f"{MODEL},{ALIAS}") as server:
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "model": "x"})
    assert reply.json()["error"]["message"] == f"the model 'x' is not served here; this server has {MODEL!r}, {ALIAS!r}"
