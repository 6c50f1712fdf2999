"""openapi.json is true: bodies that it allows are understood, and failures have the shape that it says."""

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from fake_frontend import Running, running_server
from fake_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDING, pooling_server
from hypothesis import HealthCheck, Phase, given, settings

from headrace.messages.control import Outcome
from headrace.messages.weights import ReleaseMemory, UpdateFromDisk, UpdateFromTensors, WeightOpReply
from headrace.server.http import decode_json
from headrace.server.route_table import route_table

EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/encode",
    "/embed",
    "/v2/embed",
    "/classify",
    "/v1/rerank",
    "/v1/score",
    "/api/embed",
    "/api/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/open_session",
    "/close_session",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/pull",
)
CONTROL = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/cancel_weight_update",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
    "/get_weights_by_name",
    "/update_weight_version",
    "/save_sharded_state",
    "/weights_checker",
    "/post_process_weights",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/abort_request",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/start_profile",
    "/configure_logging",
)


POOLING = dict.fromkeys(
    ("/v1/embeddings", "/embeddings", "/embed", "/v1/embed", "/v2/embed", "/encode", "/api/embed", "/api/embeddings"),
    EMBEDDING,
)
POOLING |= dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), CROSS_ENCODER)
POOLING |= dict.fromkeys(("/classify", "/v1/classify"), CLASSIFIER)
"""The model that can serve the examples of these routes."""


@pytest.fixture(scope="module")
def api(shared_server: Running) -> dict[str, Any]:
    return httpx.get(f"{shared_server.url}/openapi.json").json()


@pytest.mark.parametrize("path", GENERATION + CONTROL)
def test_every_body_that_the_schema_allows_is_understood(path, api, shared_server: Running):
    """Whether it makes sense together (a rank below the size of its group, a tensor for each name) is another question."""
    (spec,) = [spec for spec in route_table(shared_server.app.state.context) if spec.path == path]
    decoder = msgspec.json.Decoder(spec.body)
    content = api["paths"][path]["post"]["requestBody"]["content"]
    alone = {
        "/x": {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": content["application/json"]}},
                "responses": {},
            }
        }
    }
    schema = schemathesis.openapi.from_dict(api | {"paths": alone})

    @EXAMPLES
    @given(case=schema["/x"]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    def understood(case):
        body = as_written(case.body)
        if path == "/update_weights_from_tensor":  # the generator knows no contentEncoding
            body["serialized_named_tensors"] = [base64.b64encode(b"tensors").decode()]
        if path == "/generate":
            body.pop("input_embeds", None)
            body = without_files(body)
        decode_json(json.dumps(body).encode(), decoder)

    understood()


def without_files(value: Any) -> Any:
    """Without the base64 texts of media."""
    match value:
        case dict():
            return {name: without_files(item) for name, item in value.items() if name != "data"}
        case list():
            return [without_files(item) for item in value]
        case _:
            return value


def as_written(value: Any) -> Any:
    """A whole number without a fraction: 1.0 is an integer to JSON Schema, and no client writes one so.

    No integer of a body may be wider than 64 bits, which a schema cannot say of values of any type.
    """
    match value:
        case int() | float() if abs(value) >= 2**63:
            return 0
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: as_written(item) for name, item in value.items()}
        case list():
            return [as_written(item) for item in value]
        case _:
            return value


def examples(api: dict[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """(path, method, title, body) of each."""
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            if method != "get" and "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                assert content["examples"], f"{path} has no example"
                for title, example in content["examples"].items():
                    yield path, method, title, example["value"]


def test_every_body_has_an_example_that_the_server_accepts(api):
    """Each by a model that can serve it."""
    weight = WeightOpReply(1, True, "done", "default", shape=(2, 1), values=bytes(8))
    with ExitStack() as stack:
        fills = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        generating = stack.enter_context(running_server(fake_context_length=4096, special_tokens=fills))
        pooling = {kind: stack.enter_context(pooling_server(kind)) for kind in set(POOLING.values())}
        client = stack.enter_context(httpx.Client(timeout=60))
        seen = set()
        for path, method, title, body in examples(api):
            server = pooling[POOLING[path]] if path in POOLING else generating
            if "score" in path and "text_1" in body:
                server = pooling[CROSS_ENCODER]
            checks = path == "/weights_checker"
            server.frontend.weights.reply = msgspec.structs.replace(weight, values=b"{}") if checks else weight
            reply = client.request(method, server.url + path, json=body)
            assert reply.status_code == 200, (path, title, reply.text)
            assert '"error":{' not in reply.text, (path, title)
            schema = api["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
            jsonschema_rs.validator_for({**schema, "components": api["components"]}).validate(body)
            seen.add(path)
    assert set(GENERATION + CONTROL) <= seen


def failures_of(api: dict[str, Any], path: str, status: str) -> Any:
    schema = api["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"]
    return jsonschema_rs.validator_for({**schema, "components": api["components"]})


def test_failures_have_the_shape_that_the_schema_says(api, client: httpx.Client, server: Running):
    server.frontend.weights.reply = WeightOpReply(1, False, "no", "default")
    server.frontend.flush = Outcome(False, "busy")
    for path, body in (
        ("/update_weights_from_disk", {"model_path": "m"}),
        ("/update_weights_from_disk", {"model": "m"}),
        ("/v1/messages", {"model": "m"}),
        ("/pause_generation", {"mode": "gently"}),
        ("/get_weights_by_name", {"name": "a"}),
        ("/release_memory_occupation", {"tags": ["heap"]}),
        ("/flush_cache", None),
        ("/load_lora_adapter", {"lora_name": 3, "lora_path": "x"}),
    ):
        reply = client.post(path, json=body)
        assert 400 <= reply.status_code < 500, path
        failures_of(api, path, "4XX").validate(reply.json())
        assert not failures_of(api, path, "4XX").is_valid({"anything": 1})


SGLANG = {
    "abort_all_requests": False,
    "weight_version": None,
    "load_format": None,
    "is_async": False,
    "torch_empty_cache": True,
    "keep_pause": False,
    "recapture_cuda_graph": False,
    "token_step": 0,
    "flush_cache": True,
    "manifest": None,
}


def test_what_sglangs_clients_spell_out_is_accepted(client: httpx.Client, server: Running):
    reply = client.post("/update_weights_from_disk", json={"model_path": "m", **SGLANG})
    assert reply.status_code == 200, reply.text
    reply = client.post(
        "/update_weights_from_disk", json={"model_path": "m", "keep_pause": True, "recapture_cuda_graph": True}
    )
    assert reply.status_code == 200, reply.text
    assert server.frontend.weights.operations == [UpdateFromDisk("m")] * 2
    for name in SGLANG:
        assert client.post("/update_weights_from_disk", json={"model_path": "m", name: SGLANG[name]}).status_code == 200
    file = base64.b64encode(b"tensors").decode()
    extras = {
        name: SGLANG[name] for name in ("abort_all_requests", "weight_version", "flush_cache", "torch_empty_cache")
    }
    body = {
        "serialized_named_tensors": [file],
        "load_format": "flattened_bucket",
        "disable_draft_model": None,
        **extras,
    }
    assert client.post("/update_weights_from_tensor", json=body).status_code == 200
    last = server.frontend.weights.operations[-1]
    assert isinstance(last, UpdateFromTensors)
    assert last.bucketed
    octets = {"content-type": "application/octet-stream"}
    assert (
        client.post(
            "/update_weights_from_tensor?load_format=flattened_bucket", content=b"x", headers=octets
        ).status_code
        == 200
    )
    assert server.frontend.weights.operations[-1].bucketed
    for path, sent in (
        ("/pause_generation", {"mode": "abort", "torch_empty_cache": False}),
        ("/continue_generation", {"torch_empty_cache": True}),
        ("/update_weight_version", {"new_version": "2", "abort_all_requests": True}),
        ("/destroy_weights_update_group", {"group_name": "g"}),
    ):
        assert client.post(path, json=sent).status_code == 200, path


def test_tags_that_do_not_apply_here_are_accepted_and_said(client: httpx.Client, server: Running):
    note = "cuda_graph: this server has no memory of that name, so nothing was done for it"
    reply = client.post("/release_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]})
    assert (reply.status_code, reply.json()["message"]) == (200, f"done; {note}")
    assert server.frontend.weights.operations == [ReleaseMemory(("kv_cache",))]
    reply = client.post("/resume_memory_occupation", json={"tags": ["cuda_graph"]})
    assert (reply.status_code, reply.json()["success"], reply.json()["message"]) == (200, True, note)
    assert len(server.frontend.weights.operations) == 1
