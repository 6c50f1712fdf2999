"""The native route: `POST | PUT /generate`.

Runs in the event loop of the main process. Checking, tokenizing and sampling defaults are the TokenizerManager's.
"""

import uuid
from contextlib import aclosing

import msgspec

from headrace.frontend.request_state import error_of
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import GenerateReqInput
from headrace.server.context import Output, ServingContext
from headrace.server.embeds_body import embeds_to_base64
from headrace.server.http import ApiError, Exchange, describe_error, encode_json
from headrace.server.sse import error_frame, frame, stream_reply

_DECODER = msgspec.json.Decoder(GenerateReqInput)


class NativeAPI:
    """The handler of /generate."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def generate(self, exchange: Exchange) -> None:
        """One prompt or a batch; streams frames of outputs when the request says so."""
        request = await exchange.read_json(_DECODER, self._shorten)
        if request.rid is None:
            request = msgspec.structs.replace(request, rid=uuid.uuid4().hex)
        if isinstance(request.rid, str):
            exchange.name_request(request.rid)
        param = "text" if request.text is not None else "input_ids"
        self.context.check_prompt_size(param, request.text, request.input_ids)
        outputs = self.context.frontend.generate_request(request, caller=exchange.caller)
        if request.stream:
            await stream_reply(exchange, outputs, render_output, lambda: b"")
            return
        async with exchange.until_client_leaves(), aclosing(outputs):
            result = await anext(outputs)
        await exchange.reply_json(result)

    def _shorten(self, body: bytes) -> bytes:
        """Embeddings as rows of numbers may be millions of them."""
        return embeds_to_base64(body, self.context.model.ready.hidden_size)


def render_output(output: Output) -> bytes:
    """The frames of one output: itself, and an error frame when the only sample has failed.

    In a batch (outputs with an index) one failing sample is reported by its finish_reason alone: the others go on.
    """
    frames = frame(encode_json(output))
    if "index" not in output and (error := failure(output)) is not None:
        frames += error_frame(error)
    return frames


def failure(output: Output) -> ApiError | None:
    """The error of an output that ended by a fault, not by a client's abort; else None."""
    reason = output["meta_info"]["finish_reason"]
    if reason is None or reason["type"] != "abort" or reason.get("status_code", 0) < 400:
        return None
    finish = FinishReason(
        "abort", message=reason.get("message", "the request was aborted"), status_code=reason["status_code"]
    )
    return describe_error(error_of(finish))[2]
