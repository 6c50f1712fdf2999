"""`RouteSpec`, a row of the route table: path, methods, access, handler, and what the OpenAPI document says, which is made of the rows here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.messages.operations import OPERATIONS, Operation, Route
from headrace.server.auth import Access
from headrace.server.error_forms import reply_type_of
from headrace.server.http import Exchange, Handler
from headrace.version import VERSION

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


def operation_routes() -> list[RouteSpec]:
    """The rows of control operations that have a route: each decodes its request, asks for the replies, and answers with them."""
    return [_row(row, row.route) for row in OPERATIONS.values() if row.route is not None]


def _row(operation: Operation[Any, Any], route: Route) -> RouteSpec:
    kind, has_fields = operation.request, bool(operation.request.__struct_fields__)

    async def handle(exchange: Exchange) -> None:
        if route.method == "GET":
            request = exchange.read_query(kind)
        elif has_fields:
            request = await exchange.read_json(kind)
        else:
            await exchange.read_no_fields()
            request = kind()
        replies = await operation.ask(exchange.context.frontend.control, request)
        await exchange.reply_json(operation.combine(replies))

    row = RouteSpec(route.path, (route.method,), route.access, handle, route.summary, examples=route.examples)
    if not has_fields:
        return row
    return replace(row, query=kind) if route.method == "GET" else replace(row, body=kind)


_TAGS = ("OpenAI", "Anthropic", "Ollama")
"""Groups of routes that name theirs. All others are in `_OWN_TAGS`."""

_OWN_TAGS = ("Headrace", "Information", "Administration")


class OpenApi:
    """The handler of /openapi.json."""

    def __init__(self, routes: Sequence[RouteSpec]) -> None:
        self.routes = [route for route in routes if route.in_schema]
        self._document: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        if self._document is None:
            self._document = self._build()
        return self._document

    def _build(self) -> dict[str, Any]:
        kinds = {kind for route in self.routes for kind in (route.body, route.failure) if kind is not None}
        kinds |= {reply_type_of(route.path) for route in self.routes}
        in_order = sorted(kinds, key=lambda kind: kind.__name__)
        schemas, components = msgspec.json.schema_components(
            in_order, schema_hook=_any_value, ref_template="#/components/schemas/{name}"
        )
        _bound_numbers([schemas, components])
        schema_of = dict(zip(in_order, schemas, strict=True))
        paths: dict[str, Any] = {}
        for route in self.routes:
            path = route.path.replace(":path}", "}")
            for method in route.methods:
                paths.setdefault(path, {})[method.lower()] = self._operation(route, path, method, schema_of)
        return {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": VERSION},
            "tags": [{"name": tag} for tag in (*_TAGS, *_OWN_TAGS)],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "admin": {"type": "http", "scheme": "bearer", "description": "the key of --admin-api-key"},
                },
            },
        }

    def _operation(self, route: RouteSpec, path: str, method: str, schema_of: Mapping[type, Any]) -> dict[str, Any]:
        """One method of a route. schema_of: the schema of each type of a body or a reply."""
        failures = [schema_of[kind] for kind in (route.failure, reply_type_of(path)) if kind is not None]
        schema = {"anyOf": failures} if len(failures) > 1 else failures[0]
        error = {"description": "error", "content": {"application/json": {"schema": schema}}}
        operation: dict[str, Any] = {
            "tags": [_tag_of(route)],
            "summary": route.summary,
            "operationId": method.lower() + "".join(c if c.isalnum() else "_" for c in path),
            "responses": {"200": {"description": "success"}, "4XX": error, "5XX": error},
            "security": {"public": [], "user": [{"bearer": []}], "admin": [{"admin": []}]}[route.access],
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", path)
            ],
        }
        if route.body is not None:
            examples = {title: {"value": body} for title, body in route.examples.items()}
            content: dict[str, Any] = {"application/json": {"schema": schema_of[route.body], "examples": examples}}
            if route.octets is not None:
                content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
            operation["requestBody"] = {"required": True, "content": content}
        for query in filter(None, (route.octets, route.query)):
            options = msgspec.json.schema_components([query])[1][query.__name__]
            operation["parameters"] += [
                {"name": name, "in": "query", "schema": schema} for name, schema in options["properties"].items()
            ]
        return operation

    async def openapi_json(self, exchange: Exchange) -> None:
        await exchange.reply_json(self.document())


def _tag_of(route: RouteSpec) -> str:
    if route.tag:
        return route.tag
    own, information, administration = _OWN_TAGS
    if route.access == "admin":
        return administration
    return information if route.body is None else own


def _bound_numbers(schema: Any) -> None:
    """Add the bounds of 64-bit integers to every number that has none: larger integers are refused everywhere."""
    for item in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(item, (dict, list)):
            _bound_numbers(item)
    if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
        schema.setdefault("minimum", -(2**63))
        schema.setdefault("maximum", 2**63 - 1)


def _any_value(kind: type) -> dict[str, Any]:
    """The schema of `object`: whatever JSON holds."""
    assert kind is object, f"no schema for {kind}"
    return {"description": "any JSON value"}
