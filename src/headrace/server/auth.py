"""Access control: the API keys, decided by a request's path before routing. A route is closed unless its declaration opens it.

Every route is declared `public`, `user` or `admin`. With an API key, `user` routes need that key or the admin key. With an
admin key, `admin` routes need it; without one, they need the API key. Keys of --api-key-file open `user` routes only; the file is read before the
server starts and again on SIGHUP, in the main process and in each HTTP worker. Does not own the counting (frontend/tenants.py).
"""

import hashlib
import hmac
import json
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.config.web import Networks
from headrace.errors import AuthError, ConfigError, NotFoundError
from headrace.frontend.tenants import KeyLimits, Tenant, TenantLimits
from headrace.log import get_logger
from headrace.plain_types import plain_reason
from headrace.server.address import turn_address
from headrace.server.http import ASGIApp, Receive, Scope, Send
from headrace.server.middleware import HttpMiddleware, RouteNames
from headrace.turns import work_for

log = get_logger(__name__)

Access = Literal["public", "user", "admin"]


class AuthMiddleware(HttpMiddleware):
    """Refuses requests that the keys do not allow, and tells handlers whether the caller is an admin. Raises AuthError, NotFoundError.

    names, access: the declared paths, and who may use each; access to all others is denied. proxies: whose X-Forwarded-For is believed.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: RouteNames,
        access: Mapping[str, Access],
        api_key: str | None,
        admin_api_key: str | None,
        keys: "ApiKeys | None" = None,
        proxies: Networks = (),
    ) -> None:
        super().__init__(app)
        self.names = names
        self.access = access
        self.api_key = api_key.encode() if api_key else None
        self.admin_key = admin_api_key.encode() if admin_api_key else None
        self.keys = keys
        self.proxies = proxies

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = sent_key(scope)
        is_user = self._is_user(key)
        is_admin = is_user if self.admin_key is None else key is not None and hmac.compare_digest(key, self.admin_key)
        tenant = self.keys.find(key) if self.keys is not None and key is not None else None
        access = self.access.get(self.names.of(scope["path"]))
        if access != "public" and not is_admin and (access == "admin" or not (is_user or tenant)):
            guarded_by = "an admin key" if access == "admin" and self.admin_key is not None else "an api key"
            reason = "the key is not accepted" if key is not None else "no key was sent"
            message = f"this route needs {guarded_by} (Authorization: Bearer <key>): {reason}"
            raise AuthError(message, code="invalid_api_key")
        if access is None:
            raise NotFoundError("there is no such route", code="route_not_found")
        scope["headrace.is_admin"] = is_admin
        scope["headrace.tenant"] = tenant
        is_operator = is_admin and self.admin_key is not None
        address = "" if tenant is not None or is_operator else turn_address(scope, self.proxies)
        scope["headrace.address"] = address
        turn, weight = (tenant.name, tenant.limits.weight) if tenant is not None else (address, 1.0)
        work_for(turn, weight)
        if (belong_to := scope.pop("headrace.belong_to", None)) is not None:
            belong_to(turn, scope)
        await self.app(scope, receive, send)

    def _is_user(self, key: bytes | None) -> bool:
        if self.api_key is None:
            return self.keys is None
        return key is not None and hmac.compare_digest(key, self.api_key)


def turn_of(scope: Scope, keys: "ApiKeys | None", admin_key: str | None, proxies: Networks) -> str:
    """Whose turn a request takes, which may not be let in: as `Caller.turn` says of it afterwards."""
    key = sent_key(scope)
    tenant = keys.find(key) if keys is not None and key is not None else None
    if tenant is not None:
        return tenant.name
    is_operator = admin_key and key is not None and hmac.compare_digest(key, admin_key.encode())
    return "" if is_operator else turn_address(scope, proxies)


def sent_key(scope: Scope) -> bytes | None:
    """The key of a request: its bearer token (the scheme in any case), else the one `x-api-key` header, in which Anthropic's clients send it.

    The same Authorization header may be sent twice, as sglang-router with --api-key does; two that differ are none.
    """
    values = {value for name, value in scope["headers"] if name == b"authorization"}
    if len(values) == 1:
        scheme, _, token = values.pop().strip().partition(b" ")
        if scheme.lower() == b"bearer" and token.strip():
            return bytes(token.strip())
    others: list[bytes] = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return others[0].strip() or None if len(others) == 1 else None


class _Entry(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file: in the clear (`key`) or as the hex SHA-256 of its UTF-8 bytes (`sha256`)."""

    key: str | None = None
    sha256: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[_Entry]


class ApiKeys:
    """Tenants by the SHA-256 of their keys. `path` is a .toml or a .json file. Raises ConfigError.

    generation: number of reloads, successful or not.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._by_name: dict[str, Tenant] = {}
        self._by_digest: dict[bytes, Tenant] = {}
        self.generation = 0
        self.load()

    def of_name(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: bytes) -> Tenant | None:
        """The owner of a key. Looked up by its digest, so that the time it takes reveals nothing about other keys."""
        return self._by_digest.get(hashlib.sha256(key).digest())

    def load(self) -> None:
        """Read the file. Tenants that remain keep their current use. Raises ConfigError; then nothing has changed."""
        entries = self._read()
        by_digest: dict[bytes, TenantLimits] = {}
        for entry in entries:
            digest = self._digest(entry)
            if digest in by_digest:
                raise self._error(f"the key of {entry.name!r} appears twice")
            by_digest[digest] = self._limits(entry, 1.0 / len(entries))
        limits_of = {limits.name: limits for limits in by_digest.values()}
        if len(limits_of) != len(by_digest):
            raise self._error("two keys have the same name")
        for name, limits in limits_of.items():
            if name in self._by_name:
                self._by_name[name].change(limits)
            else:
                self._by_name[name] = Tenant(limits, time.monotonic())
        self._by_name = {name: self._by_name[name] for name in limits_of}
        self._by_digest = {digest: self._by_name[limits.name] for digest, limits in by_digest.items()}

    def reload(self) -> None:
        """Like `load`, but an invalid file is logged and changes nothing."""
        self.generation += 1
        try:
            self.load()
        except ConfigError as error:
            log.error("the old keys stay in use: %s", error.message)
        else:
            log.info("read the key file: %d %s", len(self), "key" if len(self) == 1 else "keys")

    def _read(self) -> list[_Entry]:
        try:
            if not self._path.is_file() and self._path.exists():
                # Reading a FIFO would block the event loop, which reloads the file on SIGHUP.
                raise self._error("is not a regular file")
            text = self._path.read_text(encoding="utf-8")
            value = tomllib.loads(text) if self._path.suffix == ".toml" else json.loads(text)
            return msgspec.convert(value, _File).keys
        except OSError as error:
            raise self._error(f"cannot be read ({error.strerror})") from None
        except msgspec.ValidationError as error:
            raise self._error(plain_reason(error)) from None
        except ValueError:
            # The text of a decoder's error may hold a part of a key.
            kind = "TOML" if self._path.suffix == ".toml" else "JSON"
            raise self._error(f"is not valid {kind}") from None

    def _digest(self, entry: _Entry) -> bytes:
        if (entry.key is None) == (entry.sha256 is None):
            raise self._error(f"give {entry.name!r} either key or sha256")
        if entry.key is not None:
            if not entry.key.strip():
                raise self._error(f"the key of {entry.name!r} is empty")
            return hashlib.sha256(entry.key.encode()).digest()
        assert entry.sha256 is not None
        try:
            digest = bytes.fromhex(entry.sha256)
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise self._error(f"sha256 of {entry.name!r} must be 64 hexadecimal digits")
        return digest

    def _limits(self, entry: _Entry, share: float) -> TenantLimits:
        if not entry.name.strip():
            raise self._error("a key has an empty name")
        given = msgspec.structs.asdict(entry)
        for name, value in given.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1e12:
                raise self._error(f"{name} of {entry.name!r} must be above 0")
        limits = {name: value for name, value in given.items() if name not in ("key", "sha256")}
        return TenantLimits(**limits, share=share)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"--api-key-file {self._path}: {what}")


def open_keys(args: ServerArgs) -> ApiKeys | None:
    """The keys of --api-key-file, if there is one. Raises ConfigError."""
    return ApiKeys(args.api_key_file) if args.api_key_file is not None else None
