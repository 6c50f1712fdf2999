"""A limit of reasoning tokens, by every name that chats have for it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, TEMPLATE, Running, running_server

from headrace.sampling.thinking_budget import ThinkingBudget

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
NAMES = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
THINKS = TEMPLATE + "{% if add_generation_prompt and enable_thinking is not defined %}<think>{% endif %}"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    with running_server(THINKS, special_tokens=("<think>", "</think>")) as running:
        yield running


@pytest.fixture
def client(thinking: Running) -> Iterator[httpx.Client]:
    thinking.frontend.reset()
    with httpx.Client(base_url=thinking.url, timeout=20) as found:
        yield found


def budget_of(running: Running, num_tokens: int, is_open: bool) -> ThinkingBudget:
    ids = running.frontend.tokenizer.added_tokens
    begin, end = ids["<think>"], ids["</think>"]
    return ThinkingBudget(num_tokens=num_tokens, end_id=end, end_ids=(end,), begins=((begin,),), is_open=is_open)


def test_a_budget_reaches_the_engine_by_each_of_its_names(thinking: Running, client: httpx.Client):
    resolved = thinking.frontend.resolved
    for name in NAMES:
        for value in (0, 7):
            assert client.post(CHAT, json=ASKED | {name: value}).status_code == 200
            assert resolved[-1].thinking_budget == budget_of(thinking, value, True)
        for value in (-1, None):
            assert client.post(CHAT, json=ASKED | {name: value}).status_code == 200
            assert resolved[-1].thinking_budget is None
        reply = client.post(CHAT, json=ASKED | {name: -2})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert client.post(CHAT, json=ASKED | dict.fromkeys(NAMES, 5)).status_code == 200
    assert client.post(CHAT, json=ASKED | {NAMES[0]: 5, NAMES[1]: 6}).status_code == 400
    off = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_budget": 3}
    assert client.post(CHAT, json=ASKED | off).status_code == 200
    assert resolved[-1].thinking_budget == budget_of(thinking, 3, False)
    thinking_of_messages = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert client.post(MESSAGES, json=ASKED | thinking_of_messages).status_code == 200
    assert resolved[-1].thinking_budget == budget_of(thinking, 1024, False), "the template was told to think"


def test_a_budget_that_cannot_be_kept_is_refused():
    with running_server() as running, httpx.Client(base_url=running.url) as client:
        reply = client.post(CHAT, json=ASKED | {"thinking_budget": 5})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking_budget")
        reply = client.post(MESSAGES, json=ASKED | {"thinking": {"type": "enabled", "budget_tokens": 5}})
        assert reply.status_code == 400
        assert "thinking.budget_tokens: " in reply.json()["error"]["message"]
        assert client.post(MESSAGES, json=ASKED | {"thinking": {"type": "adaptive"}}).status_code == 200
