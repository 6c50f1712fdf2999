"""The terminal chat over an Engine: a real reply, and one whose text is played."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli.chat_sources import ChatSampling, EngineChat, Piece, ToolUse
from headrace.config.server_args import ServerArgs

USER = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def chat() -> Iterator[EngineChat]:
    args = ServerArgs(model_path="smollm2", single_process=True, max_total_tokens=4096, reasoning_parser="think")
    with EngineChat(args, ChatSampling(max_new_tokens=12, temperature=0.0)) as chat:
        yield chat


def text_of(pieces: list[Piece | ToolUse]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Piece))


def test_an_engine_answers_and_is_shown_tools_and_calls(chat: EngineChat) -> None:
    pieces = list(chat.reply(list(USER), None, []))
    assert "Paris" in text_of(pieces)
    assert isinstance(pieces[-1], Piece)
    assert pieces[-1].num_tokens <= 12
    asked = list(chat.reply(list(USER), '{"enum": ["yes"]}', []))
    assert text_of(asked) == '"yes"'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turn = [*USER, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}]
    turn.append({"role": "tool", "tool_call_id": "a", "content": "Paris"})
    assert text_of(list(chat.reply(turn, None, [TOOL])))


def test_what_the_model_writes_becomes_reasoning_text_and_calls(
    chat: EngineChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat._context.model.tokenizer
    ids = tokenizer.encode('<think>so 🙂</think>I look.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')

    def play(**_: Any) -> Iterator[dict[str, Any]]:
        for count in range(1, len(ids) + 1):
            text, ended = tokenizer.decode(ids[:count]), count == len(ids)
            about = {"completion_tokens": count, "finish_reason": {"type": "stop", "matched": 2} if ended else None}
            yield {"text": text if ended else text.rstrip("\ufffd"), "output_ids": ids[:count], "meta_info": about}

    monkeypatch.setattr(chat._engine, "generate", play)
    *pieces, call = chat.reply(list(USER), None, [TOOL])
    shown = [piece for piece in pieces if isinstance(piece, Piece)]
    assert len(shown) == len(pieces)
    assert "".join(piece.text for piece in shown if piece.is_reasoning) == "so 🙂"
    assert "".join(piece.text for piece in shown if not piece.is_reasoning) == "I look."
    assert isinstance(call, ToolUse)
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    assert shown[-1].num_tokens == len(ids)
