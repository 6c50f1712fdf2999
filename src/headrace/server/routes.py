"""`RouteSpec`, a row of the route table: path, methods, access, handler and what the OpenAPI description says; and those of control operations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.messages.operations import OPERATIONS, Operation, Route
from headrace.server.auth import Access
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, Handler

WITHOUT_V1 = ("OpenAI", "Anthropic")
"""APIs whose clients may take the address of the server for that of the API: they leave out `/v1`."""

Examples = Mapping[str, Mapping[str, Any]]
"""Bodies by a short title."""


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route: its path, access and handler.

    For the OpenAPI document: body: type of the JSON body. failure: what it may answer besides the error object when the status is not
    200. octets: type of the options in the query when the body is a file (application/octet-stream) instead. query: of those in the query
    of any request. examples: bodies that are accepted as they are, but for names that only the user knows; the API page puts them into its
    editor. tag: its group there; default: by who may call it.

    generates: it is of no use for a model that makes no text. with_replicas: it means the same whichever replica answers, behind a balancer
    that knows nothing of replicas (--ray); the others would change or show one replica, and are refused there.
    """

    path: str
    methods: tuple[str, ...]
    access: Access
    handler: Handler
    summary: str
    body: type | None = None
    in_schema: bool = True
    failure: type | None = None
    octets: type | None = None
    query: type | None = None
    examples: Examples = field(default_factory=dict)
    tag: str = ""
    generates: bool = False
    with_replicas: bool = False


def aliases(table: Iterable[RouteSpec]) -> list[RouteSpec]:
    """The routes of `WITHOUT_V1` at their paths without it."""
    return [
        replace(spec, path=spec.path.removeprefix("/v1"), summary=f"Alias of {spec.path}")
        for spec in table
        if spec.tag in WITHOUT_V1
    ]


def operation_routes(context: ServingContext) -> list[RouteSpec]:
    """The rows of control operations that have a route: each decodes its request, asks for the replies, and answers with them."""
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
