"""A limit of reasoning tokens, by every name that chats have for it."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, TEMPLATE, Running, running_server

from headrace.sampling.params import ThinkingBudget

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


def test_a_budget_in_the_objects_of_other_clients(thinking: Running, client: httpx.Client):
    resolved = thinking.frontend.resolved
    asking = [{"thinking": {"type": "enabled", "budget_tokens": 7}}, {"reasoning": {"max_tokens": 7}}]
    for fields in asking:
        reply = client.post(CHAT, json=ASKED | fields)
        assert (reply.status_code, reply.headers.get("x-headrace-noted")) == (200, None)
        assert resolved[-1].thinking_budget == budget_of(thinking, 7, False), "the template was told to think"
    reply = client.post(CHAT, json=ASKED | asking[0] | {"thinking_budget": 5})
    assert (reply.status_code, reply.headers["x-headrace-noted"]) == (200, "thinking.budget_tokens=5")
    assert resolved[-1].thinking_budget.num_tokens == 5


def test_a_budget_that_cannot_be_kept_is_refused_and_one_that_clients_always_send_is_noted():
    with running_server() as running, httpx.Client(base_url=running.url) as client:
        reply = client.post(CHAT, json=ASKED | {"thinking_budget": 5})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking_budget")
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}}
        hints = [(MESSAGES, thinking), (CHAT, thinking), (CHAT, {"reasoning": {"max_tokens": 5}})]
        for (path, fields), stream in product(hints, (False, True)):
            reply = client.post(path, json=ASKED | fields | {"stream": stream})
            name = "reasoning.max_tokens" if "reasoning" in fields else "thinking.budget_tokens"
            assert (reply.status_code, reply.headers["x-headrace-noted"]) == (200, name)
            assert running.frontend.resolved[-1].thinking_budget is None
        assert client.post(MESSAGES, json=ASKED | {"thinking": {"type": "adaptive"}}).status_code == 200
