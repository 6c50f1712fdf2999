"""The terminal chat over an Engine: a real reply, and one whose text is played."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.api.chat_reply import ChatDelta, ChatUsage, ToolCallDelta
from headrace.cli.chat_sources import ChatSampling, EngineChat, Piece, ToolUse
from headrace.config.server_args import ServerArgs
from headrace.errors import RequestError

USER = [{"role": "user", "content": "Name the capital of France."}]
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
    deltas = [
        ChatDelta(reasoning="so "),
        ChatDelta(reasoning="🙂"),
        ChatDelta("I look."),
        ChatDelta(tool_call=ToolCallDelta(0, "", "call_1", "f")),
        ChatDelta(tool_call=ToolCallDelta(0, '{"x":')),
        ChatDelta(tool_call=ToolCallDelta(0, " 1}"), finish_reason="tool_calls"),
        ChatDelta(usage=ChatUsage(5, 30)),
    ]

    def play(*_: Any, **__: Any) -> Iterator[ChatDelta]:
        yield from deltas

    monkeypatch.setattr(chat._engine, "chat", play)
    *pieces, call = chat.reply(list(USER), None, [TOOL])
    shown = [piece for piece in pieces if isinstance(piece, Piece)]
    assert len(shown) == len(pieces)
    assert "".join(piece.text for piece in shown if piece.is_reasoning) == "so 🙂"
    assert "".join(piece.text for piece in shown if not piece.is_reasoning) == "I look."
    assert isinstance(call, ToolUse)
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    assert shown[-1].num_tokens == 30


def test_settings_reach_the_engine_and_a_full_context_is_said(chat: EngineChat) -> None:
    before = chat.sampling
    try:
        for name, value in (("max_tokens", 3), ("top_k", 5), ("frequency_penalty", 0.5), ("seed", 1), ("min_p", 0.1)):
            chat.sampling = chat.sampling.with_value(name, value)
        *_, last = chat.reply(list(USER), None, [])
        assert isinstance(last, Piece)
        assert last.num_tokens == 3
        with pytest.raises(RequestError, match=r"maximum context length is .*/clear starts again"):
            list(chat.reply([{"role": "user", "content": "a b " * 5000}], None, []))
    finally:
        chat.sampling = before
