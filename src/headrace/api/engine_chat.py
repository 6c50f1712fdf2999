"""`Engine.chat`, `encode`, `rerank` and `score`: without HTTP, by the handlers and functions that also serve the routes.

So the prompt, the sampling, what is refused, and how the output is read are the same. Runs in the engine's event loop.
"""

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

import msgspec

from headrace.api.chat_reply import ChatDelta, ChatReply, read_chunk, read_reply
from headrace.api.methods import Route
from headrace.errors import ExecutionError, RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.launch import RunningEngine
from headrace.messages.bodies import converted
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import Program, ServerStatus, ServingContext
from headrace.server.http import encode_json
from headrace.server.openai.chat import ChatGeneration, ChatServing
from headrace.server.openai.protocol import ChatCompletionRequest
from headrace.server.pooling.calls import results_of
from headrace.server.pooling.protocol import pooling_of
from headrace.server.pooling.rerank import RerankRequest, ranked
from headrace.server.pooling.score import ScoreRequest, asks_for_labels, label_scores, text_scores


class EngineChat:
    """The chats of one engine, and its scores of texts."""

    @classmethod
    def over(cls, running: RunningEngine) -> Self:
        model = running.files.served(running.ready)
        return cls(ServingContext(running.tokenizer_manager, model, running.args, ServerStatus(started=True)))

    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._threads = context.text_threads
        self._serving = ChatServing(context)
        self._program = Program(context)

    def close(self) -> None:
        self._threads.close()

    async def whole(self, fields: dict[str, Any]) -> ChatReply:
        """The reply to a chat completion with these fields. Raises RequestError, CapacityError, ExecutionError."""
        request, serving = converted(fields, ChatCompletionRequest), self._serving
        grammar = request.asked_grammar()
        try:
            generation = await serving.prepare(request)
            async with aclosing(serving.updates(self._program, generation)) as updates:
                news = [update async for update in updates]
        except RequestError as exc:
            raise serving.renamed(exc, request, grammar) from None
        count = serving.usage_count(generation)
        for update in news:
            update.raise_failure()
            count.add(update)
        serving.headers(generation)  # the log names what is not honoured as it stands
        completion = serving.response(generation, news, count.total())
        return read_reply(json.loads(encode_json(completion)))

    async def encoded(self, request: EmbeddingReqInput) -> list[SampleUpdate]:
        """The results of all inputs, in order; thousands of them are sent in chunks. Raises RequestError, CapacityError, ExecutionError."""
        pooling_of(self._context.model)
        updates = await results_of(self._program, request, partial=True)
        return [msgspec.structs.replace(update, index=index) for index, update in enumerate(updates)]

    async def scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        """What the reply of a route to these fields says of scores. Raises RequestError, CapacityError, ExecutionError."""
        rid = str(fields.get("rid") or uuid.uuid4().hex)
        if route == "/v1/rerank":
            ranking = await ranked(self._program, converted(fields, RerankRequest), rid)
            return {"results": [msgspec.to_builtins(result) for result in ranking.results()]}
        request = converted(fields, ScoreRequest)
        if asks_for_labels(request):
            return {"scores": (await label_scores(self._program, request, rid))[0]}
        scores, _ = await text_scores(self._program, request, rid)
        return {"data": [{"score": score} for score in scores]}

    async def stream(self, fields: dict[str, Any]) -> AsyncGenerator[ChatDelta, None]:
        """Like `whole`, what is new piece by piece. Closing the iterator stops the reply."""
        request, serving = converted(fields, ChatCompletionRequest), self._serving
        grammar = request.asked_grammar()
        try:
            generation = await serving.prepare(request)
            async with aclosing(self._frames(generation)) as frames:
                async for frame in frames:
                    for delta in _deltas(frame):
                        yield delta
        except RequestError as exc:
            raise serving.renamed(exc, request, grammar) from None

    async def _frames(self, generation: ChatGeneration) -> AsyncGenerator[bytes, None]:
        """The events of a stream, as a client of the server would get them."""
        serving = self._serving
        writer, count = serving.chunk_writer(generation), serving.usage_count(generation)
        async with aclosing(serving.updates(self._program, generation)) as updates:
            async for update in updates:
                update.raise_failure()
                if update.finish is not None:
                    count.add(update)
                yield writer.delta(update)
        serving.headers(generation)
        yield writer.usage(serving.total_usage(generation, count.total()))


def _deltas(frames: bytes) -> list[ChatDelta]:
    found = []
    for frame in frames.split(b"\n\n"):
        if frame:
            chunk = json.loads(frame.removeprefix(b"data: "))
            if "error" in chunk:
                raise ExecutionError(chunk["error"]["message"])
            found += read_chunk(chunk)
    return found
