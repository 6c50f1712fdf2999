"""What a row of the route table says."""

from dataclasses import dataclass

from headrace.server.auth import Access
from headrace.server.http import Handler


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route: where, who may, what it does. body: type of the JSON body, for the OpenAPI document."""

    path: str
    methods: tuple[str, ...]
    access: Access
    handler: Handler
    summary: str
    body: type | None = None
    in_schema: bool = True
