"""Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

Owns how a body becomes a call of the engine and how its reply is sent. Runs in the event loop that serves HTTP.
"""

import re
import uuid
from contextlib import aclosing

import msgspec

from headrace.errors import ContextLengthError, RequestError
from headrace.server.anthropic.protocol import (
    CountTokensRequest,
    MessagesRequest,
    PromptRequest,
    refuse_unsupported,
)
from headrace.server.anthropic.reply import PING, MessageReply, error_event
from headrace.server.anthropic.request import conversation_of, sampling_of
from headrace.server.chat.calls import chat_call
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, Headers
from headrace.server.notes import noted_fields, skipped_tools
from headrace.server.sse import stream_reply

_THEIR_NAMES = {
    "max_new_tokens": "max_tokens",
    "input_ids": "messages",
    "text": "messages",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}
"""What this API calls our sampling parameters and prompts."""


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """Why a request failed."""

    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct, frozen=True):
    """Body of every failing reply of these routes; `type` is `error`."""

    type: str
    error: AnthropicErrorDetail


class MessagesServing:
    """Handlers of /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self._skipped_tools, self._noted = skipped_tools(), noted_fields()

    async def create(self, exchange: Exchange) -> None:
        """Answer one message. Errors name the fields as this API spells them."""
        request = await exchange.read_json(MessagesRequest)
        try:
            adapter = self.context.adapter_of(request.model)
            conversation, skipped = self._conversation(request)
            message_id = request.rid if request.rid is not None else f"msg_{uuid.uuid4().hex[:24]}"
            chat = await chat_call(
                self.context,
                conversation,
                sampling_of(request),
                rid=message_id,
                stream=bool(request.stream),
                priority=request.priority,
                cache_salt=request.cache_salt,
                lora_path=adapter,
                session_params=request.session_params,
            )
            exchange.name_request(message_id)

            def headers() -> Headers:
                noted = chat.notes("max_tokens", "thinking.budget_tokens")
                return self._skipped_tools.headers(skipped) + self._noted.headers(noted)

            reply = MessageReply(
                message_id, self.context.shown_model(request.model), chat.choice(), request.shows_thinking
            )
            updates = chat.updates(exchange)
            if request.stream:
                await stream_reply(
                    exchange,
                    updates,
                    reply.push,
                    bytes,
                    done=b"",
                    failed=error_event,
                    renamed=lambda exc: _renamed(exc, request),
                    headers=headers,
                    ping=PING,
                )
                return
            async with exchange.until_client_leaves(), aclosing(updates):
                (update,) = [update async for update in updates]
            await exchange.reply_json(reply.whole(update), headers=headers())
        except RequestError as exc:
            raise _renamed(exc, request) from None

    async def count_tokens(self, exchange: Exchange) -> None:
        """The number of tokens of a message's prompt: exactly what the message itself would count."""
        request = await exchange.read_json(CountTokensRequest)
        try:
            self.context.adapter_of(request.model)
            conversation, skipped = self._conversation(request)
            prompt = await self.context.in_text_thread(lambda: chat_prompt(self.context, conversation))
            num_tokens = len(await prompt.ids_with_media(self.context, exchange))
        except RequestError as exc:
            raise _renamed(exc, request) from None
        await exchange.reply_json({"input_tokens": num_tokens}, headers=self._skipped_tools.headers(skipped))

    def _conversation(self, request: PromptRequest) -> tuple[Conversation, list[str]]:
        self.context.check_tokenizer("messages")
        refuse_unsupported(request)
        return conversation_of(request, self.context.model.context_length)


def _renamed(exc: RequestError, request: PromptRequest) -> RequestError:
    """The error with our own parameter names replaced by this API's, and with the words by which clients know that the prompt is too long."""
    schema = "output_config.format.schema" if request.output_format is None else "output_format.schema"
    theirs = (_THEIR_NAMES | {"json_schema": schema, "response_format": schema}).get(exc.param or "")
    if exc.param is not None and theirs is not None:
        # The rest of the message may quote a grammar, and stays as it is.
        exc.message = re.sub(rf"\b{exc.param}\b", theirs, exc.message, count=1)
        exc.param = theirs
    if isinstance(exc, ContextLengthError):
        exc.message = f"prompt is too long: {exc.message}"
    return exc
