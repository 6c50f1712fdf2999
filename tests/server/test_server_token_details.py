"""What vLLM's clients ask for beside the text: token ids, logprobs of the prompt and of picked tokens, shortened prompts."""

import json
from typing import Any

import httpx
import pytest
from fake_frontend import CONTEXT_LENGTH, Running, byte_tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 5}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def chunks_of(client: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post(route, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(frame.removeprefix("data: ")) for frame in reply.text.split("\n\n")[:-2]]


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode_batch([text])[0]


@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_a_chat(client: httpx.Client, server: Running, n: int, tokens_per_chunk: int):
    server.frontend.script.tokens_per_chunk = tokens_per_chunk
    body = CHAT | {"return_token_ids": True, "n": n}
    plain = client.post("/v1/chat/completions", json=body).json()
    prompt_ids = server.frontend.calls[0].input_ids
    assert plain["prompt_token_ids"] == prompt_ids
    assert [len(choice["token_ids"]) for choice in plain["choices"]] == [5] * n
    chunks = chunks_of(client, "/v1/chat/completions", body)
    for index, choice in enumerate(plain["choices"]):
        own = [c for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == prompt_ids
        assert not any("prompt_token_ids" in chunk for chunk in own[1:])
        assert [i for c in own for i in c["choices"][0].get("token_ids", [])] == choice["token_ids"]


@pytest.mark.parametrize("prompt", ["hello", ["hello", "yo"], [104, 105], [[104], [105, 106]]])
def test_token_ids_of_completions(client: httpx.Client, prompt: Any):
    body = COMPLETION | {"prompt": prompt, "return_token_ids": True, "n": 2}
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    wanted = [ids_of(one) if isinstance(one, str) else one for one in prompts]
    plain = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in plain] == [ids for ids in wanted for _ in range(2)]
    choices: dict[int, list[Any]] = {}
    for chunk in chunks_of(client, "/v1/completions", body):
        choices.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    for index, own in choices.items():
        assert own[0]["prompt_token_ids"] == wanted[index // 2]
        assert [i for choice in own for i in choice["token_ids"]] == plain[index]["token_ids"]


def test_ids_and_counts_in_the_same_chunks(client: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for route, body in ROUTES:
        chunks = chunks_of(client, route, body | {"return_token_ids": True, "stream_options": options})
        num_ids = 0
        for chunk in chunks[:-1]:
            num_ids += len(chunk["choices"][0].get("token_ids", []))
            assert chunk["usage"]["completion_tokens"] >= num_ids
        assert chunks[-1]["usage"]["completion_tokens"] == num_ids == 5


@pytest.mark.parametrize("route, body", ROUTES)
def test_no_ids_unless_asked(client: httpx.Client, route: str, body: dict[str, Any]):
    for asked in ({}, {"return_token_ids": False}):
        assert "token_ids" not in client.post(route, json=body | asked).text
        assert "token_ids" not in client.post(route, json=body | asked | {"stream": True}).text


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_logprobs_of_the_prompt(client: httpx.Client, server: Running, count: int, logprobs: int | None):
    asked = {"prompt_logprobs": count}
    completion = client.post("/v1/completions", json=COMPLETION | asked | {"logprobs": logprobs}).json()["choices"][0]
    more = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    chat = client.post("/v1/chat/completions", json=CHAT | asked | more).json()
    for rows, ids in (
        (completion["prompt_logprobs"], ids_of("hello")),
        (chat["prompt_logprobs"], server.frontend.calls[1].input_ids),
    ):
        assert rows[0] is None
        assert len(rows) == len(ids)
        for row, token_id in zip(rows[1:], ids[1:], strict=True):
            assert row[str(token_id)]["logprob"] == -0.25
            assert row[str(token_id)]["decoded_token"] == byte_tokenizer().decode([token_id])
            assert row[str(token_id)]["rank"] == (1 if count else None)
    if logprobs is None:
        assert completion["logprobs"] is None
    else:
        assert all(len(entry["top_logprobs"]) == 1 for entry in chat["choices"][0]["logprobs"]["content"])
        assert all(len(top) <= 2 for top in completion["logprobs"]["top_logprobs"])


def test_logprobs_of_picked_tokens(client: httpx.Client):
    picked = {"logprob_token_ids": [40, 41]}
    shown = {byte_tokenizer().decode([i], False) for i in (40, 41)}
    chat = client.post("/v1/chat/completions", json=CHAT | picked | {"logprobs": True}).json()
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert {top["token"] for top in entry["top_logprobs"]} == shown
    completion = client.post("/v1/completions", json=COMPLETION | picked | {"logprobs": 1}).json()
    for top in completion["choices"][0]["logprobs"]["top_logprobs"]:
        assert top.keys() >= shown


@pytest.mark.parametrize(
    "asked, kept",
    [
        ({"truncate_prompt_tokens": 3}, "llo"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "llo"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "hel"),
        ({"truncate_prompt_tokens": 100}, "hello"),
        ({"truncate_prompt_tokens": -1}, "hello"),
    ],
)
def test_prompts_are_cut_down(client: httpx.Client, server: Running, asked: dict[str, Any], kept: str):
    for prompt in ("hello", ["hello", "hello"], ids_of("hello"), [ids_of("hello")]):
        server.frontend.reset()
        assert client.post("/v1/completions", json={"prompt": prompt} | asked).status_code == 200
        ids = server.frontend.calls[0].input_ids
        assert all(row == ids_of(kept) for row in (ids if isinstance(ids[0], list) else [ids]))


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""], [], [[]]])
def test_empty_prompts_are_refused(client: httpx.Client, prompt: Any):
    for asked in ({"return_token_ids": True}, {"truncate_prompt_tokens": 2}, {"add_special_tokens": False}):
        reply = client.post("/v1/completions", json={"prompt": prompt} | asked)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "prompt"


def test_minus_one_leaves_room_for_the_output(client: httpx.Client, server: Running):
    long = "x" * (2 * CONTEXT_LENGTH)
    for body, room in (
        ({"prompt": long, "max_tokens": 7}, 7),
        ({"prompt": [120] * (2 * CONTEXT_LENGTH), "max_tokens": 7}, 7),
    ):
        server.frontend.reset()
        assert client.post("/v1/completions", json=body | {"truncate_prompt_tokens": -1}).status_code == 200
        assert len(server.frontend.calls[0].input_ids) == CONTEXT_LENGTH - room
    chat = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 9}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert byte_tokenizer().decode(server.frontend.calls[-1].input_ids, False) == "xxxxxxx\n<|assistant|>"


@pytest.mark.parametrize("route, body", ROUTES)
@pytest.mark.parametrize(
    "asked, param",
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"return_token_ids": True, "session_params": {"id": "a"}}, "return_token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: httpx.Client, route: str, body: dict[str, Any], asked: dict[str, Any], param: str
):
    reply = client.post(route, json=body | asked)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_text_without_the_tokenizer_s_special_tokens(client: httpx.Client, server: Running):
    assert client.post("/v1/completions", json=COMPLETION | {"add_special_tokens": False}).status_code == 200
    assert server.frontend.calls[0].input_ids == ids_of("hello")
    reply = client.post("/v1/chat/completions", json=CHAT | {"add_special_tokens": True})
    assert reply.json()["error"]["param"] == "add_special_tokens"


def test_clients_of_vllm_find_prompt_logprobs_in_every_reply(client: httpx.Client):
    assert client.post("/v1/chat/completions", json=CHAT).json()["prompt_logprobs"] is None
    for body in (COMPLETION, COMPLETION | {"prompt": ["a", "b"], "n": 2, "echo": True}):
        assert all(
            choice["prompt_logprobs"] is None for choice in client.post("/v1/completions", json=body).json()["choices"]
        )


PARTS = "客单价 ďábelské 👩‍👩‍👧"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [PARTS, "é", "a\ufffdb"])
def test_parts_of_characters_are_shown_by_their_bytes(client: httpx.Client, server: Running, text: str, stream: bool):
    """Every token of the fake is one byte, so its alternatives have one each, too."""
    server.frontend.script.text = text
    shown = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in text.encode()]
    body = {"prompt": text, "echo": True, "logprobs": 5, "max_tokens": 100}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(client, "/v1/completions", body)]
    else:
        choices = client.post("/v1/completions", json=body).json()["choices"]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for one in logprobs for token in one["tokens"]] == shown * 2
    tops = [top for one in logprobs for top in one["top_logprobs"]]
    assert [token in top for token, top in zip(shown, tops[len(shown) :], strict=True)] == [True] * len(shown)
    chat = CHAT | {"max_tokens": 100, "logprobs": True, "top_logprobs": 2}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(client, "/v1/chat/completions", chat)]
    else:
        choices = client.post("/v1/chat/completions", json=chat).json()["choices"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in content] == shown
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == text


def test_all_alternatives_survive(client: httpx.Client):
    parts = ids_of(PARTS[0]) + ids_of("ď")  # five bytes, none of which is a text
    body = COMPLETION | {"logprob_token_ids": parts, "logprobs": 5}
    tops = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [len([token for token in top if token.startswith("bytes:")]) for top in tops] == [5] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_by_their_ids(client: httpx.Client, server: Running, stream: bool):
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    for route, body in (
        ("/v1/completions", COMPLETION | {"logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ):
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(client, route, body | asked)]
        else:
            choices = client.post(route, json=body | asked).json()["choices"]
        ids = [f"token_id:{one}" for choice in choices for one in choice.get("token_ids", ())]
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if route == "/v1/completions":
            assert [token for one in found for token in one["tokens"]] == ids
            names = {name for one in found for top in one["top_logprobs"] for name in top}
        else:
            entries = [entry for one in found for entry in one["content"]]
            assert [entry["token"] for entry in entries] == ids
            names = {top["token"] for entry in entries for top in entry["top_logprobs"]}
        assert names
        assert all(name.startswith("token_id:") for name in names)


@pytest.mark.parametrize("route, body", ROUTES)
def test_the_stop_string_stays_in_the_output_if_asked(
    client: httpx.Client, server: Running, route: str, body: dict[str, Any]
):
    for field in ("include_stop_str_in_output", "no_stop_trim"):
        for value in (True, False, None):
            assert client.post(route, json=body | {"stop": "w", field: value}).status_code == 200
            assert server.frontend.resolved[-1].no_stop_trim is bool(value)
    reply = client.post(route, json=body | {"include_stop_str_in_output": "yes"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "include_stop_str_in_output")
