"""The response object, and the stream that leads to it.

Owns the fields of the object, its status, and the first and last events of a stream. Runs in the event loop that serves HTTP.
"""

import time
from collections.abc import Sequence

import msgspec

from headrace.frontend.sample_update import SampleUpdate, failure_of
from headrace.messages.outputs import FinishReason
from headrace.server.chat.calls import ChatCall
from headrace.server.chat.logprobs import token_logprob
from headrace.server.error_forms import ApiError
from headrace.server.http import describe_error, encode_json
from headrace.server.responses.output import EventNumbers, Fields, OutputWriter
from headrace.server.responses.protocol import ResponsesRequest
from headrace.server.responses.tools import OfferedTools, is_server_run

_ABORTED = ApiError("the request was aborted", "server_error", None, None)


class ResponseReply:
    """Writes one response from the updates of its sample. The same calls write a stream and a whole reply, which drops the frames.

    model: as the client named it, or the served one. is_stored: whether the response will be kept. counts_cached: whether the usage says how
    much of the prompt was found in the cache.
    """

    def __init__(
        self,
        response_id: str,
        request: ResponsesRequest,
        chat: ChatCall,
        tools: OfferedTools,
        *,
        model: str,
        is_stored: bool,
        counts_cached: bool,
    ) -> None:
        self.id = response_id
        self._request = request
        self._tokenizer = chat.context.model.tokenizer
        self._counts_cached = counts_cached
        self._numbers = EventNumbers()
        self._is_text = chat.format is None
        self._output = OutputWriter(self._numbers, tools, has_marks=not self._is_text)
        self._choice = chat.choice()
        self._has_begun = False
        self._usage: Fields | None = None
        self._finish: FinishReason | None = None
        self._error: Fields | None = None
        self._completed_at: int | None = None
        self._fixed = _fixed_fields(request, response_id, model, is_stored)

    def push(self, update: SampleUpdate) -> bytes:
        """The frames of an update; the first also begins the stream."""
        frames = b"" if self._has_begun else self._begin()
        if self._request.wants_logprobs:
            frames += self._push_with_logprobs(update)
        else:
            frames += self._output.push(self._choice.push(update))
        if update.finish is not None:
            self._finish = update.finish
            self._usage = self._usage_of(update)
        return frames

    def end(self) -> bytes:
        """The frames after the last update."""
        finish = self._finish
        assert finish is not None, "the sample has ended"
        failure = failure_of(finish)
        if failure is not None:
            return self.failed(describe_error(failure)[2])
        if finish.type == "abort":
            return self.failed(_ABORTED)
        if finish.type == "stop":
            self._completed_at = int(time.time())
        frames = self._output.finish("completed" if finish.type == "stop" else "incomplete")
        return frames + self._last_event()

    def failed(self, error: ApiError) -> bytes:
        """The frames that end the stream with an error."""
        frames = b"" if self._has_begun else self._begin()
        code = {"requests": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
        self._error = {"code": code.get(error.type, "server_error"), "message": error.message}
        return frames + self._output.finish("incomplete") + self._last_event()

    @property
    def items(self) -> Sequence[Fields]:
        """The items of the output that are complete."""
        return self._output.items

    @property
    def status(self) -> str:
        """The response's status."""
        if self._error is not None:
            return "failed"
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish.type == "length" else "completed"

    def response(self) -> Fields:
        """The response object as of now."""
        status = self.status
        return self._fixed | {
            "status": status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._output.items),
            "usage": self._usage,
        }

    def _begin(self) -> bytes:
        self._has_begun = True
        response = b'"response":' + encode_json(self.response())
        return self._numbers.frame("response.created", response) + self._numbers.frame("response.in_progress", response)

    def _last_event(self) -> bytes:
        return self._numbers.frame(f"response.{self.status}", b'"response":' + encode_json(self.response()))

    def _usage_of(self, update: SampleUpdate) -> Fields:
        usage = update.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens if self._counts_cached else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._choice.num_reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _push_with_logprobs(self, update: SampleUpdate) -> bytes:
        """The frames of an update, each token for itself, so that those of the reasoning can be told from those of the text."""
        logprobs = self._logprobs(update)
        if self._is_text or not update.ids:
            return self._output.push(self._choice.push(update), logprobs)
        # The text first; it waits for its tokens.
        frames = self._output.push(self._choice.push(msgspec.structs.replace(update, ids=[], finish=None)))
        last = len(update.ids) - 1
        for number, (token_id, logprob) in enumerate(zip(update.ids, logprobs, strict=True)):
            finish = update.finish if number == last else None
            one = msgspec.structs.replace(update, ids=[token_id], text="", finish=finish)
            frames += self._output.push(self._choice.push(one), [logprob])
        return frames

    def _logprobs(self, update: SampleUpdate) -> list[Fields]:
        assert update.logprobs is not None, "they were requested"
        output, count = update.logprobs.output, self._request.top_logprobs or 0
        rows = output.top or [[] for _ in output.tokens]
        return [
            token_logprob(self._tokenizer, token)
            | {"top_logprobs": [token_logprob(self._tokenizer, other) for other in (row or [])[:count]]}
            for token, row in zip(output.tokens, rows, strict=True)
        ]


def _fixed_fields(request: ResponsesRequest, response_id: str, model: str, is_stored: bool) -> Fields:
    """The fields that do not change: what the request asked for."""
    text_format = request.text.format if request.text is not None else None
    asked_format = {} if text_format is None else _given(text_format)
    reasoning = request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id or None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} | asked_format, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"type": "function"} | tool for tool in request.tools or () if not is_server_run(tool)],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _given(struct: msgspec.Struct) -> Fields:
    """The fields of a struct that are not None."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
