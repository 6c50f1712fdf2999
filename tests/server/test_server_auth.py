"""Keys: every route has a decision, and every kind of key meets it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend, make_app
from starlette.routing import Route

from error_bodies import checked_error
from headrace.server.auth import AuthMiddleware
from headrace.server.context import ServerStatus
from headrace.server.middleware import ErrorBoundary, RouteNames
from headrace.server.route_table import route_table
from route_access import ADMIN_ONLY, PUBLIC

USER, ADMIN = "user-kéy", "admin-key"

KEYS: dict[str, bytes | None] = {
    "none": None,
    "empty": b"Bearer ",
    "scheme only": b"Bearer",
    "wrong": b"Bearer nope",
    "prefix": b"Bearer admin-ke",
    "longer": b"Bearer admin-keyx",
    "basic": b"Basic YWRtaW4ta2V5",
    "no scheme": b"admin-key",
    "non-ascii": b"Bearer \xff\xfe\x80",
    "user": b"Bearer " + USER.encode(),
    "user lower": b"bearer " + USER.encode(),
    "admin": b"Bearer " + ADMIN.encode(),
    "admin upper": b"BEARER   " + ADMIN.encode(),
}


@asynccontextmanager
async def asgi_client(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any, FakeFrontend]]:
    frontend = FakeFrontend()
    app, _ = make_app(frontend, ServerStatus(started=True), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        yield client, app, frontend


def app_routes(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything that can be called."""
    return [
        (method, route.path.replace("{id:path}", "x/y")) for route in app.routes for method in sorted(route.methods)
    ]


def test_every_route_has_a_decision():
    app, _ = make_app(FakeFrontend(), enable_fault_injection=True)
    table = route_table(app.state.context)
    names, access = RouteNames(spec.path for spec in table), {spec.path: spec.access for spec in table}
    assert all(isinstance(route, Route) for route in app.routes)
    for _, path in app_routes(app):
        want = "public" if path in PUBLIC else "admin" if path in ADMIN_ONLY else "user"
        assert access[names.of(path)] == want, path


@pytest.mark.parametrize("keys", ["none", "user", "admin", "both"])
async def test_every_route_with_every_key(keys: str):
    has_user, has_admin = keys in ("user", "both"), keys in ("admin", "both")
    options = {"api_key": USER if has_user else None, "admin_api_key": ADMIN if has_admin else None}
    async with asgi_client(enable_fault_injection=True, **options) as (client, app, _):
        for method, path in app_routes(app):
            for name, value in KEYS.items():
                is_user, is_admin = name.startswith("user"), name.startswith("admin")
                if path in PUBLIC:
                    allowed = True
                elif path in ADMIN_ONLY:
                    allowed = is_admin if has_admin else (is_user or not has_user)
                else:
                    allowed = not has_user or is_user or (has_admin and is_admin)
                headers = [(b"authorization", value)] if value is not None else []
                reply = await client.request(method, path, headers=headers)
                assert (reply.status_code != 401) == allowed, (method, path, name, reply.status_code)
                assert reply.status_code < 500, (method, path, reply.text)
                if not allowed:
                    assert reply.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert "this route needs" in checked_error(path, reply.json())["message"]


async def test_odd_paths_are_never_a_way_in():
    async with asgi_client(api_key=USER, admin_api_key=ADMIN, allowed_hosts="*") as (client, _, _):
        for path in (
            "http://localhost//flush_cache",
            "/flush_cache/",
            "/%66lush_cache",
            "/health/../flush_cache",
            "/FLUSH_CACHE",
            "/health%2f..%2fflush_cache",
            "/flush_cache%0a",
            "/metrics/../internal_state",
            "/v1/models",
            "/v1/models/",
            "/nope",
        ):
            reply = await client.get(path, headers={"host": "/health"})
            assert reply.status_code == 401, path
        user = {"authorization": b"Bearer " + USER.encode()}
        assert (await client.get("/flush_cache%0a", headers=user)).status_code == 404
        assert (await client.get("/nope", headers=user)).status_code == 404


async def test_a_route_without_a_decision_cannot_be_reached():
    reached = False

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    guarded = ErrorBoundary(AuthMiddleware(endpoint, RouteNames(["/known"]), {"/known": "user"}, None, None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://localhost") as client:
        assert (await client.get("/forgotten")).status_code == 404
    assert not reached


async def test_an_authorization_header_may_be_repeated_but_two_that_differ_are_none():
    async with asgi_client(api_key=USER) as (client, _, _):
        key = (b"authorization", b"Bearer " + USER.encode())
        other = (b"authorization", b"Bearer other")
        assert (await client.get("/v1/models", headers=[key])).status_code == 200
        assert (await client.get("/v1/models", headers=[key, key])).status_code == 200, "as sglang-router does"
        assert (await client.get("/v1/models", headers=[key, other])).status_code == 401
        assert (await client.get("/v1/models", headers=[other, key])).status_code == 401


async def test_abort_all_needs_the_admin_key():
    async with asgi_client(api_key=USER, admin_api_key=ADMIN) as (client, _, frontend):
        user, admin = ({"authorization": b"Bearer " + key.encode()} for key in (USER, ADMIN))
        assert (await client.post("/abort_request", json={"rid": "a"}, headers=user)).status_code == 200
        assert (await client.post("/abort_request", json={"abort_all": True}, headers=user)).status_code == 401
        assert (await client.post("/abort_request", json={"abort_all": True}, headers=admin)).status_code == 200
        assert frontend.aborted == ["a", "*"]


async def test_preflights_need_no_key_and_errors_carry_cors_headers():
    async with asgi_client(api_key=USER, allow_origins="https://a.example") as (client, _, _):
        origin = {"origin": "https://a.example"}
        ask = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        reply = await client.options("/v1/chat/completions", headers=ask)
        assert reply.status_code == 200
        refused = await client.post("/v1/chat/completions", headers=origin)
        assert refused.status_code == 401
        for each in (reply, refused):
            assert each.headers["access-control-allow-origin"] == "https://a.example"
    async with asgi_client() as (client, _, _):
        reply = await client.get("/health", headers=origin)
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers
