"""`RouteSpec`, a row of the route table: path, methods, access, handler and what the OpenAPI description says."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.server.auth import Access
from headrace.server.http import Handler

API_PATHS: Mapping[str, tuple[str, ...]] = {
    "OpenAI": ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/models"),
    "Anthropic": ("/v1/messages",),
}
"""Beginnings of the paths of two APIs, whose clients may take the address of the server for that of the API: they leave out `/v1`."""

Examples = Mapping[str, Mapping[str, Any]]
"""Bodies by a short title."""


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route: its path, access and handler.

    For the OpenAPI document: body: type of the JSON body. failure: what it may answer besides the error object when the status is not
    200. octets: type of the options in the query when the body is a file (application/octet-stream) instead. query: of those in the query
    of any request. generates: it is of no use for a model that makes no text.
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
    generates: bool = False


def without_v1(path: str) -> str | None:
    """The other path of a route of `API_PATHS`; None for other routes."""
    is_apis = any(path.startswith(beginnings) for beginnings in API_PATHS.values())
    return path.removeprefix("/v1") if is_apis else None


def aliases(table: Iterable[RouteSpec]) -> list[RouteSpec]:
    """The same routes at their paths `without_v1`."""
    return [
        replace(spec, path=path, summary=f"Alias of {spec.path}")
        for spec in table
        if (path := without_v1(spec.path)) is not None
    ]
