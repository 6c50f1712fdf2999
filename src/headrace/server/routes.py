"""`RouteSpec`, a row of the route table: path, methods, access, handler and what the OpenAPI description says."""

from dataclasses import dataclass

from headrace.server.auth import Access
from headrace.server.http import Handler


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
    generates: bool = False
