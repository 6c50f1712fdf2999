"""Replies of Ollama's API: lines of newline-delimited JSON, or one object.

Owns how events become messages: tool calls are whole, with their arguments as an object. Runs in the event loop that serves HTTP.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from headrace.errors import HeadraceError
from headrace.frontend.sample_update import LogprobItem, SampleUpdate, failure_of
from headrace.messages.outputs import FinishReason
from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.server.chat.choice_stream import ChoiceStream
from headrace.server.error_forms import ApiError, ollama_error
from headrace.server.http import describe_error, encode_json
from headrace.server.openai.logprobs import token_logprob
from headrace.text.tokenizers import Tokenizer

NDJSON = b"application/x-ndjson"
Kind = Literal["chat", "generate"]

_ARGUMENTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class Part:
    """A piece of a message. tool_calls: complete ones."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[object] = field(default_factory=list)


class PartJoiner:
    """Turns events into parts; a call is held until it is complete."""

    def __init__(self) -> None:
        self._call: ToolCall | None = None
        self._arguments: list[str] = []

    def push(self, events: Iterable[Event], ended: bool) -> list[Part]:
        """The parts that events complete. ended: nothing follows.

        A call whose arguments are no JSON object, because the output was cut off or the model wrote nonsense, is given as content.
        """
        parts: list[Part] = []
        for event in events:
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
                continue
            parts += self._finished_call()
            match event:
                case Text(text):
                    parts.append(Part(content=text))
                case Reasoning(text):
                    parts.append(Part(thinking=text))
                case ToolCall():
                    self._call = event
        return parts + self._finished_call() if ended else parts

    def _finished_call(self) -> list[Part]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return []
        # Valid JSON has line breaks only between its tokens; a line of the stream must have none.
        arguments = (text.strip() or "{}").replace("\n", " ").replace("\r", " ")
        try:
            _ARGUMENTS.decode(arguments)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [Part(content=f"{call.name} {text}")]
        function = {"index": call.index, "name": call.name, "arguments": msgspec.Raw(arguments.encode())}
        return [Part(tool_calls=[{"id": call.id, "function": function}])]


class ReplyWriter:
    """Writes the reply to one request.

    model: as the client calls it. kind: where the text goes, into `message` or `response`. wants_logprobs: replies have `logprobs`.
    """

    def __init__(
        self, model: str, kind: Kind, choice: ChoiceStream, tokenizer: Tokenizer, wants_logprobs: bool
    ) -> None:
        self._model = model
        self._kind = kind
        self._choice = choice
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._joiner = PartJoiner()
        self._start_ns = time.monotonic_ns()

    def lines(self, update: SampleUpdate) -> bytes:
        """The lines of an update: one for each part, then the last one with the counts if the output has ended, or its error."""
        ended = update.finish is not None
        parts = self._joiner.push(self._choice.push(update), ended)
        logprobs = self._logprobs(update)
        if logprobs and not parts:
            parts.append(Part())
        lines = [self._head() | self._body(part) | {"done": False} for part in parts]
        if logprobs:
            lines[-1]["logprobs"] = logprobs
        written = b"".join(encode_json(line) + b"\n" for line in lines)
        if update.finish is None:
            return written
        failure = failure_of(update.finish)
        if failure is not None:
            return written + error_line(describe_error(failure)[2])
        return written + encode_json(self._head() | self._body(Part()) | self._ending(update, update.finish)) + b"\n"

    def whole(self, update: SampleUpdate) -> dict[str, object]:
        """The reply of a request that does not stream. Raises HeadraceError for an output that failed."""
        assert update.finish is not None, "it has ended"
        failure: HeadraceError | None = failure_of(update.finish)
        if failure is not None:
            raise failure
        parts = self._joiner.push(self._choice.push(update), True)
        joined = Part(
            "".join(part.content for part in parts),
            "".join(part.thinking for part in parts),
            [call for part in parts for call in part.tool_calls],
        )
        reply = self._head() | self._body(joined) | self._ending(update, update.finish)
        return reply | {"logprobs": self._logprobs(update)} if self._wants_logprobs else reply

    def unasked(self, reason: Literal["load", "unload"]) -> dict[str, object]:
        """The reply to a request without messages or prompt."""
        return self._head() | self._body(Part()) | {"done": True, "done_reason": reason}

    def _head(self) -> dict[str, object]:
        return {"model": self._model, "created_at": timestamp(time.time())}

    def _body(self, part: Part) -> dict[str, object]:
        more: dict[str, object] = {"thinking": part.thinking} if part.thinking else {}
        if part.tool_calls:
            more["tool_calls"] = part.tool_calls
        if self._kind == "generate":
            return {"response": part.content, **more}
        return {"message": {"role": "assistant", "content": part.content, **more}}

    def _ending(self, update: SampleUpdate, finish: FinishReason) -> dict[str, object]:
        times = update.times
        first_s = times.ttft_s if times.ttft_s is not None else times.e2e_s or 0.0
        return {
            "done": True,
            "done_reason": finish.type,
            "total_duration": time.monotonic_ns() - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": update.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - times.queue_s),
            "eval_count": update.usage.completion_tokens,
            "eval_duration": _nanoseconds((times.e2e_s or 0.0) - first_s),
        }

    def _logprobs(self, update: SampleUpdate) -> list[object]:
        if not self._wants_logprobs or update.logprobs is None:
            return []
        output = update.logprobs.output
        rows: Sequence[Sequence[LogprobItem] | None] = output.top or [None] * len(output.tokens)
        found: list[object] = []
        for item, row in zip(output.tokens, rows, strict=True):
            shown = token_logprob(self._tokenizer, item)
            if row:
                shown["top_logprobs"] = [token_logprob(self._tokenizer, other) for other in row]
            found.append(shown)
        return found


def error_line(error: ApiError) -> bytes:
    """The line that reports a failure after the reply has begun."""
    return ollama_error(500, error) + b"\n"


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, round(seconds * 1e9))
