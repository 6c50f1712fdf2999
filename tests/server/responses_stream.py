"""Reads the stream of a response, and checks what holds for every one."""

import json
from typing import Any

import httpx
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed")
TEXT_FIELDS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, in the framing and with the fields that OpenAI's client knows; checks their order and numbers."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        found.append(event)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] in ENDS
    assert not any(event["type"] in ENDS for event in found[:-1])
    return found


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end of a stream, which all its other events must agree with."""
    items: list[dict[str, Any]] = []
    texts: dict[tuple[str, int], str] = {}
    is_open = False
    for event in found[2:-1]:
        kind, _, last = event["type"].rpartition(".")
        if event["type"] == "response.output_item.added":
            assert not is_open, "one item at a time"
            is_open = True
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif event["type"] == "response.output_item.done":
            is_open = False
            begun = items[event["output_index"]]
            assert {name: begun[name] for name in ("id", "type")} == {
                name: event["item"][name] for name in ("id", "type")
            }
            items[event["output_index"]] = event["item"]
        elif last == "delta":
            assert event["delta"], "no empty deltas"
            place = (kind, event["output_index"])
            texts[place] = texts.get(place, "") + event["delta"]
        elif kind in TEXT_FIELDS:
            assert event[TEXT_FIELDS[kind]] == texts.get((kind, event["output_index"]), "")
    assert not is_open
    response: dict[str, Any] = found[-1]["response"]
    Response.model_validate(response)
    assert response["output"] == items
    assert response["id"] == found[0]["response"]["id"]
    for kind, place in texts:
        assert texts[kind, place] in json.dumps(items[place], ensure_ascii=False) or "\\" in json.dumps(
            texts[kind, place]
        )
    return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """The response without what differs each time."""
    changing = ("id", "created_at", "completed_at")
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {name: value for name, value in response.items() if name not in changing} | {"output": items}
