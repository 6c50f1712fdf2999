"""Routes of cached prefixes: pin one, unpin it, what is cached, and llama.cpp's slots. Runs in the event loop that serves HTTP."""

from typing import Annotated, Any, Literal

import msgspec

from headrace.errors import NotFoundError, RequestError
from headrace.messages.control import Outcome
from headrace.messages.requests import GenerateReqInput
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.openai.protocol import ChatMessage
from headrace.server.openai.tokenize import TokenizeBody, conversation_to_tokenize

MOST_TTL_S = 86_400.0
MOST_DIGITS = 9


class PinBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `prompt` (a text), `messages` (rendered as for a chat) and `input_ids`; ttl: seconds for which it is kept. model: of an adapter.

    The other fields are those of a request whose prefix it shall be.
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    input_ids: list[int] | None = None
    ttl: Annotated[float, msgspec.Meta(ge=1, le=MOST_TTL_S)] = 300.0
    model: str | None = None
    tools: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    routed_dp_rank: int | None = None


class UnpinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """id: as `/v1/cache/pin` has said it."""

    id: str


class SlotQuery(msgspec.Struct, forbid_unknown_fields=True):
    """action: what to do with the slot."""

    action: Literal["save", "restore", "erase"]


class SlotBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """filename: of the saved slot, a name and no path; not for `erase`."""

    filename: Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00-\x1f]{1,255}\Z")]


async def pin(exchange: Exchange) -> None:
    """`{id, object, tokens, cached_tokens, expires_at}`. The prompt is computed as a request of this caller would."""
    context = exchange.context
    body = await exchange.read_json(PinBody)
    if sum(given is not None for given in (body.prompt, body.messages, body.input_ids)) != 1:
        raise RequestError("give exactly one of prompt, messages and input_ids", "prompt")
    call = GenerateReqInput(
        **await _prompt(context, body),
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
        lora_path=context.chosen_adapter(body.model or "", body.lora_path),
        routed_dp_rank=body.routed_dp_rank,
    )
    async with exchange.until_client_leaves():
        pinned = await context.frontend.pins.pin(call, body.ttl, caller=exchange.caller)
    await exchange.reply_json(pinned)


async def _prompt(context: ServingContext, body: PinBody) -> dict[str, Any]:
    if body.messages is None:
        context.check_prompt_size("prompt", body.prompt, None)
        context.check_prompt_size("input_ids", None, list(body.input_ids or ()))
        return {"text": body.prompt, "input_ids": None if body.input_ids is None else list(body.input_ids)}
    context.check_tokenizer("messages")
    asked = TokenizeBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    chat = await context.in_text_thread(lambda: chat_prompt(context, conversation_to_tokenize(context, asked)))
    return {"input_ids": list(chat.ids), **chat.media.native_fields()}


async def unpin(exchange: Exchange) -> None:
    """Let go of a pin of the caller; 404 for the others."""
    body = await exchange.read_json(UnpinBody)
    await exchange.context.frontend.pins.unpin(body.id, caller=exchange.caller)
    await exchange.reply_json(Outcome(True, "unpinned"))


async def slots(exchange: Exchange) -> None:
    """llama.cpp's: save, restore or erase what a slot's last request has left. Replies as llama.cpp's server does."""
    context, number = exchange.context, exchange.path_param("id")
    action = exchange.read_query(SlotQuery).action
    if context.args.session_dir is None:
        raise NotFoundError(
            "slots are saved with --session-dir only, and their KV with --kv-cache-dir", code="unsupported_route"
        )
    if not number.isdecimal() or len(number) > MOST_DIGITS:
        raise RequestError("the number of a slot is an integer", "id")
    slot, frontend = int(number), context.frontend
    if action == "erase":
        await exchange.reply_json(await frontend.slots.erase(slot, caller=exchange.caller))
        return
    name = (await exchange.read_json(SlotBody)).filename
    if action == "save":
        await exchange.reply_json(await frontend.slots.save(slot, name, caller=exchange.caller))
        return
    if context.args.disable_radix_cache:
        raise RequestError("this server caches no prefixes (--disable-radix-cache)")
    async with exchange.until_client_leaves():
        restored = await frontend.slots.restore(slot, name, caller=exchange.caller)
    await exchange.reply_json(restored)


async def cached(exchange: Exchange) -> None:
    """What is cached, by tier, with the limits and the caller's pins. An admin sees the counts of all."""
    await exchange.reply_json(await exchange.context.frontend.pins.cache(caller=exchange.caller))
