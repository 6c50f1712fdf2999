"""What --ray refuses and what a replica is given, without Ray."""

import dataclasses
import importlib
import importlib.util
import json

import httpx
import pytest
from fake_frontend import FakeFrontend, make_app

from headrace import Engine, Runtime
from headrace.cluster import ray_server
from headrace.cluster.ray_proxy import LOST, MIDDLEWARES, LostReplicas, middlewares
from headrace.cluster.ray_replica import OneReplicaGate
from headrace.cluster.ray_server import (
    NOT_WITH_RAY,
    cause,
    controller_options,
    deployment_options,
    launch_on_ray,
    plan_replicas,
)
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.server.route_table import route_table
from headrace.server.routes import RouteSpec

OTHER_VALUES = {
    "single_process": True,
    "tokenizer_worker_num": 2,
    "nnodes": 2,
    "node_rank": 1,
    "dist_init_addr": "10.0.0.1:20000",
    "dist_secret_file": "secret",
    "numa_bind": True,
    "max_stored_responses": 1,
    "max_sessions": 1,
    "max_session_tokens": 1,
    "session_timeout_s": 1.0,
    "session_dir": "/tmp",
    "kv_events_config": '{"publisher": "null"}',
    "max_stream_buffer_bytes": 1,
    "save_dir": "/tmp",
    "profile_dir": "/tmp",
    "dump_requests_dir": "/tmp",
    "enable_fault_injection": True,
    "metrics_compat": "vllm",
}


@pytest.mark.parametrize("name", NOT_WITH_RAY)
def test_an_option_that_cannot_work_with_ray_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} cannot be combined with --ray: "):
        plan_replicas(ServerArgs(ray=True, **{name: OTHER_VALUES[name]}))


def test_a_port_to_choose_an_address_of_rays_client_and_limits_that_cross_are_refused():
    with pytest.raises(ConfigError, match="--port 0 cannot be combined with --ray"):
        plan_replicas(ServerArgs(ray=True, port=0))
    with pytest.raises(ConfigError, match="--ray-address ray://a:10001 is for Ray's client"):
        plan_replicas(ServerArgs(ray=True, ray_address="ray://a:10001"))
    with pytest.raises(ConfigError, match="--ray-min-replicas 3 is more than --ray-max-replicas 2"):
        plan_replicas(ServerArgs(ray=True, ray_min_replicas=3, ray_max_replicas=2))


@pytest.mark.parametrize(
    "field", [f for f in dataclasses.fields(ServerArgs) if f.name.startswith("ray_")], ids=lambda f: f.name
)
def test_options_of_ray_need_ray(field):
    value = {"ray_address": "auto", "ray_placement": "strict_spread", "ray_target_ongoing_requests": 3.0}
    with pytest.raises(ConfigError, match="needs --ray"):
        ServerArgs(**{field.name: value.get(field.name, 7)})


@pytest.mark.parametrize("kind", [Engine, Runtime])
def test_ray_is_for_the_command(kind):
    with pytest.raises(ConfigError, match="headrace serve"):
        kind(ray=True)


def test_a_replica_has_the_options_of_the_server_but_not_its_address_in_ray_or_its_certificate():
    args = ServerArgs(
        ray=True,
        ray_max_replicas=4,
        ray_address="auto",
        api_key="sesame",
        tp_size=2,
        ssl_certfile="cert",
        max_total_tokens=512,
    )
    plan = plan_replicas(args, num_cores=10)
    options = ServerArgs(**plan.options)

    assert plan.num_cpus == 2
    assert (options.ray, options.ray_address, options.ssl_certfile) == (False, None, None)
    assert (options.api_key, options.tp_size, options.max_total_tokens, options.num_threads) == ("sesame", 2, 512, 2)


@pytest.mark.parametrize(
    ("given", "num_cpus", "num_threads"),
    [
        ({}, 8, 8),
        ({"num_threads": 3}, 3, 3),
        ({"ray_num_cpus": 5}, 5, 5),
        ({"ray_num_cpus": 5, "num_threads": 3}, 5, 3),
    ],
    ids=str,
)
def test_a_replica_reserves_the_cpus_that_it_computes_with(given, num_cpus, num_threads):
    plan = plan_replicas(ServerArgs(ray=True, **given), num_cores=8)
    assert (plan.num_cpus, plan.options["num_threads"]) == (num_cpus, num_threads)


def test_the_deployment_scales_between_the_limits_and_a_replica_takes_what_its_queue_takes():
    args = ServerArgs(
        ray=True, ray_max_replicas=3, ray_placement="strict_spread", ray_num_gpus=1, max_queued_requests=100
    )
    options = deployment_options(args, plan_replicas(args, num_cores=6))

    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 3, 8.0)
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}
    assert options["max_replicas_per_node"] == 1
    assert options["max_ongoing_requests"] == 64 + 100
    assert options["graceful_shutdown_timeout_s"] > args.drain_timeout_s
    assert "max_replicas_per_node" not in deployment_options(ServerArgs(ray=True), plan_replicas(ServerArgs(ray=True)))


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[ray\]'"):
        launch_on_ray(ServerArgs(ray=True))


def test_a_cluster_of_ours_never_starts_without_tokens(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(ray_server.AUTH, "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is disabled"):
        launch_on_ray(ServerArgs(ray=True))


def test_the_cause_of_a_failure_is_what_our_error_says():
    text = 'Traceback (most recent call last):\n  File "a.py"\nheadrace.errors.ConfigError: --port is taken\n\nThe actor died.\n'
    assert cause(text) == "--port is taken"
    assert cause("one\ntwo\n") == "two"


async def test_routes_that_would_reach_one_replica_are_refused_and_a_new_one_is_until_it_is_listed():
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    table = route_table(make_app(FakeFrontend())[0].state.context)
    gate = OneReplicaGate(app, [*table, RouteSpec("/new/{id}", ("POST",), "user", None, "A new one")])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://localhost") as client:
        for path in ("/v1/chat/completions", "/v1/models/tiny", "/not-there"):
            assert (await client.get(path)).status_code == 200
        for path in ("/flush_cache", "/new/7"):
            reply = await client.post(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_with_ray")
    assert reached == ["/v1/chat/completions", "/v1/models/tiny", "/not-there"]


def test_routes_for_all_replicas_keep_nothing_in_one_of_them_and_none_is_for_the_operator():
    table = [spec for spec in route_table(make_app(FakeFrontend())[0].state.context) if spec.with_replicas]

    assert "admin" not in {spec.access for spec in table}
    assert {spec.path for spec in table} >= {
        "/v1/chat/completions",
        "/messages",
        "/v1/embeddings",
        "/health",
        "/ui",
        "/openapi.json",
    }
    assert not {spec.path for spec in table} & {
        "/v1/responses/{id}",
        "/open_session",
        "/server_info",
        "/metrics",
        "/v1/loads",
    }


SSE, LINES, JSON, TEXT = (
    "text/event-stream; charset=utf-8",
    "application/x-ndjson",
    "application/json",
    "text/plain; charset=utf-8",
)
CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"r","status":"in_progress"}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":4,"delta":"a"}\n\n'


async def replied(path, *messages, raises=None):
    """What a client gets of a proxy that sends these messages and then ends, or raises."""

    async def proxy(scope, receive, send):
        for message in messages:
            await send(message)
        if raises is not None:
            raise raises

    app = LostReplicas(proxy)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        return await client.post(path, json={})


def begins(content_type, status=200, **headers):
    fields = {"content-type": content_type, **headers}
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def part(body, more_body=True):
    return {"type": "http.response.body", "body": body, "more_body": more_body}


def openai_error(message):
    return {"error": {"message": message, "type": "internal_error", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", openai_error(LOST)),
        ("/v1/completions", openai_error(LOST)),
        ("/v1/responses", openai_error(LOST)),
        ("/generate", openai_error(LOST)),
        ("/v1/messages", {"type": "error", "error": {"type": "api_error", "message": LOST}}),
        ("/api/chat", {"error": LOST}),
    ],
)
async def test_a_request_whose_replica_dies_before_the_reply_has_an_error_of_its_api(path, told):
    for raises in (None, RuntimeError("the proxy erred")):
        reply = await replied(path, raises=raises)
        assert (reply.status_code, reply.headers["content-type"], reply.json()) == (500, JSON, told)


async def test_failures_of_the_proxy_itself_have_the_form_of_the_api():
    reply = await replied("/v1/chat/completions", begins(TEXT, 503, retry_after="3"), part(b"no replica", False))
    assert (reply.status_code, reply.headers["retry-after"], reply.json()) == (503, "3", openai_error("no replica"))


@pytest.mark.parametrize(
    ("path", "kind", "sent", "end"),
    [
        ("/v1/chat/completions", SSE, b"data: {}\n\n", b"data: %b\n\ndata: [DONE]\n\n"),
        ("/generate", SSE, b": keep-alive\n\n", b"data: %b\n\ndata: [DONE]\n\n"),
        ("/v1/messages", SSE, b"event: ping\ndata: {}\n\n", b"event: error\ndata: %b\n\n"),
        ("/messages", SSE, b"event: ping\ndata: {}\n\n", b"event: error\ndata: %b\n\n"),
        ("/api/generate", LINES, b"{}\n", b"%b\n"),
    ],
)
async def test_a_stream_whose_replica_dies_ends_with_an_error_of_its_api(path, kind, sent, end):
    error = (await replied(path)).content
    assert (await replied(path, begins(kind), part(sent))).content == sent + end % error
    assert (await replied(path, begins(kind))).content == end % error, "before its first event"
    assert (await replied(path, begins(kind), part(sent), part(b"", False))).content == sent, "one that ended by itself"


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_a_stream_of_responses_whose_replica_dies_ends_with_a_failed_response(path):
    for parts in ([CREATED, DELTA], [CREATED + DELTA], [CREATED[:50], CREATED[50:] + DELTA]):
        reply = await replied(path, begins(SSE), *map(part, parts))
        last = reply.content.removeprefix(CREATED + DELTA).decode()
        assert last.startswith("event: response.failed\ndata: ")
        told = json.loads(last.split("data: ")[1])
        assert (told["type"], told["sequence_number"]) == ("response.failed", 5)
        assert told["response"] == {"id": "r", "status": "failed", "error": {"code": "server_error", "message": LOST}}
    last = (await replied(path, begins(SSE), part(b": keep-alive\n\n"))).content.decode()
    assert json.loads(last.split("data: ")[1]) == {
        "type": "error", "code": "server_error", "message": LOST, "param": None, "sequence_number": 0,
    }  # fmt: skip


async def test_whole_replies_pass_as_they_are():
    for status in (200, 400, 503):
        reply = await replied("/v1/messages", begins(JSON, status, x_request_id="a"), part(b"{}", False))
        assert (reply.status_code, reply.content, reply.headers["x-request-id"]) == (status, b"{}", "a")
    assert (await replied("/", begins(TEXT), part(b"Ollama is running", False))).text == "Ollama is running"


@pytest.mark.parametrize("placement", ["pack", "strict_spread"])
def test_the_proxies_are_told_where_this_is(placement):
    module, _, name = MIDDLEWARES.partition(":")
    assert getattr(importlib.import_module(module), name) is middlewares
    assert [one.cls for one in middlewares()] == [LostReplicas]
    variables = controller_options(ServerArgs(ray=True, ray_placement=placement))["runtime_env"]["env_vars"]
    assert variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == MIDDLEWARES
    assert ("RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY" in variables) == (placement == "pack")
