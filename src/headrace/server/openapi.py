"""The OpenAPI description and the plain /docs page, generated from the route table. Built once, on demand."""

import html
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.server.error_forms import reply_type_of
from headrace.server.http import Exchange, send_response
from headrace.server.routes import RouteSpec
from headrace.version import VERSION


class OpenApi:
    """Handlers of /openapi.json and /docs."""

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
                failures = [schema_of[kind] for kind in (route.failure, reply_type_of(path)) if kind is not None]
                schema = {"anyOf": failures} if len(failures) > 1 else failures[0]
                error = {"description": "error", "content": {"application/json": {"schema": schema}}}
                operation: dict[str, Any] = {
                    "summary": route.summary,
                    "operationId": method.lower() + "".join(c if c.isalnum() else "_" for c in path),
                    "responses": {"200": {"description": "success"}, "4XX": error, "5XX": error},
                    "security": [] if route.access == "public" else [{"bearer": []}],
                }
                if route.body is not None:
                    content = {"application/json": {"schema": schema_of[route.body]}}
                    if route.octets is not None:
                        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
                    operation["requestBody"] = {"required": True, "content": content}
                names = re.findall(r"{(\w+)}", path)
                operation["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
                ]
                for query in filter(None, (route.octets, route.query)):
                    options = msgspec.json.schema_components([query])[1][query.__name__]
                    operation["parameters"] += [
                        {"name": name, "in": "query", "schema": schema}
                        for name, schema in options["properties"].items()
                    ]
                paths.setdefault(path, {})[method.lower()] = operation
        return {
            "openapi": "3.1.0",
            "info": {"title": "Headrace", "version": VERSION},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            },
        }

    async def openapi_json(self, exchange: Exchange) -> None:
        """The document."""
        await exchange.reply_json(self.document())

    async def docs(self, exchange: Exchange) -> None:
        """The routes on one page without scripts."""
        rows = "".join(
            f"<tr><td>{' '.join(route.methods)}</td><td><code>{html.escape(route.path)}</code></td>"
            f"<td>{route.access}</td><td>{html.escape(route.summary)}</td></tr>"
            for route in self.routes
        )
        page = (
            "<!doctype html><meta charset=utf-8><title>Headrace routes</title><h1>Headrace routes</h1>"
            f'<p>Bodies: <a href="/openapi.json">openapi.json</a></p><table>{rows}</table>'
        )
        await send_response(exchange.send, 200, page.encode(), b"text/html; charset=utf-8")


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
