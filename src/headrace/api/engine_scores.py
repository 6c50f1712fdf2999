"""`Engine.encode`, `Engine.rerank` and `Engine.score`: without HTTP, by the functions that also serve the routes. Runs in the engine's event loop."""

import uuid
from typing import Any, TypeVar

import msgspec

from headrace.api.scores import Route
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.field_errors import field_error
from headrace.messages.neutral import without_neutral
from headrace.messages.requests import EmbeddingReqInput
from headrace.messages.whole_numbers import with_whole_numbers
from headrace.server.context import Program, ServingContext
from headrace.server.pooling.calls import results_of
from headrace.server.pooling.protocol import pooling_of
from headrace.server.pooling.rerank import RerankRequest, ranked
from headrace.server.pooling.score import ScoreRequest, asks_for_labels, label_scores, text_scores

T = TypeVar("T")


async def encoded(context: ServingContext, request: EmbeddingReqInput) -> list[SampleUpdate]:
    """The results of all inputs, in order; thousands of them are sent in chunks. Raises RequestError, CapacityError, ExecutionError."""
    pooling_of(context.model)
    updates = await results_of(Program(context), request, partial=True)
    return [msgspec.structs.replace(update, index=index) for index, update in enumerate(updates)]


async def scored(context: ServingContext, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
    """What the reply of a route to these fields says of scores. Raises RequestError, CapacityError, ExecutionError."""
    asker = Program(context)
    rid = str(fields.get("rid") or uuid.uuid4().hex)
    if route == "/v1/rerank":
        ranking = await ranked(asker, _request(fields, RerankRequest), rid)
        return {"results": [msgspec.to_builtins(result) for result in ranking.results()]}
    request = _request(fields, ScoreRequest)
    if asks_for_labels(request):
        return {"scores": (await label_scores(asker, request, rid)).scores}
    found = await text_scores(asker, request, rid)
    return {"data": [{"score": score} for score in found.scores]}


def _request(fields: dict[str, Any], kind: type[T]) -> T:
    """The request, with checked types. Raises RequestError that names the field."""
    try:
        return msgspec.convert(without_neutral(with_whole_numbers(fields, kind), kind), kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
