"""The examples run as they are, over one engine; what they find out is right."""

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from engines import running_engine

import headrace
from headrace.api.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with running_engine("smollm2") as engine:
        yield engine


class Borrowed:
    """The shared engine, which an example does not end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_shut_down = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def run(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs an example and returns its variables."""
    borrowed = Borrowed(shared)

    def engine(model_path: str) -> Borrowed:
        assert model_path == "smollm2"
        return borrowed

    monkeypatch.setattr(headrace, "Engine", engine, raising=False)
    yield lambda name: runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert borrowed.is_shut_down


def test_chat(run: Callable[[str], dict[str, Any]]) -> None:
    found = run("chat.py")
    assert "Paris" in found["reply"].text
    assert found["text"]
    assert found["engine"].tokenizer.decode(found["ids"]) == found["text"]


def test_same_tokens(run: Callable[[str], dict[str, Any]]) -> None:
    found = run("same_tokens.py")
    assert found["same"]
    assert len(found["alone"]["output_ids"]) == 128


def test_tools(run: Callable[[str], dict[str, Any]]) -> None:
    found = run("tools.py")
    assert [message["role"] for message in found["messages"]] == ["user", "assistant", "tool"]
    assert found["messages"][-1]["content"] == "There are 12 apples in the shop."
    assert found["reply"].text
    assert not found["reply"].tool_calls


def test_structured_output(run: Callable[[str], dict[str, Any]]) -> None:
    found = run("structured_output.py")
    jsonschema_rs.validate(found["SCHEMA"], found["building"])
    assert re.fullmatch(found["DATE"], found["date"])
    assert set(found["verdicts"]) <= {" positive", " negative"}


def test_batch(run: Callable[[str], dict[str, Any]], shared: Engine) -> None:
    found = run("batch.py")
    alone = [
        shared.generate(prompt, {"temperature": 0, "max_new_tokens": 4, "stop": "."})["text"]
        for prompt in found["prompts"]
    ]
    assert [reply["text"] for reply in found["replies"]] == alone
    assert "Paris" in alone[0]
    assert len(found["samples"]) == 4
    assert len(found["answers"]) == len(found["COUNTRIES"])
