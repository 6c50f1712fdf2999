"""`8192.0` is an integer wherever a body or a query takes one, on every route; a number with a fraction is refused in words."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import MODEL, Running
from msgspec import inspect

from headrace.api.arguments import generate_request
from headrace.errors import RequestError
from headrace.messages.bodies import alternatives
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.http import decode_json
from headrace.server.openai.protocol import ChatCompletionRequest
from headrace.server.route_table import route_table

NATIVE_DECODER = msgspec.json.Decoder(GenerateReqInput)
USER = {"role": "user", "content": "hi"}


def bodies_with(kind: inspect.Type, number: float) -> Iterator[Any]:
    """Values for `kind`, each with `number` at one of the places that take integers and no other numbers."""
    kinds = list(alternatives(kind))
    names = {type(one) for one in kinds}
    if inspect.IntType in names and not names & {inspect.FloatType, inspect.AnyType}:
        yield number
    for one in kinds:
        if isinstance(one, inspect.ListType):
            yield from ([inner] for inner in bodies_with(one.item_type, number))
        elif isinstance(one, inspect.DictType):
            yield from ({"a": inner} for inner in bodies_with(one.value_type, number))
        elif isinstance(one, inspect.StructType):
            for field in one.fields:
                yield from ({field.encode_name: inner} for inner in bodies_with(field.type, number))


def code_of(body: Any, decoder: Any) -> str | None:
    """The code of the error that `body` gets; None = it is read."""
    try:
        decode_json(json.dumps(body).encode(), decoder)
    except RequestError as error:
        return error.code or error.message
    return None


def test_every_integer_of_every_route_may_be_written_with_a_point(shared_server: Running):
    kinds = {spec.body for spec in route_table(shared_server.app.state.context) if spec.body is not None}
    assert len(kinds) > 20
    num_places = 0
    for kind in kinds:
        decoder = msgspec.json.Decoder(kind)
        whole, broken = (list(bodies_with(inspect.type_info(kind), number)) for number in (3.0, 3.5))
        num_places += len(whole)
        for body in whole:
            assert code_of(body, decoder) in (None, "missing_field"), body
        for body in broken:
            with pytest.raises(RequestError, match="got a number with a fraction"):
                decode_json(json.dumps(body).encode(), decoder)
    assert num_places > 100


@pytest.mark.parametrize(
    ("text", "means"),
    [("8192.0", 8192), ("1e3", 1000), ("-0.0", 0), ("-1.0", -1), ("4503599627370496.0", 2**52)],
)
def test_how_a_whole_number_is_written_does_not_matter(text: str, means: int):
    read = decode_json(f'{{"text": "a", "priority": {text}}}'.encode(), NATIVE_DECODER)
    assert (read, type(read.priority)) == (GenerateReqInput(text="a", priority=means), int)


def test_token_ids_may_be_floats_in_lists_of_lists_too():
    read = decode_json(
        b'{"input_ids": [[1.0, 2], [3e0]], "sampling_params": [{"stop_token_ids": [4.0]}]}', NATIVE_DECODER
    )
    assert read.input_ids == [[1, 2], [3]]
    assert [one.stop_token_ids for one in read.sampling_params] == [[4]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("8192.5", "got a number with a fraction"),
        ("1e-3", "fraction"),
        ("1e30", "64 bits"),
        ("true", "a boolean"),
        ('"8"', "a string"),
    ],
)
def test_what_is_no_integer_is_refused_in_words(value: str, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        decode_json(f'{{"text": "a", "priority": {value}}}'.encode(), NATIVE_DECODER)
    assert caught.value.param in ("priority", None)


@pytest.mark.parametrize("value", ["1.0", "0.0"])
def test_a_number_is_no_boolean(value: str):
    with pytest.raises(RequestError, match="expected a boolean"):
        decode_json(f'{{"text": "a", "stream": {value}}}'.encode(), NATIVE_DECODER)


@pytest.mark.parametrize("given", [{"max_tokens": 3.0}, {"max_tokens": 3}])
def test_what_the_client_writes_freely_stays_as_it_is(given: dict[str, object]):
    """A float in a tool's schema or for a template is not the server's to change."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"const": 1.0}}}}}
    body = {"messages": [USER], "tools": [tool], "chat_template_kwargs": {"x": 1.0}} | given
    read = decode_json(json.dumps(body).encode(), msgspec.json.Decoder(ChatCompletionRequest))
    assert (read.max_tokens, type(read.max_tokens)) == (3, int)
    assert "1.0" in str(read.tools)
    assert str(read.chat_template_kwargs) == "{'x': 1.0}"


def test_a_python_program_may_write_them_so_as_well():
    read = generate_request(None, {"max_new_tokens": 3.0}, [[1.0], (2, 3.0)], False, {"priority": 2.0})
    assert (read.input_ids, read.priority) == ([[1], [2, 3]], 2)
    assert read.sampling_params == SamplingParams(max_new_tokens=3)
    with pytest.raises(RequestError, match="with a fraction"):
        generate_request(None, {"max_new_tokens": 3.5}, [[1]], False, {})


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/api/chat", {"messages": [USER], "stream": False, "options": {"num_ctx": 512.0, "num_predict": 3.0}}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 3.0, "messages": [USER]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3.0}),
        ("/v1/completions", {"prompt": [72.0, 105.0], "max_tokens": 3.0}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3.0}}),
        ("/detokenize", {"tokens": [72.0, 105.0]}),
    ],
)
def test_requests_of_clients_without_integers_are_served(client: httpx.Client, server: Running, route: str, body: Any):
    reply = client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    assert [one.max_new_tokens for one in server.frontend.resolved] == ([] if route == "/detokenize" else [3])


def test_a_query_takes_them_too(client: httpx.Client):
    assert client.get("/v1/requests", params={"limit": "2.0"}).status_code == 200
    assert client.get("/v1/requests", params={"limit": "2.5"}).status_code == 400
