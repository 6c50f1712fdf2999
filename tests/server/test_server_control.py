"""Health, information and control routes, the native route, and what the process of the server is like."""

import json
import socket
import subprocess
import sys
import time
from typing import Any, get_type_hints

import httpx
import pytest
from fake_frontend import MODEL, FakeFrontend, Running, make_app, running_server
from test_server_openai import events

import headrace
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError
from headrace.frontend.control import MainOperations
from headrace.frontend.tenants import SERVER
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.control import Outcome
from headrace.messages.operations import OPERATIONS
from headrace.messages.outputs import FinishReason
from headrace.server import listener
from headrace.server.address import bind
from headrace.server.listener import Server
from headrace.server.request_frontend import PARTS, RequestFrontend


def test_health_follows_the_engine(client: httpx.Client, server: Running):
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        assert client.get(path).status_code == 200
        assert client.head(path).status_code == 200
    server.frontend.alive = False
    assert client.get("/ping").status_code == 200
    for path in ("/health", "/health_generate", "/ready"):
        assert client.get(path).status_code == 503


def test_a_draining_server_is_alive_but_not_ready(client: httpx.Client, server: Running):
    server.status.draining = True
    try:
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    finally:
        server.status.draining = False


def test_information_routes_and_their_aliases(client: httpx.Client, server: Running):
    server.frontend.own_counters["num_unknown_outputs"] = 3
    info = client.get("/model_info").json()
    assert info["served_model_name"] == MODEL
    assert info["context_length"] == 512
    assert (info["model_type"], info["architectures"]) == ("fake", ["FakeForCausalLM"])
    assert info["sampling_defaults"]["temperature"] == 0.25
    assert info["sampling_defaults"]["origin"] == "the card of the fake"
    assert client.get("/get_model_info").json() == info
    loads = client.get("/v1/loads").json()
    assert loads["loads"][0]["num_running_reqs"] == 1
    short = client.get("/get_load").json()
    assert short == [{"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 263}]
    state = client.get("/internal_state").json()
    assert state["pool"]["consistent"] is True
    assert state["frontend"] == {"num_unknown_outputs": 3}
    server_info = client.get("/server_info").json()
    assert client.get("/get_server_info").json() == server_info
    assert server_info["frontend"] == state["frontend"]
    assert [each["pool"] for each in server_info["internal_states"]] == [state["pool"]]
    for shown in (state, *server_info["internal_states"]):
        assert shown["dp_rank"] == 0  # as routers expect it
        assert "replica" not in shown


def test_server_info_is_flat(client: httpx.Client):
    info = client.get("/server_info").json()
    # Options as they were given, but for what the engine decided.
    assert (info["host"], info["stream_interval"], info["dp_size"], info["tp_size"]) == ("127.0.0.1", 1, 1, 1)
    assert (info["dtype"], info["attention_backend"], info["context_length"]) == ("float32", "torch_native", 512)
    assert (info["max_total_num_tokens"], info["max_running_requests"]) == (1024, 8)
    assert info["served_model_name"] == MODEL
    assert info["version"] == headrace.__version__
    [state] = info["internal_states"]
    assert (state["num_running"], state["last_gen_throughput"]) == (1, 12.5)
    assert state["memory_usage"]["token_capacity"] == 1024


def test_model_cards_say_where_a_model_comes_from(client: httpx.Client, server: Running):
    server.frontend.adapters.names = ["poet"]
    cards = client.get("/v1/models").json()["data"]
    shown = [{name: card[name] for name in ("id", "root", "parent", "owned_by", "max_model_len")} for card in cards]
    same = {"owned_by": "headrace", "max_model_len": 512}
    assert shown == [
        {"id": MODEL, "root": MODEL, "parent": None, **same},
        {"id": "poet", "root": "poet", "parent": MODEL, **same},
    ]
    assert [client.get(f"/v1/models/{card['id']}").json() for card in cards] == cards


def test_server_info_names_the_weights_that_serve(client: httpx.Client, server: Running):
    server.frontend.weights.model_path = "/srv/private/step-7"
    server.frontend.weights.version = "7"
    info = client.get("/server_info").json()
    assert (info["model_path"], info["weight_version"]) == ("step-7", "7")


def test_server_info_tells_no_keys_and_no_folders():
    secret = {"api_key": "sesame-1", "admin_api_key": "sesame-2"}
    with running_server(model_path="/srv/private/weights.gguf", tokenizer_path="/srv/private/tok", **secret) as running:
        text = httpx.get(running.url + "/server_info", headers={"authorization": "Bearer sesame-2"}).text
    assert "sesame" not in text
    assert "/srv" not in text
    info = json.loads(text)
    assert info["model_path"] == "weights.gguf"
    assert (info["api_key"], info["otlp_traces_endpoint"]) == ("***", None)


def test_model_info_says_where_the_weights_that_serve_were_read_from():
    """In full to the operator, whose clients open it; to others the name alone."""
    keys = {"api_key": "sesame-1", "admin_api_key": "sesame-2"}
    with running_server(model_path="/srv/private/weights.gguf", tokenizer_path="/srv/private/tok", **keys) as running:

        def path(key: str, route: str = "/model_info", name: str = "model_path") -> str:
            return httpx.get(running.url + route, headers={"authorization": f"Bearer {key}"}).json()[name]

        assert (path("sesame-1"), path("sesame-2")) == ("weights.gguf", "/srv/private/weights.gguf")
        tokenizers = [path(key, name="tokenizer_path") for key in ("sesame-1", "sesame-2")]
        assert tokenizers == ["tok", "/srv/private/tok"]
        running.frontend.weights.model_path = "/srv/step-7"
        assert (path("sesame-1"), path("sesame-2")) == ("step-7", "/srv/step-7")
        assert path("sesame-2", "/get_model_info") == "/srv/step-7"
        assert path("sesame-2", "/server_info") == "step-7"


def test_flush_says_what_happened(client: httpx.Client, server: Running):
    assert client.post("/flush_cache").json() == {"success": True, "message": "flushed"}
    server.frontend.flush = Outcome(False, "2 requests run")
    reply = client.post("/flush_cache")
    assert reply.status_code == 409
    assert reply.json() == {"success": False, "message": "2 requests run"}


def test_the_tree_of_cached_prefixes_is_outlined(client: httpx.Client):
    [tree] = client.get("/cache_tree?max_nodes=2").json()["data"]
    assert tree == {
        "dp_rank": 0,
        "num_nodes": 3,
        "num_tokens": 64,
        "nodes": [
            {"parent": -1, "num_tokens": 40, "num_children": 2, "num_leases": 1},
            {"parent": 0, "num_tokens": 8, "num_children": 0, "num_leases": 1},
        ],
    }
    for query in ("max_nodes=0", "max_nodes=2001", "max_depth=65", "depth=2"):
        assert client.get(f"/cache_tree?{query}").status_code == 400


def test_the_latest_requests_are_listed(client: httpx.Client):
    assert client.get("/v1/requests").json() == {"object": "list", "data": [{"rid": "known"}, {"rid": "other"}]}
    assert len(client.get("/v1/requests?limit=1").json()["data"]) == 1
    for query in ("limit=0", "limit=1001", "limit=x", "last=3"):
        assert client.get(f"/v1/requests?{query}").status_code == 400


def test_abort_is_passed_on(client: httpx.Client, server: Running):
    assert client.post("/abort_request", json={"rid": "req-1"}).status_code == 200
    assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert server.frontend.aborted == ["req-1", "*"]
    for body in ({}, {"rid": ""}, {"rid": 5}, {"rid": ["a"]}, {"abort_all": "yes"}):
        assert client.post("/abort_request", json=body).status_code == 400


def test_metrics_are_prometheus_text(client: httpx.Client):
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "headrace:prompt_tokens_total" in reply.text


def test_routes_that_options_take_away(client: httpx.Client):
    assert client.post("/inject_fault", json={}).status_code == 404
    with running_server(disable_metrics=True, disable_openapi=True) as running:
        for path in ("/metrics", "/openapi.json", "/docs"):
            assert httpx.get(running.url + path).status_code == 404


def test_faults_are_injected_only_when_enabled():
    with running_server(enable_fault_injection=True) as running:
        fault = {"stage": "sampling", "kind": "nan", "rid": "a", "at_token": 3}
        assert httpx.post(running.url + "/inject_fault", json=fault).status_code == 200
        assert [(f.stage, f.rid, f.at_token) for f in running.frontend.faults] == [("sampling", "a", 3)]
        assert httpx.post(running.url + "/inject_fault", json=fault | {"kind": "melt"}).status_code == 400


UNDESCRIBED = {"/openapi.json", "/docs", "/ui", "/ui/{path}", "/api/blobs/{digest}", "/slots/{id}"} | {
    f"/api/{name}" for name in ("create", "copy", "push", "delete")
}
"""The web pages, what describes the API, routes of Ollama that always refuse, and one for llama.cpp's clients."""


def test_openapi_describes_every_route(client: httpx.Client, server: Running):
    document = client.get("/openapi.json").json()
    routes = {route.path.replace(":path}", "}") for route in server.app.routes} - UNDESCRIBED
    assert set(document["paths"]) == routes
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rsplit("/", 1)[1]
    assert "messages" in document["components"]["schemas"][name]["properties"]
    reply = client.get("/docs")
    assert (reply.status_code, reply.headers["location"]) == (307, "ui/#api"), "the page that shows them"


def test_native_replies_have_the_shape_of_the_input(client: httpx.Client):
    one = client.post("/generate", json={"text": "hi", "sampling_params": {"max_new_tokens": 3}}).json()
    assert one["text"] == "Hel"
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert client.put("/generate", json={"text": "hi"}).status_code == 200
    many = client.post("/generate", json={"text": ["a", "b"], "sampling_params": {"n": 2}}).json()
    assert [output["index"] for output in many] == [0, 1, 2, 3]


def test_native_streams_are_cumulative(client: httpx.Client):
    body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 3}}
    assert [event["text"] for event in events(client.post("/generate", json=body))] == ["H", "He", "Hel"]


def test_native_streams_are_deltas_when_the_server_says_so():
    with running_server(incremental_streaming_output=True) as running:
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 3}}
        frames = events(httpx.post(running.url + "/generate", json=body))
        assert [event["text"] for event in frames] == ["H", "e", "l"]
        assert [len(event["output_ids"]) for event in frames] == [1, 1, 1]


def test_a_native_sample_that_fails_midway_is_reported_once(client: httpx.Client, server: Running):
    server.frontend.script.ends = {0: FinishReason("abort", message="broke", status_code=500)}
    frames = events(client.post("/generate", json={"text": "hi", "stream": True}))
    assert frames[-1]["error"]["message"] == "broke"
    assert frames[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    batch = events(client.post("/generate", json={"text": ["hi", "ho"], "stream": True}))
    assert not any("error" in frame for frame in batch)


def test_the_choice_of_experts_is_recorded_and_told(client: httpx.Client, server: Running):
    assert client.post("/start_expert_distribution_record").json()["success"]
    again = client.post("/start_expert_distribution_record")
    assert (again.status_code, "stop it first" in again.text) == (400, True)
    told = client.post("/dump_expert_distribution_record").json()
    assert told == {"success": True, "is_recording": True, "layers": {"0": [1, 2]}}
    assert client.post("/stop_expert_distribution_record").json()["success"]
    assert not server.frontend.experts.is_recording


def test_warmups_run_before_the_server_is_ready():
    class Recording(FakeFrontend):
        kept: list[Any] = []

        def generate_request(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
            assert kwargs["caller"] is SERVER  # who has no time limits
            self.kept.append(obj)
            return super().generate_request(obj, *args, **kwargs)

    app, args = make_app(Recording(), warmups="chat")
    with pytest.raises(ConfigError, match="nonsense"):
        make_app(FakeFrontend(), warmups="nonsense")
    server = Server(app, args)
    server.run(on_started=server.shutdown)
    assert [obj.text for obj in Recording.kept] == ["Hello", None]
    assert all(obj.sampling_params.max_new_tokens == 1 for obj in Recording.kept)


def test_a_server_leaves_when_another_thread_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "TICK_S", 1e6)
    with running_server() as running:
        assert httpx.get(f"{running.url}/ping").status_code == 200
    # The end of the block told it to leave, and waited for its thread.


def test_replies_carry_the_current_date(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "TICK_S", 0.01)
    with running_server() as running:
        first = httpx.get(f"{running.url}/ping").headers["date"]
        deadline_s = time.monotonic() + 20
        while httpx.get(f"{running.url}/ping").headers["date"] == first:
            assert time.monotonic() < deadline_s


def test_an_application_that_cannot_start_says_why():
    class Broken(FakeFrontend):
        def reset(self) -> None:
            super().reset()
            self.script.fail_at, self.script.error = 0, ExecutionError("the engine does not answer")

    app, args = make_app(Broken())
    with pytest.raises(ExecutionError, match="does not answer"):
        Server(app, args).run()


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="not an address"):
        bind("no.such.host.invalid", 0)


def test_a_server_listens_where_it_says(server: Running):
    assert server.server.port > 0
    assert ServerArgs().host == "127.0.0.1"
    assert server.server.host == "127.0.0.1"


def test_the_front_process_imports_no_torch():
    modules = "serve", "api.engine", "server.app", "server.listener"
    code = f"import sys, {', '.join(f'headrace.{name}' for name in modules)}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_real_manager_is_what_the_server_needs():
    needed = {name for name in vars(RequestFrontend) if not name.startswith("_")}
    assert needed - set(PARTS) <= set(vars(TokenizerManager))


def test_the_main_process_has_the_work_of_every_operation_of_its_own():
    work = {name: function for name, function in vars(MainOperations).items() if not name.startswith("_")}
    assert set(work) == {name for name, row in OPERATIONS.items() if row.at == "main"}
    for name, function in work.items():
        assert get_type_hints(function)["request"] is OPERATIONS[name].request


def test_a_flush_may_wait(client: httpx.Client, server: Running):
    assert client.post("/flush_cache?timeout=2.5").status_code == 200
    assert client.post("/flush_cache").status_code == 200
    assert server.frontend.flush_timeouts == [2.5, 0.0]
    for query, param in (("timeout=soon", "timeout"), ("timout=1", "timout")):
        reply = client.post(f"/flush_cache?{query}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
