"""The adapter routes, and adapters by the name of a model."""

import httpx
import pytest
from fake_frontend import MODEL, Running

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def with_adapters(server: Running) -> Running:
    server.frontend.adapters.names = ["poet", "org/pirate"]
    return server


def test_load_and_unload_say_what_there_is(client: httpx.Client, server: Running):
    reply = client.post("/load_lora_adapter", json={"lora_name": "poet", "lora_path": "/srv/poet", "pinned": True})
    assert reply.json() == {"success": True, "message": "the adapter is loaded", "loaded_adapters": ["poet"]}
    assert server.frontend.adapters.loads == [("poet", "/srv/poet", True)]
    reply = client.post("/unload_lora_adapter", json={"lora_name": "poet"})
    assert reply.json() == {"success": True, "message": "the adapter is unloaded", "loaded_adapters": []}


def test_refusals_have_the_shape_of_every_error(client: httpx.Client, with_adapters: Running):
    cases = [
        ("/load_lora_adapter", {"lora_name": "poet", "lora_path": "/srv/poet"}, 400, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": "/srv/broken"}, 400, "lora_path"),
        ("/load_lora_adapter", {"lora_name": MODEL, "lora_path": "/srv/poet"}, 400, "lora_name"),
        ("/load_lora_adapter", {"lora_name": "new"}, 400, "lora_path"),
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": "p", "rank": 3}, 400, "rank"),
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": 5}, 400, "lora_path"),
        ("/unload_lora_adapter", {"lora_name": "other"}, 404, "lora_name"),
        ("/unload_lora_adapter", {}, 400, "lora_name"),
    ]
    for path, body, status, param in cases:
        reply = client.post(path, json=body)
        assert reply.status_code == status, (path, body, reply.text)
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, (body, error)
    assert with_adapters.frontend.adapters.names == ["poet", "org/pirate"]


def test_models_lists_adapters_with_their_parent(client: httpx.Client, with_adapters: Running):
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        (MODEL, None),
        ("poet", MODEL),
        ("org/pirate", MODEL),
    ]
    assert client.get("/v1/models/org/pirate").json() == cards[2]
    assert client.get("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "lora_path", "adapter"),
    [
        (MODEL, None, None),
        (MODEL, "poet", "poet"),
        ("poet", None, "poet"),
        ("poet", "poet", "poet"),
        (f"{MODEL}:org/pirate", None, "org/pirate"),
    ],
)
def test_a_model_name_or_lora_path_chooses_the_adapter(
    client: httpx.Client, with_adapters: Running, stream: bool, model: str, lora_path: str | None, adapter: str | None
):
    extra = {"model": model, "stream": stream} | ({"lora_path": lora_path} if lora_path else {})
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})):
        reply = client.post(path, json=body | extra)
        assert reply.status_code == 200, reply.text
        assert f'"model":"{model}"' in reply.text.replace(" ", "")
        assert with_adapters.frontend.calls[-1].lora_path == adapter


def test_two_adapters_in_one_request_and_unknown_ones_are_refused(client: httpx.Client, with_adapters: Running):
    reply = client.post("/v1/chat/completions", json=CHAT | {"model": "poet", "lora_path": "org/pirate"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_path")
    for model in ("nobody", f"{MODEL}:nobody", f"{MODEL}:", f"poet:{MODEL}"):
        reply = client.post("/v1/chat/completions", json=CHAT | {"model": model})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_tokenize_takes_an_adapter_for_its_model(client: httpx.Client, with_adapters: Running):
    assert client.post("/tokenize", json={"model": "poet", "prompt": "hi"}).status_code == 200
    assert client.post("/tokenize", json={"model": "nobody", "prompt": "hi"}).status_code == 404
