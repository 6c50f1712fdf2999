"""The routes of control operations (`messages.operations`): each decodes its request, asks every replica, and answers with their replies.

Runs in the event loop that serves HTTP.
"""

from typing import Any

import msgspec

from headrace.messages.operations import OPERATIONS, Operation, Route
from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.routes import RouteSpec


def operation_routes(context: ServingContext) -> list[RouteSpec]:
    """Their rows of the route table."""
    return [_row(context, row, row.route) for row in OPERATIONS.values() if row.route is not None]


def _row(context: ServingContext, operation: Operation[Any, Any], route: Route) -> RouteSpec:
    kind, has_fields = operation.request, bool(operation.request.__struct_fields__)
    decoder = msgspec.json.Decoder(kind)

    async def handle(exchange: Exchange) -> None:
        if route.method == "GET":
            request = exchange.read_query(kind)
        elif has_fields:
            request = await exchange.read_json(decoder)
        else:
            await exchange.read_no_fields()
            request = kind()
        replies = await operation.ask(context.frontend.control, request)
        await exchange.reply_json(operation.combine(replies))

    is_body, is_query = has_fields and route.method == "POST", has_fields and route.method == "GET"
    return RouteSpec(
        route.path,
        (route.method,),
        route.access,
        handle,
        route.summary,
        kind if is_body else None,
        query=kind if is_query else None,
        examples=route.examples,
    )
