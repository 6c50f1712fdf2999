"""`POST /tokenize`, `POST /detokenize`, `POST /apply-template`. Tokenizing runs in a thread, the rest in the event loop that serves HTTP."""

from collections.abc import Iterator
from typing import cast

import msgspec

from headrace.errors import RequestError
from headrace.frontend.inputs import check_token_ids
from headrace.server.chat.conversation import Conversation, refused
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, encode_json
from headrace.server.openai.chat_request import conversation_of
from headrace.server.openai.fields import ReasoningEffort
from headrace.server.openai.protocol import ChatCompletionRequest, ChatMessage


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `prompt` (a text or a list of texts) and `messages` (rendered as for a chat)."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: ReasoningEffort | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens`: ids, or a list of lists of ids."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


_PIECE_IDS = 64 << 10


async def tokenize(exchange: Exchange) -> None:
    """`{tokens, count, max_model_len}`; tokens and count are lists when the prompt was one."""
    context = exchange.context
    context.check_tokenizer("prompt")
    body = await exchange.read_json(TokenizeBody)
    context.adapter_of(body.model or "")
    length = context.model.context_length
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give exactly one of prompt and messages", "prompt")
    if isinstance(body.prompt, list):
        _check_count(context, "prompt", "texts", len(body.prompt))
    if body.messages is not None:
        chat = await context.in_text_thread(lambda: chat_prompt(context, conversation_to_tokenize(context, body)))
        ids = [await chat.ids_with_media(context, exchange)]
        reply = await context.in_text_thread(lambda: _reply(ids, length, False))
    else:
        # In one turn: a text has many ids, which take ten times as much memory as their JSON while they wait.
        is_list = isinstance(body.prompt, list)
        async with exchange.until_client_leaves():
            reply = await context.in_text_thread(lambda: _reply(_tokens(context, body), length, is_list))
    await exchange.reply(reply)


def _check_count(context: ServingContext, param: str, what: str, count: int) -> None:
    limit = context.args.max_batch_prompts
    if count > limit:
        raise refused(param, f": at most {limit} {what} in one request, got {count}")


def _reply(tokens: list[list[int]], length: int, is_list: bool) -> bytes:
    """The reply, which may hold millions of ids: in a thread, in pieces."""
    counts = [len(ids) for ids in tokens]
    ids = [b"[" + b",".join(_pieces(ids)) + b"]" for ids in tokens]
    fields = {
        "tokens": msgspec.Raw(b"[" + b",".join(ids) + b"]" if is_list else ids[0]),
        "count": counts if is_list else counts[0],
        "max_model_len": length,
    }
    return encode_json(fields)


def conversation_to_tokenize(context: ServingContext, body: TokenizeBody) -> Conversation:
    """That of a body with messages. Raises RequestError."""
    assert body.messages is not None, "the body has them"
    chat = ChatCompletionRequest(
        model=context.model.name,
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return conversation_of(chat, context.model.context_length)


def _tokens(context: ServingContext, body: TokenizeBody) -> list[list[int]]:
    assert body.prompt is not None, "one of prompt and messages is given"
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    context.check_text_length("prompt", sum(map(len, texts)), whole=True)
    return context.model.tokenizer.encode_batch(texts, body.add_special_tokens, True) if texts else []


async def apply_template(exchange: Exchange) -> None:
    """`{prompt}`: what the chat template makes of the body of a chat, as text."""
    context = exchange.context
    context.check_tokenizer("messages")
    body = await exchange.read_json(ChatCompletionRequest)
    context.adapter_of(body.model)
    limit = context.model.context_length
    chat = await context.in_text_thread(lambda: chat_prompt(context, conversation_of(body, limit)))
    await exchange.reply_json({"prompt": chat.text})


async def detokenize(exchange: Exchange) -> None:
    """`{text}`; a list when `tokens` was a list of lists."""
    context = exchange.context
    context.check_tokenizer("tokens")
    body = await exchange.read_json(DetokenizeBody)
    context.adapter_of(body.model or "")
    texts = await context.in_text_thread(lambda: _texts(context, body.tokens, body.skip_special_tokens))
    await exchange.reply_json({"text": texts})


def _texts(context: ServingContext, tokens: list[int | list[int]], skip_special_tokens: bool) -> str | list[str]:
    num_lists = sum(isinstance(item, list) for item in tokens)
    if num_lists not in (0, len(tokens)):
        raise refused("tokens", "mixes ids and lists of ids")
    rows = cast("list[list[int]]", tokens if num_lists else [tokens])
    _check_count(context, "tokens", "lists of ids", len(rows))
    tokenizer = context.model.tokenizer
    for ids in rows:
        check_token_ids("tokens", ids, tokenizer.vocab_size)
    texts = [tokenizer.decode(ids, skip_special_tokens) for ids in rows]
    return texts if num_lists else texts[0]


def _pieces(ids: list[int]) -> Iterator[bytes]:
    """The ids as JSON, with commas but at the ends; other threads run between the pieces."""
    return (encode_json(ids[at : at + _PIECE_IDS])[1:-1] for at in range(0, len(ids), _PIECE_IDS))
