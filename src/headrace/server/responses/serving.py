"""The routes of the Responses API: making a response, and reading and forgetting those that are kept. Runs in the event loop that serves HTTP."""

import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from headrace.errors import ContextLengthError, NotFoundError, RequestError
from headrace.server.chat.calls import chat_call
from headrace.server.chat.conversation import refused, unsupported
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, Headers, json_pieces
from headrace.server.notes import noted_fields, skipped_tools
from headrace.server.responses.items import Item
from headrace.server.responses.protocol import ResponsesRequest, noted_in, refuse_unsupported
from headrace.server.responses.reply import ResponseReply
from headrace.server.responses.request import conversation_of, fitting, grammar_field, input_items, sampling_of
from headrace.server.responses.store import ResponseStore, StoredResponse
from headrace.server.sse import stream_reply

MAX_LISTED = 100

_OUR_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "top_logprobs_num": "top_logprobs",
    "return_logprob": "include",
    "input_ids": "input",
    "messages": "input",
    "text": "input",
}
_OUR_NAME = re.compile(r"\b(max_new_tokens|top_logprobs_num|return_logprob|input_ids)\b|^(messages|text)\b(?=[: ])")


class GetQuery(msgspec.Struct, frozen=True):
    """Query of `GET /v1/responses/{id}`. A kept response cannot be streamed again."""

    stream: bool = False
    starting_after: int | None = None


class ItemsQuery(msgspec.Struct, frozen=True):
    """Query of the list of items: at most `limit` (1 to 100) after the item `after`; desc: the latest first."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ResponsesAPI:
    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.store = ResponseStore(context.args.max_stored_responses)
        self._skipped_tools, self._noted = skipped_tools(), noted_fields()

    async def create(self, exchange: Exchange) -> None:
        request = await exchange.read_json(ResponsesRequest)
        try:
            await self._answer(exchange, request)
        except RequestError as exc:
            raise _renamed(exc, request) from None

    async def _answer(self, exchange: Exchange, request: ResponsesRequest) -> None:
        self.context.check_tokenizer("input")
        refuse_unsupported(request)
        # True is the API's default, which clients and routers spell out.
        keeps = bool(self.store.max_responses) and request.store is not False
        adapter = self.context.chosen_adapter(request.model, request.lora_path)
        owner = owner_of(exchange)
        before = self._before(request, owner)
        items = self._resolved(await self.context.beside_others(lambda: input_items(request.input)), owner)
        # The places of items in errors count from the first one of the first response.
        all_items = [*before.items(), *items] if before is not None else items
        length = self.context.model.context_length
        conversation, tools = await self.context.beside_others(lambda: conversation_of(request, all_items, length))
        sampling = sampling_of(request)
        if request.truncation == "auto":
            conversation = await fitting(self.context, conversation, request.max_output_tokens, exchange)
        response_id = f"resp_{uuid.uuid4().hex}"
        fields = request.call_fields() | {"rid": response_id, "lora_path": adapter}
        chat = await chat_call(self.context, conversation, sampling, **fields)
        exchange.name_request(response_id)
        reply = ResponseReply(response_id, request, chat, tools, keeps)

        def end() -> bytes:
            """Keep the response before the client knows that it is complete."""
            frames = reply.end()
            if keeps and reply.status != "failed":
                own = [_with_id(item) for item in items]
                self.store.put(owner, reply.response(), before, own, exchange.caller.turn)
            return frames

        def headers() -> Headers:
            noted = [*noted_in(request), *chat.notes("max_output_tokens", "")]
            return self._skipped_tools.headers(tools.skipped) + self._noted.headers(noted)

        if request.stream:
            await stream_reply(
                exchange,
                chat.updates(exchange),
                reply.push,
                end,
                done=b"",
                failed=reply.failed,
                renamed=lambda exc: _renamed(exc, request),
                headers=headers,
                tail_repeats=True,
            )
            return
        updates = await exchange.all_of(chat.updates(exchange))
        size = sum(update.num_bytes for update in updates)
        for update in updates:
            update.raise_failure()
            await self.context.written(partial(reply.push, update), size)
        await self.context.written(end, size)
        async with exchange.until_client_leaves():
            await exchange.reply_in_pieces(json_pieces(reply.response()), headers(), updates)

    async def get(self, exchange: Exchange) -> None:
        query = exchange.read_query(GetQuery)
        stored = self._stored(exchange)
        if query.stream or query.starting_after is not None:
            field = "stream" if query.stream else "starting_after"
            raise unsupported(field, ": a kept response cannot be streamed")
        await exchange.reply_json(msgspec.Raw(stored.response))

    async def delete(self, exchange: Exchange) -> None:
        response_id = exchange.path_param("id")
        self.store.delete(owner_of(exchange), response_id)
        await exchange.reply_json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, exchange: Exchange) -> None:
        """Refuse to cancel: only background responses can be cancelled, and there are none."""
        self._stored(exchange)
        raise RequestError(
            "only background responses can be cancelled, and this server makes none; a response that is still being made ends when its "
            "client disconnects, or by /abort_request with its id as rid"
        )

    async def input_items(self, exchange: Exchange) -> None:
        """The items of the input of a kept response, with those of the conversation before it."""
        query = exchange.read_query(ItemsQuery)
        if not 1 <= query.limit <= MAX_LISTED:
            raise refused("limit", f"must be between 1 and {MAX_LISTED}, got {query.limit}")
        items: Sequence[Item] = self._stored(exchange).input_items()
        if query.order == "desc":
            items = items[::-1]
        if query.after is not None:
            places = [place for place, item in enumerate(items) if item.get("id") == query.after]
            if not places:
                raise NotFoundError(f"there is no item with the id {query.after[:100]!r}", "after")
            items = items[places[0] + 1 :]
        page = [_shown(item) for item in items[: query.limit]]
        await exchange.reply_json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > len(page),
            }
        )

    def _stored(self, exchange: Exchange) -> StoredResponse:
        return self.store.get(owner_of(exchange), exchange.path_param("id"))

    def _before(self, request: ResponsesRequest, owner: str) -> StoredResponse | None:
        """The response that this one continues. Raises RequestError."""
        field = "previous_response_id"
        if not request.previous_response_id:
            return None
        if not self.store.max_responses:
            raise unsupported(
                field,
                ": this server keeps no responses; send the whole conversation in input, or start it with --max-stored-responses",
            )
        return self.store.get(owner, request.previous_response_id, field)

    def _resolved(self, items: list[Item], owner: str) -> list[Item]:
        """The items with those in the place of the references to them. Raises RequestError."""
        if all(not _is_reference(item) for item in items):
            return items
        if not self.store.max_responses:
            raise unsupported(
                "input",
                ": this server keeps no items that an item_reference could name; send the items themselves, or start it with "
                "--max-stored-responses",
            )
        wanted = {str(item.get("id")) for item in items if _is_reference(item)}
        known = self.store.items_of(owner, wanted)
        if missing := wanted - known.keys():
            shown = min(missing)[:100]
            raise NotFoundError(f"input: there is no item with the id {shown!r}", "input")
        return [known[str(item["id"])] if _is_reference(item) else item for item in items]


def owner_of(exchange: Exchange) -> str:
    """Whose responses a request may see: those that were made with the same key of the key file, or with the same one of the two other keys."""
    role = "admin" if exchange.is_admin else "user"
    return f"{role}/{exchange.caller.scope}"


def _is_reference(item: Item) -> bool:
    """An item without a type that has only an id is one, too."""
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) <= {"id", "type"})


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def _with_id(item: Item) -> Item:
    if isinstance(item.get("id"), str):
        return item
    prefix = _PREFIXES.get(str(item.get("type", "message")), "item")
    return {**item, "id": f"{prefix}_{uuid.uuid4().hex}"}


def _shown(item: Item) -> Mapping[str, object]:
    if item.get("type", "message") != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return {"type": "message", "status": "completed", **item, "content": content}


def _renamed(exc: RequestError, request: ResponsesRequest) -> RequestError:
    """The error with our own parameter names replaced by this API's."""
    if exc.param in ("json_schema", "response_format") and (name := grammar_field(request)) is not None:
        # The rest of the message may quote the grammar, and stays as it is.
        exc.message, exc.param = exc.message.replace(exc.param, name, 1), name
        return exc
    if not isinstance(exc, ContextLengthError):
        exc.message = _OUR_NAME.sub(lambda found: _OUR_NAMES[found[0]], exc.message)
    exc.param = _OUR_NAMES.get(exc.param, exc.param) if exc.param is not None else None
    return exc
