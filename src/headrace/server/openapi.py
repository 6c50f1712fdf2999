"""The OpenAPI description, generated from the route table. Built once, on demand."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.server.error_forms import reply_type_of
from headrace.server.http import Exchange
from headrace.server.routes import RouteSpec
from headrace.version import VERSION

_TAGS = ("OpenAI", "Anthropic", "Ollama")
"""Groups of routes that name theirs. All others are in `_OWN_TAGS`."""

_OWN_TAGS = ("Headrace", "Information", "Administration")


class OpenApi:
    """The handler of /openapi.json."""

    def __init__(self, routes: Sequence[RouteSpec]) -> None:
        self.routes = [route for route in routes if route.in_schema]
        self._document: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document."""
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
        """The document."""
        await exchange.reply_json(self.document())


def _tag_of(route: RouteSpec) -> str:
    """The group of a route, for people."""
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
