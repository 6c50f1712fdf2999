"""`POST /encode`: SGLang's route for embeddings, and for the numbers of models that classify. Runs in the event loop that serves HTTP."""

import uuid

import msgspec

from headrace.errors import RequestError
from headrace.frontend.native_answer import pooled_answer
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.pooling.calls import MAX_NUMBERS, embedding_sizes, results_of
from headrace.server.pooling.kinds import pooling_of
from headrace.server.pooling.replies import list_pieces, reply_in_pieces

_DECODER = msgspec.json.Decoder(EmbeddingReqInput)


class EncodeAPI:
    """The handler."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def encode(self, exchange: Exchange) -> None:
        """`{"embedding": [...], "meta_info": {...}}`, or a list of them for a list of inputs."""
        call = await exchange.read_json(_DECODER)
        pooling_of(self.context.model)
        await reply_natively(self.context, exchange, call)


async def reply_natively(context: ServingContext, exchange: Exchange, call: EmbeddingReqInput) -> None:
    """Answer a call. In a list, an input that fails has no embedding, and a finish reason that says why. Raises RequestError."""
    if call.rid is None:
        call = msgspec.structs.replace(call, rid=uuid.uuid4().hex)
    if isinstance(call.rid, str):
        exchange.name_request(call.rid)
    if (call.text is None) == (call.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", "text" if call.text is None else "input_ids")
    check_num_numbers(context, call)
    async with exchange.until_client_leaves():
        updates = await results_of(context, exchange, call, partial=True)
        answers = (pooled_answer(msgspec.structs.replace(update, index=index)) for index, update in enumerate(updates))
        begin, end = (b"[", b"]") if updates[0].is_listed else (b"", b"")
        await reply_in_pieces(exchange, list_pieces(answers, begin, end))


def check_num_numbers(context: ServingContext, call: EmbeddingReqInput, param: str | None = None) -> None:
    """Raises RequestError when the reply would hold too many numbers. param: what the client calls the inputs; None = as we do."""
    pooling = pooling_of(context.model)
    dimensions = max(1, min(call.dimensions or pooling.dimensions, pooling.dimensions))
    param = param or ("text" if call.text is not None else "input_ids")
    count = len(embedding_sizes(context, call))
    if count * dimensions > MAX_NUMBERS:
        most = MAX_NUMBERS // dimensions
        message = f"{param}: {count} vectors of {dimensions} numbers are too many for one reply; at most {most}"
        raise RequestError(message, param)
