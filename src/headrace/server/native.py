"""SGLang's own routes: `POST | PUT /generate`, and sessions. Runs in the event loop that serves HTTP."""

import uuid

import msgspec

from headrace.frontend.native_answer import NativeStream, answer_pieces, whole_answer
from headrace.frontend.rooms import chosen_room, handed_on, has_prompt_elsewhere
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import GenerateReqInput
from headrace.server.body import embeds_to_base64
from headrace.server.context import INLINE_REPLY_BYTES
from headrace.server.http import Exchange, encode_json
from headrace.server.sse import failure_frames, frame, stream_reply


class OpenSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """session_id: a name chosen by the caller; default: random. See `Sessions.open` for the other fields."""

    capacity_of_str_len: int = 0
    session_id: str | None = None
    timeout: float | None = None


class CloseSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which session to close."""

    session_id: str


async def generate(exchange: Exchange) -> None:
    """Answer one request for one prompt or a batch, streaming if requested."""
    context = exchange.context
    hidden_size = context.model.ready.hidden_size
    request = await exchange.read_json(GenerateReqInput, lambda body: embeds_to_base64(body, hidden_size))
    if request.rid is None:
        request = msgspec.structs.replace(request, rid=uuid.uuid4().hex)
    request = chosen_room(request, context.args, exchange.scope.get("server"))
    if isinstance(request.rid, str):
        exchange.name_request(request.rid)
    param = "text" if request.text is not None else "input_ids"
    context.check_prompt_size(param, request.text, request.input_ids)
    updates = context.frontend.generate_request(request, caller=exchange.caller)
    if request.stream:
        stream = NativeStream(context.args.incremental_streaming_output)
        await stream_reply(exchange, updates, lambda update: render_update(stream, update), bytes)
        return
    made = await exchange.all_of(updates)
    is_elsewhere = has_prompt_elsewhere(request, context.args.disaggregation_mode)
    if sum(update.num_bytes for update in made) > INLINE_REPLY_BYTES and not is_elsewhere:
        async with exchange.until_client_leaves():
            await exchange.reply_in_pieces(answer_pieces(made, handed_on(request)), made_of=made)
        return
    answer = whole_answer(made, handed_on(request))
    if isinstance(answer, dict) and is_elsewhere:
        # Of lists and streams, and of other routes, routers give what we say.
        answer["meta_info"] |= {"input_token_logprobs": []} if request.return_logprob else {}
    await exchange.reply_json(answer)


def render_update(stream: NativeStream, update: SampleUpdate) -> bytes:
    """The frames of one update: its answer, and an error frame when the only sample has failed.

    In a list, a failing sample is reported only by its finish_reason, and the others continue.
    """
    frames = frame(encode_json(stream.answer(update)))
    if update.finish is not None and not update.is_listed:
        frames += failure_frames(update.finish)
    return frames


async def open_session(exchange: Exchange) -> None:
    """Open a session for the caller. The reply is its id, a JSON string."""
    body, open_one = await exchange.read_json(OpenSessionBody), exchange.context.frontend.open_session
    session_id = await open_one(body.capacity_of_str_len, body.session_id, body.timeout, exchange.caller)
    await exchange.reply_json(session_id)


async def close_session(exchange: Exchange) -> None:
    """Close a session of the caller, or any session with the admin key; 404 for an unknown id."""
    body = await exchange.read_json(CloseSessionBody)
    await exchange.context.frontend.close_session(body.session_id, exchange.caller)
    await exchange.reply_json({"success": True, "message": "the session is closed"})
