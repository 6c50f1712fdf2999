"""`Engine` and `Runtime` have a method for whatever has a route, with the same parameters; those of a Runtime reach the server."""

import inspect
from collections.abc import Iterator

import msgspec
import pytest
from fake_frontend import MODEL, Running, running_server
from fake_pooling import CROSS_ENCODER, EMBEDDING, pooling_server

from headrace.api.engine import Engine
from headrace.api.native_client import NativeClient
from headrace.api.runtime import Runtime
from headrace.errors import ExecutionError, NotFoundError, RequestError
from headrace.messages.control import InternalState
from headrace.messages.operations import LimitChanges, Operation, Route, StartProfileBody
from headrace.server.route_table import route_table

METHODS = {
    "/generate": ("generate", "async_generate"),
    "/encode": ("encode",),
    "/v1/rerank": ("rerank",),
    "/v2/rerank": ("rerank",),
    "/rerank": ("rerank",),
    "/v1/score": ("score",),
    "/score": ("score",),
    "/health": ("health",),
    "/health_generate": ("health",),
    "/tokenize": ("tokenize",),
    "/v1/tokenize": ("tokenize",),
    "/detokenize": ("detokenize",),
    "/v1/detokenize": ("detokenize",),
    "/open_session": ("open_session",),
    "/close_session": ("close_session",),
    "/v1/cache/pin": ("pin_prompt",),
    "/v1/cache/unpin": ("unpin_prompt",),
    "/v1/cache": ("cached",),
    "/v1/models": ("lora_adapters", "get_model_info"),
    "/v1/models/{id:path}": ("get_model_info",),
    "/model_info": ("get_model_info",),
    "/get_model_info": ("get_model_info",),
    "/server_info": ("get_server_info",),
    "/get_server_info": ("get_server_info",),
    "/v1/loads": ("get_loads",),
    "/get_load": ("get_loads",),
    "/v1/requests": ("latest_requests",),
    "/v1/requests/{id:path}": ("explain_request",),
    "/abort_request": ("abort_request",),
    "/flush_cache": ("flush_cache",),
    "/load_lora_adapter": ("load_lora_adapter",),
    "/unload_lora_adapter": ("unload_lora_adapter",),
    "/start_profile": ("start_profile",),
    "/stop_profile": ("stop_profile",),
    "/start_expert_distribution_record": ("start_expert_distribution_record",),
    "/stop_expert_distribution_record": ("stop_expert_distribution_record",),
    "/dump_expert_distribution_record": ("dump_expert_distribution_record",),
    "/configure_logging": ("configure_logging",),
    "/dump_requests": ("dump_requests",),
    "/freeze_gc": ("freeze_gc",),
    "/set_internal_state": ("set_internal_state",),
    "/internal_state": ("internal_state",),
    "/cache_tree": ("cache_trees",),
    "/ranks": ("get_ranks",),
    "/slow_down": ("slow_down",),
    "/metrics": ("metrics",),
    "/pause_generation": ("pause_generation",),
    "/continue_generation": ("continue_generation",),
    "/cancel_weight_update": ("cancel_weight_update",),
    "/update_weights_from_disk": ("update_weights_from_disk",),
    "/update_weights_from_tensor": ("update_weights_from_tensor",),
    "/update_weights_from_distributed": ("update_weights_from_distributed",),
    "/init_weights_update_group": ("init_weights_update_group",),
    "/destroy_weights_update_group": ("destroy_weights_update_group",),
    "/get_weights_by_name": ("get_weights_by_name",),
    "/update_weight_version": ("update_weight_version",),
    "/weight_version": ("get_model_info",),
    "/get_weight_version": ("get_model_info",),
    "/weights_checker": ("check_weights",),
    "/post_process_weights": ("post_process_weights",),
    "/save_sharded_state": ("save_sharded_state",),
    "/release_memory_occupation": ("release_memory_occupation",),
    "/resume_memory_occupation": ("resume_memory_occupation",),
}
HTTP_ONLY = {
    "/v1/chat/completions": "OpenAI's shapes are for OpenAI's clients",
    "/v1/completions": "OpenAI's shapes are for OpenAI's clients",
    "/v1/embeddings": "OpenAI's shapes are for OpenAI's clients",
    "/embed": "`encode` gives the same numbers",
    "/v1/embed": "`encode` gives the same numbers",
    "/v2/embed": "`encode` gives the same numbers",
    "/infill": "for the plug-ins of llama.cpp's server",
    "/slots/{id}": "for clients of llama.cpp's server; a session is kept by its id",
    "/apply-template": "the tokenizer of `get_tokenizer` has it",
    "/info": "for clients of Text Embeddings Inference",
    "/classify": "`encode` gives the same numbers",
    "/v1/classify": "`encode` gives the same numbers",
    "/v1/responses": "OpenAI's shapes are for OpenAI's clients",
    "/v1/responses/{id}": "OpenAI's shapes are for OpenAI's clients",
    "/v1/responses/{id}/cancel": "OpenAI's shapes are for OpenAI's clients",
    "/v1/responses/{id}/input_items": "OpenAI's shapes are for OpenAI's clients",
    "/ready": "for who watches a server; both are ready once they are made",
    "/ping": "for who watches a server",
    "/openapi.json": "describes the routes",
    "/docs": "describes the routes",
    "/inject_fault": "a test hook",
    "/": "for Ollama's clients, and for browsers",
}
OTHER_CLIENTS = ("/v1/messages", "/api/", "/ui")
"""Beginnings of the paths for Anthropic's and Ollama's clients, and for browsers."""


def test_every_route_has_its_methods(server: Running):
    context = server.app.state.context
    paths = {
        spec.path
        for spec in route_table(context)
        if not spec.path.startswith(OTHER_CLIENTS) and not spec.summary.startswith("Alias of /v1/")
    }
    assert paths - METHODS.keys() - HTTP_ONLY.keys() == set(), "say which methods do what a new route does"
    assert (METHODS.keys() | HTTP_ONLY.keys()) - paths == {"/inject_fault"}
    assert not METHODS.keys() & HTTP_ONLY.keys()


@pytest.mark.parametrize("name", sorted({name for names in METHODS.values() for name in names}))
def test_an_engine_and_a_runtime_have_it_with_the_same_parameters(name: str):
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (Engine, Runtime))
    if name not in ("generate", "async_generate"):  # these take any field of /generate
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def runtime(fake_server: Running) -> Runtime:
    """A Runtime that talks to the fake server instead of one of its own."""
    fake_server.frontend.reset()
    return client_of(fake_server)


def test_a_runtime_asks_and_steers_its_server(runtime: Runtime, fake_server: Running):
    frontend = fake_server.frontend
    frontend.adapters.names = ["poet"]
    assert runtime.lora_adapters() == ["poet"]
    assert runtime.get_model_info()["served_model_name"] == MODEL
    assert runtime.get_server_info()["max_total_num_tokens"] == 1024
    assert runtime.get_loads()[0]["num_running_reqs"] == 1
    state = runtime.internal_state()
    assert isinstance(state, InternalState)
    assert (state.num_running, state.pool.consistent) == (1, True)
    assert "headrace:" in runtime.metrics()
    assert runtime.detokenize(runtime.tokenize("héllo")) == "héllo"
    assert runtime.detokenize(runtime.tokenize(["a", "b"])) == ["a", "b"]
    runtime.abort_request("r1")
    runtime.abort_request()
    runtime.abort_request(abort_all=True)
    assert frontend.aborted == ["r1", "*"]
    assert [(one["dp_rank"], one["rank"], one["pid"]) for one in runtime.get_ranks()] == [(0, 0, 100), (0, 1, 101)]
    assert (runtime.slow_down(0.5), runtime.slow_down()) == ("slept 0.5", "slept None")
    with pytest.raises(RequestError, match="10"):
        runtime.slow_down(10.5)
    assert runtime.collective_rpc("slow_down", forward_sleep_time=0.5)["message"] == "slept 0.5"
    assert [one["pid"] for one in runtime.collective_rpc("ranks")["data"]] == [100, 101]
    assert len(runtime.collective_rpc("cache_tree", {"max_nodes": 2})["data"][0]["nodes"]) == 2
    assert runtime.start_profile("run-1", 3) == "profiling"
    assert StartProfileBody("run-1", 3) in frontend.profiled
    with pytest.raises(RequestError, match="no profile"):
        runtime.stop_profile()
    runtime.start_expert_distribution_record()
    assert runtime.dump_expert_distribution_record()["layers"] == {"0": [1, 2]}
    runtime.stop_expert_distribution_record()
    assert not frontend.experts.is_recording
    runtime.freeze_gc()
    assert frontend.num_frozen == 1
    assert runtime.set_internal_state(max_queued_requests=5)["max_queued_requests"] == 5
    assert frontend.changes == [LimitChanges(max_queued_requests=5)]
    assert runtime.dump_requests() == "requests-1.json"
    assert [node.num_tokens for node in runtime.cache_trees(max_nodes=2)[0].nodes] == [40, 8]
    assert runtime.latest_requests(1) == [{"rid": "known"}]
    assert runtime.explain_request("known")[0]["rid"] == "known"
    with pytest.raises(NotFoundError):
        runtime.explain_request("a/b")
    runtime.configure_logging(level="warning")
    assert frontend.logging == ("warning", None, None)


def test_a_runtime_knows_whether_its_server_is_well(runtime: Runtime, fake_server: Running):
    assert runtime.health()
    assert runtime.health(generate=True)
    fake_server.frontend.alive = False
    assert not runtime.health()
    assert not runtime.health(generate=True)
    runtime._http = NativeClient("http://127.0.0.1:9")
    assert not runtime.health()
    with pytest.raises(ExecutionError):
        runtime.get_loads()


class WideQuery(msgspec.Struct):
    """Fields of a query, of every kind that one may have."""

    limit: int | None = None
    prefix: str | None = None
    deep: bool = False


def test_a_query_names_only_what_is_given():
    """In a query null is the text "None"."""
    operation = Operation("wide", WideQuery, str, route=Route("/wide", "Fields", "GET"))
    runtime = Runtime.__new__(Runtime)
    asked = []

    class Paths(NativeClient):
        def get(self, path: str) -> object:
            asked.append(path)
            return {}

    runtime._http = Paths("http://127.0.0.1:9")
    runtime._ask(operation, WideQuery(prefix="a b"))
    runtime._ask(operation, WideQuery(limit=0, deep=True))
    assert asked == ["/wide?prefix=a+b&deep=False", "/wide?limit=0&deep=True"]


def test_a_runtime_encodes_ranks_and_scores():
    documents = ["a dog", "a cat"]
    with pooling_server(CROSS_ENCODER) as server:
        runtime = client_of(server)
        assert [found["index"] for found in runtime.rerank("a cat", documents)] == [1, 0]
        (best,) = runtime.rerank("a cat", documents, top_n=1, return_documents=True, raw_scores=True)
        assert best == {"index": 1, "relevance_score": 1.5, "document": {"text": "a cat"}}
        assert runtime.score("a cat", documents, raw_scores=True) == [0.5, 1.5]
        with pytest.raises(RequestError, match="cross-encoder"):
            runtime.score("a cat", documents, [3])
    with pooling_server(EMBEDDING) as server:
        runtime = client_of(server)
        assert runtime.encode("hello")["embedding"] == [5.0, 2.0, 0.0, 1.0]
        assert [answer["embedding"] for answer in runtime.encode(["a", "b"], dimensions=1)] == [[1.0], [1.0]]
    with running_server() as server:
        runtime = client_of(server)
        server.frontend.script.picked = lambda prompt, token: -float(token)
        assert runtime.score("a", ["b", "c"], [0, 1]) == [[1.0, pytest.approx(0.36787944)]] * 2


def client_of(server: Running) -> Runtime:
    """A Runtime that talks to this server instead of one of its own."""
    client = Runtime.__new__(Runtime)
    client.url = server.url
    client._http = NativeClient(server.url)
    return client
