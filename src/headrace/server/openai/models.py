"""The list of models: `GET /v1/models`, `GET /v1/models/{id}`, in OpenAI's form, or in Anthropic's with the header `anthropic-version`.

Runs in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from headrace.errors import NotFoundError
from headrace.server.context import ServedModel
from headrace.server.error_forms import anthropic_error
from headrace.server.http import Exchange, describe_error, send_response

MAX_PAGE = 1000


class ModelsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of Anthropic's list. after_id and before_id: the page after, or before, this model."""

    limit: int = 20
    after_id: str | None = None
    before_id: str | None = None


async def list_models(exchange: Exchange) -> None:
    """The served model by each of its names, and its adapters."""
    model, names = exchange.context.model, exchange.context.listed_names
    if not _is_anthropics(exchange):
        await exchange.reply_json({"object": "list", "data": [_card(model, name) for name in names]})
        return
    page, has_more = _page(names, exchange.read_query(ModelsQuery))
    await exchange.reply_json(
        {
            "data": [_info(model, name) for name in page],
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    )


async def get_model(exchange: Exchange) -> None:
    """One model or adapter by its id; 404 when it is not served here."""
    is_anthropics = _is_anthropics(exchange)
    try:
        name = exchange.context.listed_name(exchange.path_param("id"))
    except NotFoundError as exc:
        if not is_anthropics:
            raise
        status, headers, error = describe_error(exc)
        await send_response(exchange.send, status, anthropic_error(status, error), b"application/json", headers)
        return
    model = exchange.context.model
    await exchange.reply_json(_info(model, name) if is_anthropics else _card(model, name))


def _card(model: ServedModel, name: str) -> dict[str, object]:
    is_adapter = name not in model.names
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": name if is_adapter else model.name,
        "parent": model.name if is_adapter else None,
        "max_model_len": model.context_length,
    }


def _info(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
    }


def _is_anthropics(exchange: Exchange) -> bool:
    return exchange.header(b"anthropic-version") is not None


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
