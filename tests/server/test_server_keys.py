"""The key file: who may call, whose limits count, and what a broken file says."""

import hashlib
import json

import httpx
import pytest
from fake_frontend import FakeFrontend, make_app

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.messages.operations import StartProfileBody
from headrace.server.auth import ApiKeys, AuthMiddleware, turn_of
from headrace.server.context import ServerStatus
from headrace.server.middleware import RouteNames
from headrace.turns import asking

TOML = f"""
[[keys]]
name = "team-a"
key = "secret-a"
weight = 2
max_concurrent = 4
[[keys]]
name = "team-b"
sha256 = "{hashlib.sha256(b"secret-b").hexdigest()}"
tokens_per_minute = 1000.5
"""


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_keys_are_read_from_toml_and_json_in_the_clear_or_hashed(tmp_path):
    for path in (
        write(tmp_path / "keys.toml", TOML),
        write(tmp_path / "k.json", {"keys": [{"name": "team-a", "key": "secret-a", "weight": 2, "max_concurrent": 4},
            {"name": "team-b", "sha256": hashlib.sha256(b"secret-b").hexdigest(), "tokens_per_minute": 1000.5}]}),
    ):  # fmt: skip
        keys = ApiKeys(path)
        a, b = keys.find(b"secret-a"), keys.find(b"secret-b")
        assert (a.name, a.limits.weight, a.limits.max_concurrent) == ("team-a", 2, 4)
        assert (b.name, b.limits.tokens_per_minute) == ("team-b", 1000.5)
        assert keys.find(b"secret-c") is None
        assert keys.find(hashlib.sha256(b"secret-b").hexdigest().encode()) is None


@pytest.mark.parametrize(
    "content, says",
    [
        ("{", "not valid JSON"),
        ({"keys": [{"name": "a"}]}, "either key or sha256"),
        ({"keys": [{"name": "a", "key": "x", "sha256": "y"}]}, "either key or sha256"),
        ({"keys": [{"name": "a", "key": " "}]}, "is empty"),
        ({"keys": [{"name": "a", "sha256": "12"}]}, "64 hexadecimal"),
        ({"keys": [{"name": "a", "key": "x", "wieght": 1}]}, "wieght"),
        ({"keys": [{"name": "a", "key": "x", "weight": 0}]}, "weight of 'a'"),
        ({"keys": [{"name": "a", "key": "x", "max_sessions": -1}]}, "max_sessions of 'a'"),
        ({"keys": [{"name": "a", "key": "x", "shared_cache": 1}]}, "shared_cache|bool"),
        ({"keys": [{"name": "a", "key": "x"}, {"name": "b", "key": "x"}]}, "twice"),
        ({"keys": [{"name": "a", "key": "x"}, {"name": "a", "key": "y"}]}, "the same name"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_says_no_key(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        ApiKeys(write(tmp_path / "keys.json", content))
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(tmp_path / "none.json"))


def test_reading_again_changes_limits_and_keeps_what_is_in_use(tmp_path):
    path = write(tmp_path / "keys.json", {"keys": [{"name": "a", "key": "x", "max_concurrent": 1}]})
    keys = ApiKeys(path)
    before = keys.find(b"x")
    before.enter(1, 0.0)
    write(tmp_path / "keys.json", {"keys": [{"name": "a", "key": "y", "max_concurrent": 7}]})
    keys.reload()

    assert keys.find(b"x") is None
    assert keys.find(b"y") is before
    assert (before.limits.max_concurrent, before.num_live) == (7, 1)
    write(tmp_path / "keys.json", "broken")
    keys.reload()
    assert keys.find(b"y") is before


@pytest.mark.parametrize("options", [{}, {"api_key": "plain"}, {"admin_api_key": "boss"}])
async def test_keys_of_the_file_open_user_routes_only_and_name_the_caller(tmp_path, options):
    frontend = FakeFrontend()
    path = write(tmp_path / "keys.toml", TOML)
    app, _ = make_app(frontend, ServerStatus(started=True), api_key_file=path, **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:

        async def status(key, method="GET", route="/v1/models", **more):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await client.request(method, route, headers=headers, **more)).status_code

        assert await status(None) == await status("wrong") == 401
        assert await status("secret-a") == await status("secret-b") == 200
        assert await status("secret-a", route="/internal_state") == 401
        assert await status(None, route="/internal_state") == 401
        assert await status(None, route="/health") == 200
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
        assert await status("secret-b", "POST", "/generate", json=body) == 200
        assert frontend.callers[-1].tenant.name == "team-b"
        for key in options.values():
            assert await status(key, "POST", "/generate", json=body) == 200
            assert frontend.callers[-1].tenant is None
            assert await status(key, route="/internal_state") == 200
        shown = (await client.get("/server_info", headers={"authorization": "Bearer secret-a"})).text
        assert not any(key in shown for key in ("secret-a", "secret-b"))
        for name in ("api_key", "admin_api_key"):
            assert json.loads(shown)[name] == ("***" if name in options else None)
        assert str(tmp_path) not in shown


async def test_a_key_of_the_file_sees_its_own_requests_only(tmp_path):
    app, _ = make_app(
        FakeFrontend(), ServerStatus(started=True), api_key_file=write(tmp_path / "k.toml", TOML), admin_api_key="boss"
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for key, tenant in (("secret-a", "team-a"), ("boss", None)):
            reply = await client.get("/v1/requests/known", headers={"authorization": f"Bearer {key}"})
            asked = {"tenant_asked": tenant, "is_admin": key == "boss"}
            assert reply.json()["data"] == [{"rid": "known"} | asked]
        reply = await client.get("/v1/requests/unknown", headers={"authorization": "Bearer boss"})
        assert reply.status_code == 404


OWNED_ROUTES = [
    ("POST", "/generate", {"text": "hi", "rid": "r"}),
    ("POST", "/v1/completions", {"model": "org/tiny", "prompt": "hi"}),
    ("POST", "/v1/chat/completions", {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/open_session", {}),
    ("POST", "/close_session", {"session_id": "s1"}),
    ("POST", "/abort_request", {"rid": "r"}),
    ("GET", "/v1/requests/known", None),
]


@pytest.mark.parametrize("method, route, body", OWNED_ROUTES)
async def test_every_route_to_something_owned_says_whose_key_asks(tmp_path, method, route, body):
    frontend = FakeFrontend()
    options = {"api_key_file": write(tmp_path / "k.toml", TOML), "api_key": "plain", "admin_api_key": "boss"}
    app, _ = make_app(frontend, ServerStatus(started=True), **options)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for key, tenant, is_admin in (("secret-a", "team-a", False), ("plain", None, False), ("boss", None, True)):
            frontend.reset()
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.request(method, route, headers=headers, json=body)).status_code == 200
            (caller,) = frontend.callers + [caller for _, caller in frontend.asked_by]
            assert (caller.tenant and caller.tenant.name, caller.is_admin) == (tenant, is_admin)


def test_keys_share_what_the_server_keeps_and_no_cache_unless_told(tmp_path):
    path = write(tmp_path / "keys.toml", TOML + "max_sessions = 3\nmax_session_tokens = 50\nshared_cache = true\n")
    keys = ApiKeys(path)
    a, b = keys.find(b"secret-a"), keys.find(b"secret-b")
    assert (a.limits.share, a.limits.max_sessions, a.limits.shared_cache) == (0.5, None, False)
    assert (b.limits.max_sessions, b.limits.max_session_tokens, b.limits.shared_cache) == (3, 50, True)
    assert a.scope != b.scope

    write(tmp_path / "keys.toml", TOML + "[[keys]]\nname = 'c'\nkey = 'c'\n")
    keys.reload()
    assert (keys.find(b"secret-a").scope, keys.find(b"secret-a").limits.share) == (a.scope, 1 / 3)


async def test_profiles_and_logging_take_names_and_levels_and_nothing_else():
    frontend = FakeFrontend()
    app, _ = make_app(frontend, ServerStatus(started=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for bad in ("/tmp/x", "..", "a/b", ".hidden", "", "x" * 65, "a\n"):
            assert (await client.post("/start_profile", json={"output_dir": bad})).status_code == 400, bad
        for bad in ({"num_steps": 0}, {"activities": ["TPU"]}, {"path": "x"}):
            assert (await client.post("/start_profile", json=bad)).status_code == 400, bad
        assert frontend.profiled == []
        good = {"output_dir": "run-1", "num_steps": 5, "activities": ["CPU", "CPU"]}
        assert (await client.post("/start_profile", json=good)).status_code == 200
        assert frontend.profiled == [StartProfileBody("run-1", 5, ("CPU", "CPU"))]
        assert (await client.post("/stop_profile")).status_code == 400
        assert (await client.post("/configure_logging", json={"level": "loud"})).status_code == 400
        reply = await client.post("/configure_logging", json={"level": "debug", "log_requests": True})
        now = {"level": "debug", "log_requests": True, "log_requests_level": 0}
        assert reply.json() == {"success": True, **now}
        assert frontend.logging == ("debug", True, None)


async def test_whose_turn_a_request_takes(tmp_path):
    """Its key's, else its address's; the operator's requests wait for nobody's. What a client says of itself counts only behind a known proxy."""
    frontend = FakeFrontend()
    app, _ = make_app(
        frontend,
        ServerStatus(started=True),
        api_key="all",
        admin_api_key="operator",
        api_key_file=write(tmp_path / "keys.toml", TOML),
        trusted_proxies="10.0.0.0/8, fd00::1",
    )

    async def turn(host, key="all", *forwarded):
        transport = httpx.ASGITransport(app=app, client=(host, 1))
        headers = [("authorization", f"Bearer {key}"), *(("x-forwarded-for", value) for value in forwarded)]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.post("/generate", json={"text": "a"}, headers=headers)
        assert reply.status_code == 200, reply.text
        return frontend.callers[-1].turn

    assert await turn("192.0.2.7", "secret-a") == "team-a"
    assert await turn("192.0.2.7", "operator") == ""
    assert await turn("192.0.2.7") == await turn("::ffff:192.0.2.7") == "@192.0.2.7"
    assert await turn("2001:db8:1:2:3::4") == await turn("2001:db8:1:2::9") == "@2001:db8:1:2::/64"
    networks = [await turn(f"2001:db8:7:{number:x}::1") for number in (*range(40), 3)]
    assert networks[15] == "@2001:db8:7:f::/64"
    assert set(networks[16:40]) == {"@2001:db8:7::/48"}, "a site of many networks"
    assert networks[40] == networks[3]
    assert await turn("192.0.2.7", "all", "198.51.100.1") == "@192.0.2.7"
    assert await turn("10.1.1.1", "all", "203.0.113.9, 198.51.100.1", "10.3.3.3") == "@198.51.100.1"
    assert await turn("10.1.1.1", "all", "203.0.113.9, 198.51.100.1:5555") == "@198.51.100.1"
    assert await turn("10.1.1.1", "all", "203.0.113.9, [2001:db8::1]:443, 10.3.3.3:80") == "@2001:db8::/64"
    assert await turn("10.1.1.1", "all", "203.0.113.9, unknown", "10.3.3.3") == "@10.1.1.1", "the client wrote the rest"
    assert await turn("fd00::1", "all", "[2001:db8::5]") == "@2001:db8::/64"
    assert await turn("10.1.1.1", "all", "junk") == await turn("10.1.1.1") == "@10.1.1.1"


def test_a_proxy_is_named_by_its_address():
    with pytest.raises(ConfigError, match="--trusted-proxies takes addresses and networks"):
        ServerArgs(trusted_proxies="proxy.example")


@pytest.mark.parametrize(
    ("headers", "turn"),
    [
        ([(b"authorization", b"Bearer secret-a")], "team-a"),
        ([(b"x-api-key", b"secret-b")], "team-b"),
        ([(b"authorization", b"Bearer operator")], ""),
        ([(b"authorization", b"Bearer nobody's")], "@192.0.2.7"),
        ([], "@192.0.2.7"),
        ([(b"x-forwarded-for", b"192.0.2.9")], "@192.0.2.7"),
    ],
)
async def test_whose_turn_a_request_takes_is_known_before_it_begins(tmp_path, headers, turn):
    """And it is the turn that its work takes afterwards."""
    keys, took = ApiKeys(write(tmp_path / "keys.toml", TOML)), []

    async def endpoint(scope, receive, send):
        took.append(asking().tenant)

    scope = {"type": "http", "path": "/ping", "headers": headers, "client": ("192.0.2.7", 1)}
    assert turn_of(scope, keys, "operator", ()) == turn
    await AuthMiddleware(endpoint, RouteNames(["/ping"]), {"/ping": "public"}, None, "operator", keys)(
        scope, None, None
    )
    assert took == [turn]
