"""`RouteSpec`, a row of the route table: path, methods, access, handler and what the OpenAPI description says."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.server.auth import Access
from headrace.server.http import Handler

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
