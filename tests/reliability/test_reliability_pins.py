"""Pinned prompts on a real server: each key has its own, they outlive a death of the scheduler, and a flush forgets them."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from reliability_harness import ADMIN_KEY, START_S, USER_KEY, Server, greedy, wait_until

PROMPT = "The rules of this house are many. " * 8
KEYS = ("secret-a", "secret-b", USER_KEY, ADMIN_KEY)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"secret-{name}"} for name in "ab"]}))
    with Server(tiny_model, ["--api-key-file", str(keys), "--kv-pin-share", "0.6"], keys=True) as server:
        yield server.wait_started()


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """Of two keys of the file, of the plain key, and of the admin."""
    clients = [server.client(key) for key in KEYS]
    server.flush()
    yield clients
    for client in clients:
        client.close()


def ok(reply: httpx.Response) -> dict:
    assert reply.status_code == 200, reply.text
    return reply.json()


def pin(client: httpx.Client, prompt: str = PROMPT, **more: object) -> dict:
    return ok(client.post("/v1/cache/pin", json={"prompt": prompt, **more}))


def cached(client: httpx.Client) -> dict:
    return ok(client.get("/v1/cache"))


def num_cached(client: httpx.Client, prompt: str = PROMPT, **more: object) -> int:
    body = {"text": prompt + "And so?", "sampling_params": greedy(1), **more}
    return ok(client.post("/generate", json=body))["meta_info"]["cached_tokens"]


def test_a_key_sees_and_lets_go_of_its_own_pins_only(clients: list[httpx.Client]):
    a, b, user, admin = clients
    made = pin(a)
    assert made["cached_tokens"] == 0
    assert made["tokens"] > 200
    again = pin(a, ttl=600)
    assert again["id"] == made["id"]
    assert again["cached_tokens"] > 200, "pinning again computes nothing"
    assert again["expires_at"] > made["expires_at"] + 200
    other = pin(b)
    assert other["cached_tokens"] == 0, "another key shares nothing"
    assert other["id"] != made["id"]
    assert pin(a, cache_salt="s")["cached_tokens"] == 0

    assert [one["id"] for one in cached(b)["pins"]] == [other["id"]]
    assert cached(b)["memory"]["tokens"] == cached(b)["memory"]["pinned_tokens"] == other["tokens"]
    assert not cached(user)["pins"]
    assert set(cached(b)["memory"]) == {"limit_tokens", "tokens", "pinned_tokens", "pin_limit_tokens"}
    assert len(cached(admin)["pins"]) == 3
    pool = cached(admin)["memory"]
    assert pool["free_tokens"] + pool["evictable_tokens"] + pool["leased_tokens"] == pool["limit_tokens"]
    assert pool["tokens"] == ok(admin.get("/cache_tree"))["data"][0]["num_tokens"]

    for client in (b, user):
        reply = client.post("/v1/cache/unpin", json={"id": made["id"]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "pin_not_found")
    assert ok(a.post("/v1/cache/unpin", json={"id": made["id"]}))["success"]
    assert ok(admin.post("/v1/cache/unpin", json={"id": other["id"]}))["success"]
    assert not cached(b)["pins"]


def test_what_is_too_much_or_too_little_is_refused(clients: list[httpx.Client]):
    a = clients[0]
    limit = cached(a)["memory"]["pin_limit_tokens"]
    reply = a.post("/v1/cache/pin", json={"input_ids": [5] * (limit + 16)})
    assert reply.status_code == 400
    assert f"the limit is {limit}" in reply.text
    assert a.post("/v1/cache/pin", json={"prompt": "x"}).status_code == 400
    half = limit // 2 // 16 * 16 + 16
    ok(a.post("/v1/cache/pin", json={"input_ids": [5] * half}))
    reply = a.post("/v1/cache/pin", json={"input_ids": [6] * half})
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, reply.json()["error"]["code"])
    assert "unpin another one" in reply.text


def test_pins_are_made_again_after_a_death_of_the_scheduler_unless_they_were_flushed(
    server: Server, clients: list[httpx.Client]
):
    a, _, _, admin = clients
    made = pin(a)

    server.inject("forward", "crash", "first")
    assert admin.post("/generate", json={"text": "x", "rid": "first", "sampling_params": greedy(4)}).status_code == 500
    wait_until(lambda: a.get("/v1/cache").status_code == 200, "it serves again", START_S)
    wait_until(lambda: cached(a)["memory"]["pinned_tokens"] == made["tokens"], "the pin is there again", START_S)
    assert [one["id"] for one in cached(a)["pins"]] == [made["id"]]
    assert num_cached(a) >= made["tokens"]

    server.flush()
    wait_until(lambda: not cached(admin)["pins"], "the pins are forgotten")
    (scheduler,) = [one for one in server.process.children() if "scheduler" in one.cmdline()]
    scheduler.kill()
    wait_until(lambda: a.get("/v1/cache").status_code != 200, "its death is noticed", START_S)
    other = pin(a, "Another text. " * 8)  # waits until it serves again, as a request does
    assert [one["id"] for one in cached(admin)["pins"]] == [other["id"]]
    assert num_cached(a) == 0
