"""Access control by API keys: decided by a request's path, before routing. A route is closed unless its declaration opens it.

Every route is declared `public`, `user` or `admin`. With an API key, `user` routes need that key or the admin key. With an
admin key, `admin` routes need it; without one, they need the API key. Keys of a file open `user` routes only.
Runs in the event loop that serves HTTP.
"""

import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from headrace.errors import AuthError, NotFoundError
from headrace.server.http import ASGIApp, Receive, Scope, Send, send_error

if TYPE_CHECKING:
    from headrace.frontend.tenants import Tenant
    from headrace.server.keys import ApiKeys

Access = Literal["public", "user", "admin"]


class AccessTable:
    """The access of each path. A path is matched exactly, or by the prefix before its first `{parameter}`."""

    def __init__(self, routes: Iterable[tuple[str, Access]]) -> None:
        self.exact: dict[str, Access] = {}
        self.prefixes: list[tuple[str, Access]] = []
        for path, access in routes:
            head, brace, _ = path.partition("{")
            if not brace:
                self.exact[path] = access
            else:
                others = [
                    other for prefix, other in self.prefixes if prefix.startswith(head) or head.startswith(prefix)
                ]
                assert all(other == access for other in others), f"another path with this beginning: {path}"
                self.prefixes.append((head, access))

    def access(self, path: str) -> Access | None:
        """The declared access of `path`; None = not declared, so access is denied."""
        found = self.exact.get(path)
        if found is None:
            found = next((access for prefix, access in self.prefixes if path.startswith(prefix)), None)
        return found


class AuthMiddleware:
    """Refuses requests that the keys do not allow, and tells handlers whether the caller is an admin."""

    def __init__(
        self,
        app: ASGIApp,
        table: AccessTable,
        api_key: str | None,
        admin_api_key: str | None,
        keys: "ApiKeys | None" = None,
    ) -> None:
        self.app = app
        self.table = table
        self.api_key = api_key.encode() if api_key else None
        self.admin_key = admin_api_key.encode() if admin_api_key else None
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401, or 404 for an undeclared path."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        key = sent_key(scope)
        is_admin = self._is_admin(key)
        tenant = self._tenant(key)
        access = self.table.access(scope["path"])
        if access != "public" and not is_admin and (access == "admin" or not (self._is_user(key) or tenant)):
            guarded_by = "an admin key" if access == "admin" and self.admin_key is not None else "an api key"
            reason = "the key is not accepted" if key is not None else "no key was sent"
            message = f"this route needs {guarded_by} (Authorization: Bearer <key>): {reason}"
            await send_error(send, scope, AuthError(message, code="invalid_api_key"))
        elif access is None:
            await send_error(send, scope, NotFoundError("there is no such route", code="route_not_found"))
        else:
            scope["headrace.is_admin"] = is_admin
            scope["headrace.tenant"] = tenant
            await self.app(scope, receive, send)

    def _tenant(self, key: bytes | None) -> "Tenant | None":
        return self.keys.find(key) if self.keys is not None and key is not None else None

    def _is_user(self, key: bytes | None) -> bool:
        if self.api_key is None and self.keys is not None:
            return False
        return self.api_key is None or (key is not None and hmac.compare_digest(key, self.api_key))

    def _is_admin(self, key: bytes | None) -> bool:
        if self.admin_key is not None:
            return key is not None and hmac.compare_digest(key, self.admin_key)
        return self._is_user(key)


def sent_key(scope: Scope) -> bytes | None:
    """The key of a request: its bearer token, else the one `x-api-key` header, in which Anthropic's clients send it."""
    token = bearer_token(scope)
    if token is not None:
        return token
    values = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return values[0].strip() or None if len(values) == 1 else None


def bearer_token(scope: Scope) -> bytes | None:
    """The token of the Authorization header with the Bearer scheme (any case), as sent; None without one, or with several that differ.

    sglang-router with --api-key sends the same header twice.
    """
    values = {value for name, value in scope["headers"] if name == b"authorization"}
    if len(values) != 1:
        return None
    scheme, _, token = values.pop().strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" and token.strip() else None
