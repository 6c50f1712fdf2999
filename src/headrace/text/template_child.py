"""A child that renders chat templates: `python -m headrace.text.template_child`. A template that never ends, or takes gigabytes in one step, costs it
its life, not the server's.

Owns what the child is asked and answers; `chat_templates.TemplateChildren` is the other side. The child is sent a `Setup`, answers `Ready`, and from
then on prints nothing and answers each `Question`. It imports no more than Jinja and what the messages need.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.child_pool.child_side import MIB, Frames, answer_all, run
from headrace.errors import HeadraceError
from headrace.text.template_sandbox import Marks, RenderTask, TemplateFacts, TemplateStoppedError, facts_of, render

STACK_BYTES = 8 * MIB
NICE = 0
"""A request waits for it before anything else is done."""


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. memory_bytes: what it may allocate beyond what it needs itself."""

    memory_bytes: int


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """What does the source of a template say?"""

    source: str


class Render(msgspec.Struct, frozen=True, tag=True):
    """What does a template make of variables? A `RenderTask`. variables: `packed`. marks: `Marks.back`."""

    source: str
    variables: bytes
    marks: dict[str, str] | None
    max_seconds: float
    max_chars: int


Question = Inspect | Render


class Answer(msgspec.Struct, frozen=True):
    """kind: what `text` is: what was rendered, the words of a failure for the client, or the reason of a `TemplateStoppedError`."""

    kind: Literal["done", "failed", "stopped"]
    text: str = ""
    facts: TemplateFacts | None = None
    left_bytes: int = 0


ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_SETUPS = msgspec.msgpack.Decoder(Setup)
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


def packed(own: Mapping[str, Any], values: Mapping[str, Any]) -> bytes:
    """The variables of a render: msgpack, or JSON where an integer has more than 64 bits. Raises TypeError or ValueError for what is neither."""
    try:
        return msgspec.msgpack.encode((own, values))
    except OverflowError:
        return json.dumps((own, values)).encode()


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    own, values = json.loads(data) if data.startswith(b"[") else msgspec.msgpack.decode(data)
    return own, values


def answer(question: Question) -> Answer:
    try:
        if isinstance(question, Inspect):
            return Answer("done", facts=facts_of(question.source))
        own, values = unpacked(question.variables)
        marks = None if question.marks is None else Marks(question.marks)
        task = RenderTask(question.source, own, values, marks, question.max_seconds, question.max_chars)
        text = render(task)
        text.encode()
        return Answer("done", text)
    except UnicodeEncodeError:
        return Answer("failed", "the chat template makes text that is not Unicode")
    except TemplateStoppedError as error:
        return Answer("stopped", error.reason)
    except HeadraceError as error:
        return Answer("failed", error.message)


def serve(frames: Frames) -> None:
    limit_bytes = frames.receive(_SETUPS).memory_bytes
    answer(Render("{{ messages | tojson }}", packed({}, {"messages": []}), None, 1.0, 100))
    answer_all(frames, _QUESTIONS, answer, limit_bytes, lambda said: sys.getsizeof(said.text))


def main() -> None:
    run(serve, STACK_BYTES, "templates", NICE)


if __name__ == "__main__":
    main()
