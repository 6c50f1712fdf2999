"""Web pages: a default server on this machine is out of reach for every page but its own, on every route."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend, Running, make_app

from error_bodies import checked_error
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.server.context import ServerStatus
from headrace.server.middleware import HostList, is_loopback
from route_access import ADMIN_ONLY, PUBLIC

FOREIGN_PAGES: dict[str, dict[str, str]] = {
    "another site": {"origin": "https://evil.example"},
    "another port": {"origin": "http://localhost:3000"},
    "another loopback name": {"origin": "http://127.0.0.1:30000"},
    "a sandboxed frame or a file": {"origin": "null"},
    "no origin at all": {"origin": ""},
    "nonsense": {"origin": "localhost:30000"},
    "a longer name": {"origin": "http://localhost:30000.evil.example"},
    "a user in front": {"origin": "http://localhost:30000@evil.example"},
    "an image or a script": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    "one of another port": {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
    "a frame": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    "a form": {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document"},
    "an extension": {"origin": "chrome-extension://abcdef", "sec-fetch-site": "none"},
}  # fmt: skip
BODIES: dict[str, dict[str, str]] = {
    "json": {"content-type": "application/json"},
    "text": {"content-type": "text/plain"},
    "form": {"content-type": "application/x-www-form-urlencoded"},
    "none": {},
}


@asynccontextmanager
async def client_of(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any, FakeFrontend]]:
    frontend = FakeFrontend()
    app, _ = make_app(frontend, ServerStatus(started=True), enable_fault_injection=True, **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost:30000") as client:
        yield client, app, frontend


def routes(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything that can be called."""
    return [
        (method, route.path.replace("{id:path}", "known")) for route in app.routes for method in sorted(route.methods)
    ]


def has_effects(frontend: FakeFrontend) -> bool:
    return bool(
        frontend.calls or frontend.aborted or frontend.opened or frontend.closed or frontend.adapters.loads or frontend.profiled
        or frontend.faults or frontend.weights.operations or frontend.flush_timeouts
    )  # fmt: skip


@pytest.mark.parametrize("page", FOREIGN_PAGES)
async def test_no_route_answers_a_page_of_another_origin(page: str):
    async with client_of() as (client, app, frontend):
        for method, path in [*routes(app), ("OPTIONS", "/generate"), ("GET", "/nope")]:
            for body in BODIES.values():
                content = None if method in ("GET", "HEAD") else b'{"rid": "a", "text": "hi", "session_id": "s1"}'
                reply = await client.request(method, path, headers=FOREIGN_PAGES[page] | body, content=content)
                assert reply.status_code == 403, (method, path)
                assert not [name for name in reply.headers if name.startswith("access-control")]
                if method != "HEAD":
                    error = checked_error(path, reply.json())
                    assert error.get("type", "permission_error") == "permission_error"
                    assert error.get("code", "origin_not_allowed") == "origin_not_allowed"
                    assert "--allow-origins" in error["message"]
        assert not has_effects(frontend)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example", "10.0.0.5",
        "0.0.0.0:30000", "[::2]:30000", "::1", "localhost:x", "/health", ""],
)  # fmt: skip
async def test_no_route_answers_to_a_name_that_is_not_ours(host: str):
    async with client_of() as (client, app, frontend):
        for method, path in [*routes(app), ("OPTIONS", "/generate"), ("GET", "/nope")]:
            own_page = {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            for headers in ({"host": host}, {"host": host} | own_page):
                reply = await client.request(method, path, headers=headers)
                assert reply.status_code == 403, (method, path)
                if method != "HEAD":
                    error = checked_error(path, reply.json())
                    assert error.get("code", "host_not_allowed") == "host_not_allowed"
                    assert "--allowed-hosts" in error["message"]
        assert not has_effects(frontend)


async def test_every_route_answers_clients_that_are_no_pages_and_pages_of_its_own():
    own = [
        {},
        {"host": "127.0.0.1:1"},
        {"host": "127.8.0.1"},
        {"host": "LOCALHOST.:30000"},
        {"host": "[::1]:30000"},
        {"origin": "http://localhost:30000"},
        {"origin": "HTTP://LocalHost:30000", "sec-fetch-site": "same-origin"},
        {"origin": "http://localhost", "host": "localhost:80"},
        {"origin": "https://localhost", "host": "localhost"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ]
    async with client_of() as (client, app, _):
        for method, path in routes(app):
            for headers in own:
                assert (await client.request(method, path, headers=headers)).status_code != 403, (method, path, headers)


async def test_a_link_may_lead_here_but_a_form_may_not():
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with client_of() as (client, _, _):
        assert (await client.get("/docs", headers=visit)).status_code == 307
        assert (await client.post("/flush_cache", headers=visit)).status_code == 403


async def test_two_hosts_or_a_foreign_origin_beside_a_good_one_are_refused():
    async with client_of() as (client, _, _):
        for bad in ([("host", "localhost"), ("host", "evil.example")], [("host", "localhost")] * 2):
            assert (await client.get("/health", headers=bad)).status_code == 403
        two = [("origin", "http://localhost:30000"), ("origin", "https://evil.example")]
        assert (await client.get("/health", headers=two)).status_code == 403


async def test_listed_origins_are_answered_with_cors_headers_and_others_are_not():
    page = {"origin": "https://chat.example"}
    preflight = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    async with client_of(allow_origins="https://Chat.example:443, null") as (client, _, _):
        assert (await client.options("/generate", headers=preflight)).status_code == 200
        assert (await client.post("/flush_cache", headers=page)).headers[
            "access-control-allow-origin"
        ] == "https://chat.example"
        assert (await client.get("/health", headers={"origin": "null"})).status_code == 200
        assert (await client.get("/health", headers={"origin": "https://evil.example"})).status_code == 403
        assert (await client.get("/health", headers={"origin": "http://chat.example"})).status_code == 403
    async with client_of(allow_origins="*") as (client, _, _):
        for headers in FOREIGN_PAGES.values():
            assert (await client.get("/health", headers=headers)).status_code == 200


async def test_other_hosts_are_answered_when_they_are_listed_or_others_reach_the_server():
    async with client_of(allowed_hosts="LLM.example, fd00::5") as (client, _, _):
        for host in ("llm.example", "llm.example:8443", "[fd00::5]:1", "localhost"):
            assert (await client.get("/health", headers={"host": host})).status_code == 200
        assert (await client.get("/health", headers={"host": "other.example"})).status_code == 403
    for options in ({"host": "0.0.0.0"}, {"host": "::"}, {"host": "10.1.2.3"}, {"allowed_hosts": "*"}):
        async with client_of(**options) as (client, _, _):
            assert (await client.get("/health", headers={"host": "other.example"})).status_code == 200
    async with client_of(host="0.0.0.0", allowed_hosts="llm.example") as (client, _, _):
        assert (await client.get("/health", headers={"host": "other.example"})).status_code == 403
        assert (await client.get("/health", headers={"host": "llm.example"})).status_code == 200


def test_a_server_that_is_open_to_others_says_so(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "headrace")
    for options in ({}, {"host": "0.0.0.0", "api_key": "x"}, {"host": "0.0.0.0", "admin_api_key": "x"}):
        make_app(FakeFrontend(), **options)
    assert not caplog.records
    make_app(FakeFrontend(), host="0.0.0.0")
    assert "no keys are set and --host is 0.0.0.0" in caplog.text


def test_a_request_without_a_host_is_no_browsers():
    assert HostList("127.0.0.1", None).allows([])


def test_loopback_is_told_by_the_address_and_not_by_the_spelling():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", ""):
        assert not is_loopback(host), host


LOCAL = [
    "http://localhost", "http://localhost:3000", "https://localhost:8443", "HTTP://LocalHost:5173", "http://127.0.0.1:8080", "http://0.0.0.0:8080", "http://[::1]:5173",
    "app://obsidian.md", "app://.", "vscode-webview://0m6cl2be0u7hcdhnbm", "chrome-extension://abcdefghijklmnop", "CHROME-EXTENSION://ABCDEF",
    "moz-extension://3c5a7d3e-0000-4000-8000-000000000000", "tauri://localhost", "http://tauri.localhost", "file://",
]  # fmt: skip
NOT_LOCAL = [
    "http://localhost:*", "http://localhost:*@evil", "http://localhost:3000@evil.example", "http://localhost.evil", "http://evil.localhost",
    "http://localhost:3000.evil.example", "http://localhost:3000/x", "http://localhost:", "http:// localhost:3000", "http://xlocalhost:3000",
    "http://127.0.0.1.evil.example", "https://evil.example", "null", "", "*", "localhost:3000", "app:", "app://evil@x", "app://a/b", "xapp://a", "app://*",
    "file:///etc/passwd", "file://evil", "ftp://localhost:3000", "chrome-extension://a b", "javascript://localhost",
]  # fmt: skip


async def answers(client: httpx.AsyncClient, origin: str) -> list[httpx.Response]:
    """To a request and to a preflight, also one that asks for the private network."""
    page = {"origin": origin, "sec-fetch-site": "cross-site"}
    preflight = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    private = preflight | {"access-control-request-private-network": "true"}
    options = [await client.options("/generate", headers=headers) for headers in (preflight, private)]
    return [await client.get("/health", headers=page), await client.post("/flush_cache", headers=page), *options]


async def test_local_apps_are_answered_with_their_origin_and_nobody_else_is():
    async with client_of(allow_origins="local-apps") as (client, _, _):
        for origin in LOCAL:
            for reply in await answers(client, origin):
                assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)
                assert "Origin" in reply.headers["vary"]
        for origin in NOT_LOCAL:
            for reply in await answers(client, origin):
                assert reply.status_code == 403, origin
                assert not [name for name in reply.headers if name.startswith("access-control")]
        twice = [("origin", "app://obsidian.md"), ("origin", "https://evil.example")]
        assert (await client.get("/health", headers=twice)).status_code == 403


@pytest.mark.parametrize(
    "pattern, allowed, refused",
    [
        ("http://localhost:*", ["http://localhost", "http://localhost:3000"], ["https://localhost:3000", "http://127.0.0.1:3000", "app://a"]),
        ("HTTPS://LocalHost:*", ["https://localhost:3000"], ["http://localhost:3000"]),
        ("http://[::1]:*", ["http://[::1]:5"], ["http://localhost:5", "http://[::2]:5"]),
        ("app://*", ["app://obsidian.md", "APP://X"], ["capacitor://localhost", "http://app"]),
        ("capacitor://*, ionic://localhost", ["capacitor://localhost", "ionic://localhost"], ["ionic://other", "app://a"]),
        ("vscode-webview://*", ["vscode-webview://a1"], ["vscode-webview-x://a1", "vscode-webview:a1"]),
        ("file://", ["file://"], ["null", "file://x"]),
        ("null", ["null"], ["file://"]),
        ("tauri://*,https://chat.example", ["tauri://localhost", "https://chat.example"], ["https://chat.example:444"]),
    ],
)  # fmt: skip
async def test_patterns_allow_what_they_say(pattern: str, allowed: list[str], refused: list[str]):
    async with client_of(allow_origins=pattern) as (client, _, _):
        for origin in allowed:
            assert {reply.status_code for reply in await answers(client, origin)} == {200}, origin
        for origin in refused:
            assert {reply.status_code for reply in await answers(client, origin)} == {403}, origin


async def test_a_default_server_is_closed_to_local_apps_and_says_how_to_open_it():
    async with client_of() as (client, _, _):
        for origin in LOCAL:
            for reply in await answers(client, origin):
                assert reply.status_code == 403
                assert "--allow-origins" in reply.text
                assert "local-apps" in reply.text
        for origin in ("https://evil.example", "null"):
            assert "local-apps" not in (await client.get("/health", headers={"origin": origin})).text


@pytest.mark.parametrize(
    "text",
    ["https://a.example/", "a.example", "https://", "https://a.example/x", "https://a b", "http://*", "https://*", "*://localhost", "http://*.example",
     "http://localhost:*@evil", "http://localhost:*/", "http://localhost:3*", "app://*/x", "app://a*", "file:///", "local-app"],
)  # fmt: skip
def test_origins_that_no_browser_sends_are_refused_at_start(text: str):
    with pytest.raises(ConfigError, match="--allow-origins"):
        ServerArgs(allow_origins=text)


@pytest.mark.parametrize("text", ["https://a.example", "a.example:80", "a/b", ""])
def test_hosts_are_names_and_addresses(text: str):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServerArgs(allowed_hosts=text)


BROWSERS = "Mozilla/5.0 (X11; Linux x86_64; rv:78.0) Gecko/20100101 Firefox/78.0"


@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": BROWSERS},  # an image without a referrer, in a browser without Sec-Fetch
        {"user-agent": "mozilla/4.0"},
        {"user-agent": "python-requests/2", "referer": "https://evil.example/"},
        {"referer": ""},
        {"sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
        {"origin": "http://localhost:30000"},
        [("user-agent", "curl/8"), ("user-agent", BROWSERS)],
    ],
)
async def test_no_browser_may_get_what_flushes_the_cache(headers: Any):
    for options in ({}, {"allow_origins": "*"}):
        async with client_of(**options) as (client, _, frontend):
            del client.headers["user-agent"]
            for path in ("/flush_cache", "/flush_cache?timeout=1"):
                reply = await client.get(path, headers=headers)
                assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
                assert "use POST" in checked_error(path, reply.json())["message"]
            assert frontend.flush_timeouts == []


async def test_clients_that_are_no_browsers_may_get_it_and_only_it():
    """As slime does, which polls until the cache is empty. HEAD has no effect."""
    async with client_of() as (client, app, frontend):
        for agent in ("python-requests/2.32", "curl/8.5", "aiohttp/3", ""):
            reply = await client.get("/flush_cache?timeout=2.5", headers={"user-agent": agent})
            assert (reply.status_code, reply.json()) == (200, {"success": True, "message": "flushed"})
        assert frontend.flush_timeouts == [2.5] * 4
        assert (await client.head("/flush_cache")).status_code == 405
        assert (await client.get("/flush_cache?timout=1")).status_code == 400
        assert len(frontend.flush_timeouts) == 4
        admin_gets = {path for method, path in routes(app) if method == "GET" and path in ADMIN_ONLY}
        assert admin_gets == {"/flush_cache", "/internal_state", "/cache_tree", "/ranks", "/get_weights_by_name"}
    async with client_of(api_key="user", admin_api_key="admin") as (client, _, frontend):
        for key, status in (("", 401), ("user", 401), ("admin", 200)):
            reply = await client.get("/flush_cache", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status
        assert len(frontend.flush_timeouts) == 1


async def test_a_browsers_get_changes_nothing():
    """What a link or an image can ask for: no route with an effect, `/health_generate` (one token, public) apart."""
    async with client_of() as (client, app, frontend):
        for method, path in routes(app):
            if method in ("GET", "HEAD"):
                (await client.request(method, path, headers={"user-agent": BROWSERS}))
        assert not has_effects(frontend)
        assert {path for method, path in routes(app) if method == "GET"} & PUBLIC == PUBLIC


def test_over_a_socket_the_default_server_refuses_pages_and_answers_clients(server: Running, client: httpx.Client):
    assert client.get("/health").status_code == 200
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    assert client.post("/flush_cache", headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/flush_cache", headers={"origin": server.url}).status_code == 200
