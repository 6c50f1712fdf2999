"""The native route: `POST | PUT /generate`.

Runs in the event loop that serves HTTP. The TokenizerManager checks, tokenizes and applies sampling defaults.
"""

import uuid
from contextlib import aclosing

import msgspec

from headrace.frontend.native_answer import NativeStream, whole_answer
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import GenerateReqInput
from headrace.server.context import ServingContext
from headrace.server.embeds_body import embeds_to_base64
from headrace.server.http import Exchange, encode_json
from headrace.server.sse import failure_frames, frame, stream_reply

_DECODER = msgspec.json.Decoder(GenerateReqInput)


class NativeAPI:
    """The handler of /generate."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def generate(self, exchange: Exchange) -> None:
        """Answer one request for one prompt or a batch, streaming if requested."""
        request = await exchange.read_json(_DECODER, self._shorten)
        if request.rid is None:
            request = msgspec.structs.replace(request, rid=uuid.uuid4().hex)
        if isinstance(request.rid, str):
            exchange.name_request(request.rid)
        param = "text" if request.text is not None else "input_ids"
        self.context.check_prompt_size(param, request.text, request.input_ids)
        updates = self.context.frontend.generate_request(request, caller=exchange.caller)
        if request.stream:
            stream = NativeStream(self.context.args.incremental_streaming_output)
            await stream_reply(exchange, updates, lambda update: render_update(stream, update), lambda: b"")
            return
        async with exchange.until_client_leaves(), aclosing(updates):
            answer = whole_answer([update async for update in updates])
        await exchange.reply_json(answer)

    def _shorten(self, body: bytes) -> bytes:
        """Convert embeddings given as rows of numbers, which may be millions."""
        return embeds_to_base64(body, self.context.model.ready.hidden_size)


def render_update(stream: NativeStream, update: SampleUpdate) -> bytes:
    """The frames of one update: its answer, and an error frame when the only sample has failed.

    In a list, a failing sample is reported only by its finish_reason, and the others continue.
    """
    frames = frame(encode_json(stream.answer(update)))
    if update.finish is not None and not update.is_listed:
        frames += failure_frames(update.finish)
    return frames
