"""What each API's fields for structured output mean, on both OpenAI routes: one grammar reaches the engine, or a 400 names the field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server

from headrace.errors import RequestError
from headrace.messages.grammar import GrammarSpec

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
}
NATIVE = "/generate"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}},"required":["b"]}'
GBNF = 'root ::= "a" | "b"'
LARK = 'start: "a" | "b"'
FORMAT = {"type": "any_text"}
TAG = '{"type":"structural_tag","format":{"type":"any_text"}}'
STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
OLD_TAG = f'{{"structures":[{{"begin":"<f>","schema":{TEXT},"end":"</f>"}}],"triggers":["<f"]}}'
OBJECT = '{"type":"object"}'


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A model that does not reason: the grammars of chats begin with the output."""
    with running_server(reasoning_parser="none") as running:
        yield running


@pytest.fixture
def server(running: Running) -> Running:
    running.frontend.reset()
    return running


def of_format(**members: Any) -> dict[str, Any]:
    return {"response_format": members}


def of_vllm(**members: Any) -> dict[str, Any]:
    return {"structured_outputs": members}


ASKED: list[tuple[dict[str, Any], str, str]] = [
    # OpenAI
    (of_format(type="json_object"), "json_schema", OBJECT),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": SCHEMA, "strict": True}), "json_schema", TEXT),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": SCHEMA, "strict": False}), "json_schema", TEXT),
    (of_format(type="json_schema", json_schema={"description": "x", "schema": SCHEMA}), "json_schema", TEXT),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": {}}), "json_schema", "{}"),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": True}), "json_schema", "true"),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": False}), "json_schema", "false"),
    (of_format(type="structural_tag", format=FORMAT), "structural_tag", TAG),
    (of_format(type="structural_tag", **STRUCTURES), "structural_tag", OLD_TAG),
    # llama.cpp
    (of_format(type="json_object", schema=SCHEMA), "json_schema", TEXT),
    (of_format(type="json_schema", schema=SCHEMA), "json_schema", TEXT),
    ({"grammar": GBNF}, "ebnf", GBNF),
    ({"json_schema": SCHEMA}, "json_schema", TEXT),
    # SGLang, and Headrace's own
    ({"json_schema": TEXT}, "json_schema", TEXT),
    ({"json_schema": True}, "json_schema", "true"),
    ({"regex": "[ab]+"}, "regex", "[ab]+"),
    ({"ebnf": GBNF}, "ebnf", GBNF),
    ({"lark": LARK}, "lark", LARK),
    ({"choice": ["a", "b"]}, "choice", '["a","b"]'),
    ({"structural_tag": TAG}, "structural_tag", TAG),
    ({"structural_tag": STRUCTURES}, "structural_tag", OLD_TAG),
    # vLLM
    (of_vllm(json=SCHEMA), "json_schema", TEXT),
    (of_vllm(json=TEXT), "json_schema", TEXT),
    (of_vllm(json_object=True), "json_schema", OBJECT),
    (of_vllm(regex="[ab]+", json=None, choice=[], json_object=False, disable_fallback=True), "regex", "[ab]+"),
    (of_vllm(choice=["a", "b"]), "choice", '["a","b"]'),
    (of_vllm(grammar=GBNF), "ebnf", GBNF),
    (of_vllm(grammar=LARK), "lark", LARK),
    (of_vllm(structural_tag=OLD_TAG), "structural_tag", OLD_TAG),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, "json_schema", TEXT),
    ({"guided_json": TEXT}, "json_schema", TEXT),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
    ({"guided_grammar": GBNF}, "ebnf", GBNF),
    ({"guided_grammar": LARK}, "lark", LARK),
    ({"guided_json_object": True}, "json_schema", OBJECT),
    # Whitespace in JSON
    (
        of_vllm(json={"type": "null"}, disable_any_whitespace=True),
        "json_schema",
        '{"type":"null","x-guidance":{"whitespace_flexible":false}}',
    ),
    (
        of_vllm(json='{"type": "null"}', whitespace_pattern=" ?"),
        "json_schema",
        '{"type":"null","x-guidance":{"whitespace_pattern":" ?"}}',
    ),
    (
        {"guided_json_object": True, "guided_whitespace_pattern": " ?"},
        "json_schema",
        '{"type":"object","x-guidance":{"whitespace_pattern":" ?"}}',
    ),
    (
        of_vllm(disable_any_whitespace=True)
        | of_format(type="json_schema", json_schema={"schema": {"x-guidance": {"whitespace_flexible": True}}}),
        "json_schema",
        '{"x-guidance":{"whitespace_flexible":true}}',
    ),
    (
        of_vllm(json=True, disable_any_whitespace=True),
        "json_schema",
        '{"x-guidance":{"whitespace_flexible":false}}',
    ),
]

NOTHING: list[dict[str, Any]] = [
    of_format(type="text"),
    of_format(type="text", json_schema=None),
    of_format(type=""),
    {"response_format": {}},
    {"response_format": None},
    of_vllm(),
    of_vllm(json=None, regex="", choice=[], json_object=False, disable_any_whitespace=False, _backend=None),
    {"guided_decoding_backend": "auto", "guided_json": None, "guided_choice": [], "guided_json_object": False},
    {"json_schema": {}, "regex": "", "ebnf": "", "lark": "", "choice": [], "structural_tag": {}, "grammar": ""},
    {"guided_json": {}, "json_schema": ""},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (of_format(type="json_schema"), "response_format.json_schema.schema"),
    (of_format(type="json_schema", json_schema={"name": "a"}), "response_format.json_schema.schema"),
    (of_format(type="json_schema", json_schema={"name": "a", "schema": None}), "response_format.json_schema.schema"),
    (of_format(type="json_schema", json_schema={"schema": "{}"}), "response_format.json_schema.schema"),
    (of_format(type="json_schema", json_schema={"schema": {"a": 1}, "strikt": True}), "response_format.json_schema.strikt"),
    (of_format(type="json_schema", schema=SCHEMA, json_schema={"schema": SCHEMA}), "response_format.schema"),
    (of_format(type="json_schema", format=FORMAT, schema=SCHEMA), "response_format.format"),
    (of_format(type="text", json_schema={"schema": SCHEMA}), "response_format.json_schema"),
    (of_format(schema=SCHEMA), "response_format.type"),
    (of_format(type="xml"), "response_format.type"),
    (of_format(type="json_object", strict=True), "response_format.strict"),
    (of_format(type="structural_tag"), "response_format"),
    (of_format(type="structural_tag", structures=STRUCTURES["structures"]), "response_format"),
    ({"response_format": "json_object"}, "response_format"),
    ({"json_schema": "{"}, "json_schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    (of_vllm(json="{"), "structured_outputs.json"),
    (of_vllm(json="{", disable_any_whitespace=True), "structured_outputs.json"),
    (of_vllm(choice=["a", ""]), "structured_outputs.choice"),
    (of_vllm(structural_tag='{"a": 1}'), "structured_outputs.structural_tag"),
    (of_vllm(regex="a" * (1 << 20) + "b"), "structured_outputs.regex"),
    (of_vllm(json=SCHEMA, disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
    (of_vllm(regex="a", disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
    (of_vllm(whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
    ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern"),
    (of_vllm(backend="xgrammar"), "structured_outputs.backend"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"choice": "a"}, "choice"),
    ({"choice": [1]}, "choice[0]"),
    ({"regex": 1}, "regex"),
]  # fmt: skip

TWO: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "ebnf": GBNF}, "regex", "ebnf"),
    (of_format(type="json_object") | {"regex": "a"}, "response_format", "regex"),
    (of_vllm(regex="a", choice=["a"]), "structured_outputs.regex", "structured_outputs.choice"),
    (of_vllm(json_object=True) | of_format(type="json_object"), "structured_outputs.json_object", "response_format"),
    ({"guided_json": SCHEMA, "json_schema": SCHEMA}, "guided_json", "json_schema"),
    ({"grammar": GBNF, "guided_grammar": GBNF}, "grammar", "guided_grammar"),
]


def commands() -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of every request that docs/structured-output.md sends with curl."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "structured-output.md").read_text()
    for path, body in re.findall(r"^curl \S+:30000(\S+) [^\n]* -d '(.*?)'$", text, re.DOTALL | re.MULTILINE):
        yield path, json.loads(body)


def param_of(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["param"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "kind", "text"), ASKED, ids=range(len(ASKED)))
def test_a_field_means_one_grammar(client: httpx.Client, server: Running, route: str, body: Any, kind: Any, text: str):
    reply = client.post(route, json=ROUTES[route] | body)
    assert reply.status_code == 200, reply.text
    [sampling] = server.frontend.resolved
    assert sampling.grammar == GrammarSpec(kind, text, kind)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", NOTHING, ids=range(len(NOTHING)))
def test_an_empty_field_asks_for_nothing(client: httpx.Client, server: Running, route: str, body: Any):
    reply = client.post(route, json=ROUTES[route] | body)
    assert reply.status_code == 200, reply.text
    assert [sampling.grammar for sampling in server.frontend.resolved] == [None]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_honoured_is_refused_by_the_client_s_name(
    client: httpx.Client, server: Running, route: str, body: Any, param: str
):
    for stream in (False, True):
        reply = client.post(route, json=ROUTES[route] | body | {"stream": stream})
        assert param_of(reply) == param
        assert param in reply.json()["error"]["message"]
    assert server.frontend.calls == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "first", "second"), TWO, ids=range(len(TWO)))
def test_two_grammars_are_refused_and_both_named(client: httpx.Client, route: str, body: Any, first: str, second: str):
    reply = client.post(route, json=ROUTES[route] | body)
    assert param_of(reply) in (first, second)
    assert first in reply.json()["error"]["message"]
    assert second in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        (of_format(type="json_object"), "json_schema", "response_format"),
        ({"guided_regex": "a"}, "regex", "guided_regex"),
        (of_vllm(grammar=GBNF), "ebnf", "structured_outputs.grammar"),
        ({"lark": LARK}, "lark", "lark"),
    ],
)
@pytest.mark.parametrize("with_param", [True, False])
def test_a_later_refusal_of_a_grammar_names_the_client_s_field(
    client: httpx.Client, server: Running, body: Any, kind: str, name: str, with_param: bool
):
    """`with_param`: a refusal that arrives as the end of a sample has a message only."""
    refusal = RequestError(f"{kind}: the property max_new_tokens is odd", kind if with_param else None)
    server.frontend.script.fail_at, server.frontend.script.error = 0, refusal
    error = client.post("/v1/chat/completions", json=ROUTES["/v1/chat/completions"] | body).json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name}: the property max_new_tokens is odd")


def test_the_native_route_has_the_fields_among_the_sampling_parameters(client: httpx.Client, server: Running):
    sampling = [{"json_schema": SCHEMA}, {"choice": ["a"]}, {}]
    reply = client.post(NATIVE, json={"text": ["a", "b", "c"], "sampling_params": sampling})
    assert reply.status_code == 200, reply.text
    assert [resolved.grammar for resolved in server.frontend.resolved] == [
        GrammarSpec("json_schema", TEXT, "json_schema"),
        GrammarSpec("choice", '["a"]', "choice"),
        None,
    ]
    both = {"json_schema": SCHEMA, "lark": LARK}
    assert param_of(client.post(NATIVE, json={"text": "a", "sampling_params": both})) == "lark"
    other_api = {"text": "a", "response_format": {"type": "json_object"}}
    assert param_of(client.post(NATIVE, json=other_api)) == "response_format"


def test_the_openai_client_sends_a_model_of_pydantic_as_a_schema(server: Running):
    """The reply of the fake is no JSON, so only what arrived is looked at."""
    import openai
    import pydantic

    class Place(pydantic.BaseModel):
        name: str
        inhabitants: int

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    with client, pytest.raises(pydantic.ValidationError):
        client.chat.completions.parse(model=MODEL, messages=messages, response_format=Place)
    [sampling] = server.frontend.resolved
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "json_schema"
    assert '"properties":{"name":' in sampling.grammar.text
    assert '"additionalProperties":false' in sampling.grammar.text


def test_the_docs_have_commands_for_every_route():
    assert {path for path, _ in commands()} == {*ROUTES, NATIVE}


@pytest.mark.parametrize(("path", "body"), [*commands()])
def test_the_commands_of_the_docs_are_understood(client: httpx.Client, server: Running, path: str, body: Any):
    """Whether a grammar can be followed is found out later."""
    if "model" in body:
        body["model"] = MODEL
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert all(sampling.grammar is not None for sampling in server.frontend.resolved)


def test_a_deep_schema_is_refused(client: httpx.Client):
    deep = '{"items":' * 3000 + "{}" + "}" * 3000
    body = '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": ' + deep + "}}}"
    reply = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert "nested too deeply" in reply.json()["error"]["message"]
    assert param_of(client.post("/v1/completions", json={"prompt": "a", "json_schema": deep})) == "json_schema"


def test_a_server_without_a_tokenizer_names_the_client_s_field():
    with running_server(skip_tokenizer_init=True) as running:
        running.frontend.has_tokenizer = False
        reply = httpx.post(
            f"{running.url}/v1/completions", json={"prompt": [65], "response_format": {"type": "json_object"}}
        )
    assert param_of(reply) == "response_format"
    assert reply.json()["error"]["message"].startswith("response_format: this server has no tokenizer")
