"""`POST /v1/embeddings`. Runs in the event loop that serves HTTP."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.pooling.calls import check_num_numbers, results_of
from headrace.server.pooling.protocol import (
    GivenInput,
    PooledRequest,
    check_normalize,
    given_input,
    pooling_of,
    renamed,
    usage_of,
    vector_json,
)


class EmbeddingRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/embeddings. input: a text, texts, token ids, or lists of token ids."""

    input: GivenInput
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    normalize: bool | None = None


class EmbeddingItem(msgspec.Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: str | list[float]


async def embeddings(exchange: Exchange) -> None:
    """The embedding of each input. Errors name the fields as this API spells them."""
    request, context = await exchange.read_json(EmbeddingRequest), exchange.context
    check_normalize(request.normalize, pooling_of(context.model, "embed"))
    request_id = request.rid or f"embd-{uuid.uuid4().hex}"
    exchange.name_request(request_id)
    try:
        call = EmbeddingReqInput(
            **given_input("input", request.input),
            dimensions=request.dimensions,
            **request.call_fields(context, request_id),
        )
        check_num_numbers(context, call, "input")
        async with exchange.until_client_leaves():
            updates = await results_of(exchange, call)
            await exchange.reply_in_pieces(_reply(context, request, updates), made_of=updates)
    except RequestError as error:
        raise renamed(error, "input") from None


def _reply(context: ServingContext, request: EmbeddingRequest, updates: list[SampleUpdate]) -> Iterator[bytes]:
    as_base64 = request.encoding_format == "base64"
    head: dict[str, object] = {"object": "list", "model": context.shown_model(request.model)}
    items = (
        EmbeddingItem("embedding", index, vector_json(update.pooled or b"", as_base64))
        for index, update in enumerate(updates)
    )
    return json_pieces(head | {"data": LongList(items), "usage": usage_of(context, updates)})
