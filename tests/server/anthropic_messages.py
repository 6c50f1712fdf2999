"""Bodies of /v1/messages that several tests share, and what a stream adds up to."""

import json
from typing import Any

import httpx
from fake_frontend import MODEL

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
USE = {"type": "tool_use", "id": "toolu_a", "name": "get_weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_a", "content": "sunny"}
TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, USE]},
    {"role": "user", "content": [RESULT]},
]


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; checks the framing, and that the name of each event is its type."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def folded(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; checks the order of the events."""
    first, *middle, delta, stop = stream
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is message["stop_sequence"] is None
    assert message["usage"]["output_tokens"] == 0
    partial: dict[int, str] = {}
    is_open = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                block = event["content_block"]
                assert not any(block.get(name) for name in ("text", "thinking", "input")), "begins empty"
                message["content"].append(block)
                partial[event["index"]] = ""
                is_open = True
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                is_open = False
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                given, block = event["delta"], message["content"][-1]
                match given["type"]:
                    case "text_delta":
                        block["text"] += given["text"]
                    case "thinking_delta":
                        assert not block["signature"]
                        block["thinking"] += given["thinking"]
                    case "signature_delta":
                        block["signature"] = given["signature"]
                    case "input_json_delta":
                        partial[event["index"]] += given["partial_json"]
                    case other:
                        raise AssertionError(other)
            case other:
                raise AssertionError(other)
    assert not is_open
    for index, text in partial.items():
        block = message["content"][index]
        if block["type"] == "tool_use" and text:
            try:
                value = json.loads(text)
            except ValueError:
                value = None
            block["input"] = value if isinstance(value, dict) else {"invalid_arguments": text}
    assert message["usage"].items() <= (delta["usage"] | {"output_tokens": 0}).items()
    return message | delta["delta"] | {"usage": delta["usage"]}
