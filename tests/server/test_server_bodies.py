"""Bad input: a clear 4xx in the one error shape, never a 5xx, and nothing reaches the engine."""

import gzip
import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import CONTEXT_LENGTH, MODEL, Running

from headrace.errors import RequestError
from headrace.messages.requests import GenerateReqInput
from headrace.server.http import decode_json

NATIVE_DECODER = msgspec.json.Decoder(GenerateReqInput)
JSON = {"content-type": "application/json"}
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request")

GOOD = {
    "/generate": {"text": "hi"},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
}

NOT_JSON = [
    b"",
    b"{",
    b"nope",
    b"[]",
    b'"text"',
    b"null",
    b"7",
    b'{"text": "hi"',
    b'{"text": "hi"} x',
    b"\xef\xbb\xbf{}",
    b'{"text": "\xff"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\\ud800"}',
    b'{"text": "\\ud800 and more"}',
    b'{"text": "\\udc00\\ud800 and more"}',
    b'{"text": "a\x00b"}',
    b'{"\\ud800": 1}',
    b"[" * 12_000,
    b'{"image_data":' + b"[" * 12_000 + b"]" * 12_000 + b"}",
    b'{"text": "hi", "priority": 123456789012345678901234567890}',
    b'{"text": "hi", "priority": ' + b"9" * 5000 + b"}",
]

BAD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[]", "{}", "1" * 400]
INTEGERS = ["n", "max_tokens", "seed", "top_k", "min_tokens"]
FLOATS = ["temperature", "top_p", "frequency_penalty", "presence_penalty", "min_p", "repetition_penalty"]


def check_error(reply: httpx.Response, status: int = 400) -> dict[str, str | None]:
    """The reply has the one error shape and gives nothing of the machine away."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    for leak in ("Traceback", "/work", "site-packages", "object at 0x", "headrace.", "msgspec"):
        assert leak not in reply.text
    return body["error"]


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_a_json_object_is_refused(client: httpx.Client, server: Running, route: str):
    for body in NOT_JSON:
        check_error(client.post(route, content=body, headers=JSON))
    assert not server.frontend.calls
    assert client.get("/ping").status_code == 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\ud83d", r"\ud83d at byte 10"),
        (r"\ud83d and more", r"\ud83d at byte 10"),
        (r"\ud83d\n and more", r"\ud83d at byte 10"),
        (r"\uDE00 and more", r"\uDE00 at byte 10"),
        (r"\ud83d\ude00\\ud83d\ud83d\ude00\ud83d", r"\ud83d at byte 41"),
        (r"a\ud83d\ud83d\ude00", r"\ud83d at byte 11"),
    ],
)
@pytest.mark.parametrize("route", [*ROUTES, "/v1/messages", "/v1/responses"])
def test_half_a_character_is_called_so(client: httpx.Client, route: str, text: str, shown: str):
    reply = client.post(route, content=f'{{"text": "{text}"}}', headers=JSON)
    assert reply.status_code == 400
    assert f"{shown} is half a character (a lone surrogate)" in reply.json()["error"]["message"]
    assert "truncated" not in reply.text


def test_a_body_that_ends_too_early_is_called_so(client: httpx.Client):
    for body in ('{"text": "hi', '{"text": "\\\\ud83d', '{"text"', '{"text": "\\ud83d\\ude00'):
        assert "it ends too early" in client.post("/generate", content=body, headers=JSON).json()["error"]["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_numbers_that_are_none_are_refused(client: httpx.Client, server: Running, route: str, name: str):
    good = json.dumps(GOOD[route])[:-1]
    for number in [*BAD_NUMBERS, *(["1.5"] if name in INTEGERS else [])]:
        error = check_error(client.post(route, content=f'{good}, "{name}": {number}}}', headers=JSON))
        assert error["param"] in (name, None)
    assert not server.frontend.calls


@pytest.mark.parametrize("name", ["n", "max_new_tokens", "temperature", "top_p", "seed"])
def test_native_numbers_that_are_none_are_refused(client: httpx.Client, server: Running, name: str):
    for number in BAD_NUMBERS:
        body = f'{{"text": "hi", "sampling_params": {{"{name}": {number}}}}}'
        check_error(client.post("/generate", content=body, headers=JSON))
    assert not server.frontend.calls


@pytest.mark.parametrize(
    "name, inside, outside",
    [
        ("temperature", [0, 2], [-0.01, 2.01]),
        ("top_p", [0.01, 1], [0, 1.01, -1]),
        ("top_k", [-1, 0, 1], [-2]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("typical_p", [0.01, 1], [0, 1.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 2], [0, 2.1]),
        ("n", [1, 8], [0, -1, 9, 1_000_000]),
        ("seed", [-1, 0, 2**63 - 1], [-2, 2**63]),
        ("max_tokens", [-1, 0, 100, CONTEXT_LENGTH], [-2]),
        ("min_tokens", [0, 5], [-1, 400]),
        ("stop", ["", "a", ["a"] * 32], [[""], ["a"] * 33, "a" * 5000]),
        ("stop_token_ids", [[0]], [[-1], [10**6], [True], [1.5]]),
        ("logit_bias", [{"5": 1}], [{"5": 101}, {"x": 1}, {"-1": 1}, {"999999": 1}]),
    ],
)
def test_parameters_at_the_edges_of_their_range(
    client: httpx.Client, server: Running, name: str, inside: list[object], outside: list[object]
):
    for route in ("/v1/completions", "/v1/chat/completions"):
        for value in inside:
            reply = client.post(route, json=GOOD[route] | {"max_tokens": 8} | {name: value})
            assert reply.status_code == 200, reply.text
        for value in outside:
            error = check_error(client.post(route, json=GOOD[route] | {"max_tokens": 8} | {name: value}))
            # Named as the client spelled it, never by our own name for it.
            assert error["param"] is None or error["param"].startswith(name), error
            assert "max_new_tokens" not in str(error)
            assert "min_new_tokens" not in str(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", 1], [1, [2]], [-1], [10**6], [True], [1.5], None, {}])
def test_bad_prompts(client: httpx.Client, prompt: object, stream: bool):
    check_error(client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "stream": stream}))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_any_chunk(client: httpx.Client, stream: bool):
    long = "x" * (CONTEXT_LENGTH + 1)
    for body in ({"text": long}, {"text": ["ok", long]}, {"input_ids": [1] * (CONTEXT_LENGTH + 1)}):
        assert str(CONTEXT_LENGTH) in str(
            check_error(client.post("/generate", json=body | {"stream": stream}))["message"]
        )
    messages = [{"role": "user", "content": long}]
    error = check_error(
        client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "stream": stream})
    )
    assert error["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_can_never_fit_is_not_even_tokenized(client: httpx.Client, server: Running, stream: bool):
    huge = "x" * (CONTEXT_LENGTH * 256 + 1)
    chats: list[object] = [
        [{"role": "user", "content": huge}],
        [{"role": "user", "content": "a"}] * (CONTEXT_LENGTH + 1),
    ]
    bodies = [("/generate", {"text": ["a", huge]}), ("/v1/completions", {"model": MODEL, "prompt": huge})]
    bodies += [("/v1/chat/completions", {"model": MODEL, "messages": messages}) for messages in chats]
    for route, body in bodies:
        error = check_error(client.post(route, json=body | {"stream": stream}))
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(f"This model's maximum context length is {CONTEXT_LENGTH} tokens. However, ")
    assert check_error(client.post("/tokenize", json={"prompt": huge}))["param"] == "prompt"
    assert not server.frontend.calls


def test_nasty_text_is_served(client: httpx.Client):
    for text in ("\x00", "\ufeff", "a" * 400, "e" + "\u0301" * 100, "<|user|>", "{{ 7*7 }}", "\r\n\r\n", "\U0010ffff"):
        assert (
            client.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}}).status_code == 200
        )
        reply = client.post("/v1/completions", json={"model": MODEL, "prompt": text, "echo": True, "max_tokens": 0})
        assert reply.json()["choices"][0]["text"] == text


def test_unknown_fields_are_named(client: httpx.Client):
    for route, body in GOOD.items():
        error = check_error(client.post(route, json=body | {"temprature": 1}))
        assert error["param"] == "temprature"
        assert error["code"] == "unknown_field"
    error = check_error(client.post("/generate", json={"text": "a", "sampling_params": {"topp": 1}}))
    assert error["param"] == "sampling_params.topp"


def test_values_that_may_be_given_are_named_when_another_one_is(client: httpx.Client):
    def message(route: str, **body: object) -> str:
        reply = client.post(route, json=body)
        assert reply.status_code == 400
        return str(reply.json()["error"]["message"])

    assert message("/release_memory_occupation", tags=["weights", "all"]).startswith(
        "tags[1]: 'all' is not one of 'cuda_graph', "
    )
    assert message("/configure_logging", log_requests_level=4) == "log_requests_level: 4 is not one of 0, 1, 2, 3"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert "'low'" in message("/v1/chat/completions", **chat, reasoning_effort="very")
    assert len(message("/v1/chat/completions", **chat, reasoning_effort="x" * 1_000_000)) < 500


def test_missing_fields_are_named(client: httpx.Client):
    assert check_error(client.post("/v1/completions", json={"model": MODEL}))["param"] == "prompt"
    assert check_error(client.post("/v1/chat/completions", json={"model": MODEL}))["param"] == "messages"


def test_only_json_bodies_are_read(client: httpx.Client):
    body = json.dumps(GOOD["/generate"])
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"):
        error = check_error(client.post("/generate", content=body, headers={"content-type": content_type}))
        assert "application/json" in str(error["message"])
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        assert client.post("/generate", content=body, headers={"content-type": content_type}).status_code == 200


def test_compressed_bodies_are_refused(client: httpx.Client):
    body = json.dumps(GOOD["/generate"]).encode()
    for content in (gzip.compress(body), b"not gzip"):
        check_error(client.post("/generate", content=content, headers=JSON | {"content-encoding": "gzip"}))


def test_unknown_routes_and_methods_have_the_error_shape(client: httpx.Client):
    for path in ("/v1/nope", "/nope", "/health/", "/v1/completions/", "/health//", "/HEALTH", "/v1/models/nope"):
        check_error(client.get(path), 404)
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/generate"),
        ("POST", "/health"),
        ("PUT", "/v1/models"),
    ):
        reply = client.request(method, path)
        assert check_error(reply, 405)["code"] == "method_not_allowed"
        assert "allow" in reply.headers


def test_an_unknown_model_is_not_found(client: httpx.Client):
    for route in ("/v1/completions", "/v1/chat/completions"):
        for name in ("gpt-4", "Default", "x" * 10_000):
            error = check_error(client.post(route, json=GOOD[route] | {"model": name}), 404)
            assert error["param"] == "model"
            assert len(str(error["message"])) < 300


def test_faults_of_ours_tell_nothing(client: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture):
    server.frontend.script.fail_at, server.frontend.script.error = 0, ValueError("/secret/path <object at 0x7f>")
    error = check_error(client.post("/generate", json={"text": "hi"}), 500)
    assert error == {"message": "internal error", "type": "internal_error", "param": None, "code": None}
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_integers_beyond_64_bits_are_refused_wherever_they_are():
    for body in (
        b'{"text": "a", "image_data": [{"x": 99999999999999999999}]}',
        b'{"text": "a", "priority": -9223372036854775809}',
    ):
        with pytest.raises(RequestError, match="64 bits"):
            decode_json(body, NATIVE_DECODER)
    fine = decode_json(b'{"text": "99999999999999999999", "priority": 9223372036854775807}', NATIVE_DECODER)
    assert fine == GenerateReqInput(text="99999999999999999999", priority=2**63 - 1)


@pytest.mark.parametrize("wide", [2**63, 2**64 - 1, -(2**63) - 1])
def test_schemas_tools_and_arguments_may_have_integers_of_any_size(client: httpx.Client, server: Running, wide: int):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": wide}}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": schema}}),
        ("/v1/chat/completions", {"metadata": {"a": wide}}),
        ("/v1/responses", {"input": "a", "client_metadata": {"a": [wide]}}),
        ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}]}),
        ("/api/chat", {"format": schema}),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": schema}}),
    ]
    for path, fields in bodies:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        body = fields if path in ("/generate", "/v1/responses") else chat | fields
        reply = client.post(path, json=body)
        assert reply.status_code == 200, (path, fields, reply.text)
    grammars = [sampling.grammar for sampling in server.frontend.resolved if sampling.grammar is not None]
    assert [str(wide) in grammar.text for grammar in grammars] == [True] * 3


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 2**64}, "seed"),
        ("/v1/completions", {"prompt": [2**64]}, "prompt"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2**64}}, "sampling_params.max_new_tokens"),
    ],
)
def test_a_field_whose_integer_is_too_wide_is_named(client: httpx.Client, path: str, body: Any, field: str):
    error = check_error(client.post(path, json=body), 400)
    assert error["param"] == field
    assert "64 bits" in str(error["message"])
