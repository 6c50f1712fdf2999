"""A real server and Ollama's own Python client."""

import json
from collections.abc import Iterator

import ollama
import pytest
from server_process import ServerProcess

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name the capital of France. Answer in one short sentence."}]
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def server(smollm2_server: ServerProcess) -> ServerProcess:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_a_chat_and_its_stream(client: ollama.Client) -> None:
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))

    assert "Paris" in (whole.message.content or "")
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count
    assert (whole.eval_duration or 0) > 0


def test_a_prompt_alone_is_the_chat_of_one_message(client: ollama.Client) -> None:
    prompt = QUESTION[0]["content"]
    chat = client.chat(f"{MODEL}:latest", QUESTION, options=GREEDY)
    whole = client.generate(MODEL, prompt, options=GREEDY)
    parts = list(client.generate(MODEL, prompt, options=GREEDY, stream=True))

    assert whole.response == chat.message.content
    assert whole.prompt_eval_count == chat.prompt_eval_count
    assert "".join(part.response or "" for part in parts) == whole.response
    raw = client.generate(MODEL, "The capital of France is", raw=True, options={"temperature": 0, "num_predict": 4})
    assert "Paris" in (raw.response or "")
    assert (raw.prompt_eval_count or 0) < (whole.prompt_eval_count or 0)


def test_a_format_binds_the_reply(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    reply = client.chat(MODEL, QUESTION, format=schema, options={"seed": 1, "num_predict": 64})
    assert list(json.loads(reply.message.content or "")) == ["n"]


def test_a_turn_with_tools_is_a_prompt(client: ollama.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 1, "b": 2}))
    turn = [
        ollama.Message(role="user", content="What is 1 + 2?"),
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        ollama.Message(role="tool", content="3", tool_name="add"),
    ]
    plain = client.chat(MODEL, turn, options=GREEDY)
    with_tools = client.chat(MODEL, turn, tools=[add], options=GREEDY)
    assert (with_tools.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)


def test_what_is_there(client: ollama.Client, server: ServerProcess) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == f"{MODEL}:latest"
    assert (loaded.name, loaded.context_length) == (f"{MODEL}:latest", 8192)
    shown = client.show(MODEL)
    for details in (listed.details, loaded.details, shown.details):
        assert details is not None
        assert (details.format, details.parameter_size) == ("gguf", "134.52M")
        assert details.quantization_level == "Q4_1"
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["llama.context_length"] == 8192
    assert client.pull(MODEL).status == "success"
    assert [progress.status for progress in client.pull(MODEL, stream=True)][-1] == "success"
    assert client.chat(MODEL, []).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"


def test_errors_are_the_client_s_own(client: ollama.Client) -> None:
    for call in (lambda: client.show("other"), lambda: client.pull("other"), lambda: client.chat("other", QUESTION)):
        with pytest.raises(ollama.ResponseError, match="not served here") as caught:
            call()
        assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        list(client.chat(MODEL, QUESTION, options={"mirostat": 1}, stream=True))
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embed(MODEL, "hi")
