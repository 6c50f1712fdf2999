"""`POST /classify` and `/v1/classify`, and `POST /encode`, SGLang's route for vectors and for the numbers of models that classify.

Two dialects of classification, told apart by the field that gives the inputs: vLLM's `input` is answered with labels and probabilities, SGLang's
`text` or `input_ids` with the numbers themselves. Runs in the event loop that serves HTTP.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import RequestError
from headrace.frontend.native_answer import pooled_answer
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.packing import unpack_float32
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.pooling.calls import check_num_numbers, results_of
from headrace.server.pooling.protocol import (
    GivenInput,
    PooledRequest,
    given_input,
    pooling_of,
    renamed,
    sigmoid,
    softmax,
    usage_of,
)


class ClassifyRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of these routes.

    input: a text, texts, token ids, or lists of token ids. use_activation: false = the numbers instead of probabilities.
    text, input_ids, is_cross_encoder_request: see `EmbeddingReqInput`.
    """

    input: GivenInput | None = None
    use_activation: bool | None = None
    text: str | list[str | list[str]] | None = None
    input_ids: list[int | list[int]] | None = None
    is_cross_encoder_request: bool | None = None


class Classified(msgspec.Struct, frozen=True):
    """An element of `data`. label: of the largest of `probs`."""

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


async def encode(exchange: Exchange) -> None:
    """`{"embedding": [...], "meta_info": {...}}`, or a list of them for a list of inputs."""
    call = await exchange.read_json(EmbeddingReqInput)
    pooling_of(exchange.context.model)
    await _reply_natively(exchange, call)


async def _reply_natively(exchange: Exchange, call: EmbeddingReqInput) -> None:
    """Answer a call. In a list, an input that fails has no embedding, and a finish reason that says why. Raises RequestError."""
    if call.rid is None:
        call = msgspec.structs.replace(call, rid=uuid.uuid4().hex)
    if isinstance(call.rid, str):
        exchange.name_request(call.rid)
    if (call.text is None) == (call.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", "text" if call.text is None else "input_ids")
    check_num_numbers(exchange.context, call)
    async with exchange.until_client_leaves():
        updates = await results_of(exchange, call, partial=True)
        answers = (pooled_answer(msgspec.structs.replace(update, index=index)) for index, update in enumerate(updates))
        reply = LongList(answers) if updates[0].is_listed else next(answers)
        await exchange.reply_in_pieces(json_pieces(reply), made_of=updates)


async def classify(exchange: Exchange) -> None:
    """The labels of each input."""
    request = await exchange.read_json(ClassifyRequest)
    context, pooling = exchange.context, pooling_of(exchange.context.model, "classify")
    ours = [name for name in ("text", "input_ids") if getattr(request, name) is not None]
    if request.input is None and not ours:
        raise RequestError("missing field 'input'", "input", "missing_field")
    if request.input is not None and (ours or request.is_cross_encoder_request):
        name = ours[0] if ours else "is_cross_encoder_request"
        raise RequestError(f"{name} does not go with input: they belong to two dialects of this route", name)
    rid = request.rid or f"classify-{uuid.uuid4().hex}"
    if request.input is None:
        call = EmbeddingReqInput(
            text=request.text,
            input_ids=request.input_ids,
            is_cross_encoder_request=bool(request.is_cross_encoder_request),
            **request.call_fields(context, rid),
        )
        await _reply_natively(exchange, call)
        return
    exchange.name_request(rid)
    try:
        call = EmbeddingReqInput(**given_input("input", request.input), **request.call_fields(context, rid))
        check_num_numbers(context, call, "input")
        async with exchange.until_client_leaves():
            updates = await results_of(exchange, call)
            head = {
                "id": rid,
                "object": "list",
                "created": int(time.time()),
                "model": context.shown_model(request.model),
            }
            kind = "none" if request.use_activation is False else pooling.activation
            items = (_classified(index, update, pooling, kind) for index, update in enumerate(updates))
            reply = head | {"data": LongList(items), "usage": usage_of(context, updates)}
            await exchange.reply_in_pieces(json_pieces(reply))
    except RequestError as error:
        raise renamed(error, "input") from None


def _classified(
    index: int, update: SampleUpdate, pooling: PoolingConfig, kind: Literal["none", "sigmoid", "softmax"]
) -> Classified:
    """kind: what is made of the numbers."""
    logits = unpack_float32(update.pooled or b"")
    probs = [*map(sigmoid, logits)] if kind == "sigmoid" else softmax(logits) if kind == "softmax" else logits
    best = max(range(len(logits)), key=logits.__getitem__)
    label = pooling.labels[best] if best < len(pooling.labels) else None
    return Classified(index, label, probs, len(logits))
