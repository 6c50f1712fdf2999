"""A limit of reasoning over a real server, with a random model whose template opens its reasoning and which would never end it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, events, serving

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ASKED: dict[str, Any] = {
    "model": "thinker",
    "messages": [{"role": "user", "content": "Why?"}],
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 3,
}


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = Path(folder, "tokenizer.json")
    text = tokenizer.read_text()
    # Two special tokens that nothing else uses.
    for old, new in (("<repo_name>", "<think>"), ("<reponame>", "</think>")):
        assert f'"{old}"' in text
        text = text.replace(f'"{old}"', f'"{new}"')
    tokenizer.write_text(text)
    config = Path(folder, "tokenizer_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    with serving(str(folder), "--served-model-name", "thinker", "--max-total-tokens", "4096") as it:
        yield it


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=ASKED | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("budget", [0, 1, 9, 40])
def test_reasoning_ends_at_its_budget(server: ServerProcess, budget: int):
    free = chat(server, ignore_eos=True)
    assert free["usage"]["completion_tokens_details"] == {"reasoning_tokens": 48}
    bound = chat(server, ignore_eos=True, thinking_budget=budget)
    assert bound["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}
    message = bound["choices"][0]["message"]
    assert free["choices"][0]["message"]["reasoning_content"].startswith(message["reasoning_content"] or "")
    assert message["content"]
    body = ASKED | {"ignore_eos": True, "thinking_budget": budget, "stream": True}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    deltas = [choice["delta"] for event in events(reply.content) for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert thoughts == (message["reasoning_content"] or "")


def test_the_answer_after_it_matches_its_schema(server: ServerProcess):
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}}}
    reply = chat(server, thinking_budget=6, response_format=wanted)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert json.loads(reply["choices"][0]["message"]["content"])["a"] in ("yes", "no")


def test_messages_have_the_budget_too(server: ServerProcess):
    body = {name: value for name, value in ASKED.items() if name != "seed"}
    body["thinking"] = {"type": "enabled", "budget_tokens": 7}
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    assert reply["usage"]["output_tokens_details"] == {"thinking_tokens": 7}
    assert reply["content"][0]["type"] == "thinking"
