"""docs/fields.md: every field and word of the official clients' request types has a class there, and the server does what the class says."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import ollama._types as ollama_types
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from client_fields import ANY, Found, Section, sections, walk
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

NOTED = "x-headrace-noted"
USER = {"role": "user", "content": "hi"}
KINDS: dict[str, tuple[type[Any], ...]] = {
    "Chat completions": (chat_create_params.CompletionCreateParamsBase,),
    "Completions": (completion_create_params.CompletionCreateParamsBase,),
    "Embeddings": (embedding_create_params.EmbeddingCreateParams,),
    "Responses": (response_create_params.ResponseCreateParamsBase,),
    "Messages": (
        message_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
        beta_create_params.MessageCreateParamsBase,
        beta_count_params.MessageCountTokensParams,
    ),
    "Ollama": (
        ollama_types.ChatRequest,
        ollama_types.GenerateRequest,
        ollama_types.EmbedRequest,
        ollama_types.EmbeddingsRequest,
        ollama_types.PullRequest,
        ollama_types.ShowRequest,
    ),
}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "Chat completions": ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}),
    "Completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    "Responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    "Messages": ("/v1/messages", {"model": "", "max_tokens": 2, "messages": [USER]}),
}
SENT_AS_HEADERS = {"betas"}
PAGE = sections()


def fields_of(name: str, section: Section) -> list[Found]:
    """Every field and word of an API's types, as far as the table does not stop at a field above; each once."""
    found = {}
    for kind in KINDS[name]:
        for field in walk(kind, "", lambda body: body, section.covers):
            if field.path not in SENT_AS_HEADERS:
                found.setdefault((field.path, field.word), field)
    return list(found.values())


def test_the_page_has_a_table_for_every_api():
    assert [name for name, section in PAGE.items() if section.rows] == list(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_every_field_and_word_has_a_class(name: str):
    section = PAGE[name]
    found = fields_of(name, section)
    missing = [(field.path, field.word) for field in found if section.row(field.path, field.word) is None]
    assert not missing, f"give them a class in docs/fields.md, {name}"
    paths = {field.path for field in found}
    words = {(field.path, field.word) for field in found}
    for row in section.rows:
        for field in row.fields:
            path = field.removesuffix(".*")
            assert path in paths, f"{name}: no type has {field}"
            assert row.values == (ANY,) or {(path, value) for value in row.values} <= words, (
                f"{name}: {field} has other words"
            )


def test_a_field_that_nobody_has_classed_fails():
    section = PAGE["Chat completions"]
    assert section.row("nobody_knows") is None
    assert section.row("reasoning_effort", "enormous") is None
    assert section.row("messages[user].content[hologram]") is None
    assert section.row("messages[user].content[text].text") is not None


def probed(name: str) -> Iterator[tuple[Found, str]]:
    """The fields and words whose class says what becomes of a request."""
    section = PAGE[name]
    for field in fields_of(name, section):
        row = section.row(field.path, field.word)
        if row is None or (field.word is None and row.values) or row.values == (ANY,):
            continue
        is_simple = field.word is not None and "[" not in field.path and field.path != "tool_choice"
        if row.kind != "served" or is_simple:
            yield field, row.kind


@pytest.mark.parametrize("name", ROUTES)
def test_the_server_does_what_the_class_says(client: httpx.Client, name: str):
    route, good = ROUTES[name]
    wrong = []
    for field, kind in probed(name):
        top = re.split(r"[.\[]", field.path)[0]
        reply = client.post(route, json=good | {top: field.body[top]})
        names = [last.strip("[]") for last in re.findall(r"\w+|\[\w+\]", field.path)[-2:]]
        match kind:
            case "refused":
                right = reply.status_code in (400, 404) and any(last in reply.text for last in names)
            case "noted":
                right = reply.status_code == 200 and field.path in reply.headers.get(NOTED, "")
            case _:
                right = reply.status_code == 200 and NOTED not in reply.headers
        if not right:
            wrong.append((kind, field.path, field.word, reply.status_code, reply.headers.get(NOTED), reply.text[:150]))
    assert not wrong, "\n".join(map(str, wrong))
