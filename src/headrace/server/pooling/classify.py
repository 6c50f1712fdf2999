"""`POST /classify` and `/v1/classify`. Runs in the event loop that serves HTTP.

Two dialects, told apart by the field that gives the inputs: vLLM's `input` is answered with labels and probabilities, SGLang's `text` or
`input_ids` with the numbers themselves.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.packing import unpack_float32
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.pooling.calls import results_of
from headrace.server.pooling.encode import check_num_numbers, reply_natively
from headrace.server.pooling.kinds import classification_of
from headrace.server.pooling.protocol import GivenInput, PooledRequest, given_input, renamed, usage_of
from headrace.server.pooling.replies import object_pieces, reply_in_pieces, sigmoid, softmax


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


_DECODER = msgspec.json.Decoder(ClassifyRequest)


class ClassifyAPI:
    """The handler."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def classify(self, exchange: Exchange) -> None:
        """The labels of each input."""
        request = await exchange.read_json(_DECODER)
        pooling = classification_of(self.context.model)
        ours = [name for name in ("text", "input_ids") if getattr(request, name) is not None]
        if request.input is None and not ours:
            raise RequestError("missing field 'input'", "input", "missing_field")
        if request.input is not None and (ours or request.is_cross_encoder_request):
            name = ours[0] if ours else "is_cross_encoder_request"
            raise RequestError(f"{name} does not go with input: they belong to two dialects of this route", name)
        request_id = request.rid or f"classify-{uuid.uuid4().hex}"
        if request.input is None:
            call = EmbeddingReqInput(
                text=request.text,
                input_ids=request.input_ids,
                is_cross_encoder_request=bool(request.is_cross_encoder_request),
                **request.call_fields(self.context, request_id),
            )
            await reply_natively(self.context, exchange, call)
            return
        exchange.name_request(request_id)
        try:
            call = EmbeddingReqInput(
                **given_input("input", request.input), **request.call_fields(self.context, request_id)
            )
            check_num_numbers(self.context, call, "input")
            async with exchange.until_client_leaves():
                updates = await results_of(self.context, exchange, call)
                await reply_in_pieces(exchange, self._reply(request, request_id, pooling, updates))
        except RequestError as error:
            raise renamed(error, "input") from None

    def _reply(
        self, request: ClassifyRequest, request_id: str, pooling: PoolingConfig, updates: list[SampleUpdate]
    ) -> Iterator[bytes]:
        head: dict[str, object] = {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": request.shown_model(self.context),
        }
        kind = "none" if request.use_activation is False else pooling.activation
        items = (classified(index, update, pooling, kind) for index, update in enumerate(updates))
        return object_pieces(head, "data", items, {"usage": usage_of(self.context, updates)})


def classified(
    index: int, update: SampleUpdate, pooling: PoolingConfig, kind: Literal["none", "sigmoid", "softmax"]
) -> Classified:
    """The label of an input. kind: what is made of its numbers."""
    logits = unpack_float32(update.pooled or b"")
    probs = activated(kind, logits)
    best = max(range(len(logits)), key=logits.__getitem__)
    label = pooling.labels[best] if best < len(pooling.labels) else None
    return Classified(index, label, probs, len(logits))


def activated(kind: Literal["none", "sigmoid", "softmax"], logits: Sequence[float]) -> Sequence[float]:
    """The numbers as clients see them."""
    match kind:
        case "none":
            return logits
        case "sigmoid":
            return [sigmoid(logit) for logit in logits]
        case "softmax":
            return softmax(logits)
