"""What is served, in Anthropic's form: `GET /v1/models` and `GET /v1/models/{id}` with the header `anthropic-version`.

Runs in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from headrace.errors import NotFoundError
from headrace.server.context import ServingContext
from headrace.server.error_forms import anthropic_error
from headrace.server.http import Exchange, Handler, describe_error, send_response

MAX_PAGE = 1000


class ModelsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the list. after_id and before_id: the page after, or before, this model."""

    limit: int = 20
    after_id: str | None = None
    before_id: str | None = None


class AnthropicModels:
    """Handlers that list what is served."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def list_models(self, exchange: Exchange) -> None:
        """A page of the served model and its adapters."""
        query = exchange.read_query(ModelsQuery)
        ids = self.context.listed_names
        page, has_more = _page(ids, query)
        await exchange.reply_json(
            {
                "data": [self._info(name) for name in page],
                "has_more": has_more,
                "first_id": page[0] if page else None,
                "last_id": page[-1] if page else None,
            }
        )

    async def get_model(self, exchange: Exchange) -> None:
        """One model or adapter by its id; 404 when it is not served here."""
        try:
            name = self.context.listed_name(exchange.path_param("id"))
        except NotFoundError as exc:
            status, headers, error = describe_error(exc)
            await send_response(exchange.send, status, anthropic_error(status, error), b"application/json", headers)
            return
        await exchange.reply_json(self._info(name))

    def _info(self, name: str) -> dict[str, object]:
        model = self.context.model
        created = datetime.fromtimestamp(model.created, UTC)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": model.context_length,
            "max_tokens": model.context_length,
        }


def _page(ids: Sequence[str], query: ModelsQuery) -> tuple[Sequence[str], bool]:
    """The models of a page, and whether there are more in its direction."""
    limit = max(1, min(query.limit, MAX_PAGE))
    if query.before_id is not None:
        end = ids.index(query.before_id) if query.before_id in ids else 0
        start = max(0, end - limit)
        return ids[start:end], start > 0
    start = 0
    if query.after_id is not None:
        start = ids.index(query.after_id) + 1 if query.after_id in ids else len(ids)
    return ids[start : start + limit], start + limit < len(ids)


def by_version(anthropic: Handler, other: Handler) -> Handler:
    """`anthropic` for requests with the header `anthropic-version`, `other` for the rest."""

    async def handle(exchange: Exchange) -> None:
        handler = other if exchange.header(b"anthropic-version") is None else anthropic
        await handler(exchange)

    return handle
