"""Fields that ask for nothing are accepted in every route and at every depth; whatever asks for something is refused by name."""

import dataclasses
import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import MODEL, Running, byte_tokenizer, running_server
from other_apis import CHAT, COMPLETION, DETOKENIZE, GENERATE, ROUTER, SGLANG_SAMPLING, TOKENIZE, Defaults

from error_bodies import checked_error
from headrace.sampling.params import SamplingParams

EMPTY: list[Any] = [None, False, "", [], {}]
USER = {"role": "user", "content": "hi"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"model": "", "max_tokens": 9, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "", "messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/generate": {"text": "hi"},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {"model": "default"},
    "/api/pull": {"model": "default"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [72, 105]},
    "/open_session": {},
    "/abort_request": {"rid": "x"},
    "/configure_logging": {},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/update_weight_version": {"new_version": "a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
}
GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/api/chat",
    "/api/generate",
)
SCHEMAS: dict[str, dict[str, Defaults]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/generate": GENERATE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}


@pytest.mark.parametrize("api, route", [(api, route) for route, apis in SCHEMAS.items() for api in apis])
def test_the_defaults_of_other_apis_are_accepted_one_by_one_and_together(client: httpx.Client, api: str, route: str):
    defaults = SCHEMAS[route][api]
    for name, value in defaults.items():
        reply = client.post(route, json=GOOD[route] | {name: value})
        assert reply.status_code == 200, (name, reply.text)
    reply = client.post(route, json=GOOD[route] | defaults)
    assert reply.status_code == 200, reply.text


def test_the_defaults_of_every_api_in_one_body(client: httpx.Client):
    for route, apis in SCHEMAS.items():
        together: Defaults = {}
        for defaults in apis.values():
            together |= defaults
        together.pop("add_special_tokens", None)  # chats of vLLM and tokenizing have different ones
        reply = client.post(route, json=GOOD[route] | together)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("route", GENERATION)
@pytest.mark.parametrize("added", ROUTER)
def test_what_a_router_adds_is_accepted_on_every_route_that_generates(client: httpx.Client, added: str, route: str):
    everything = dict(ROUTER[added])
    if route == "/v1/completions":
        everything.pop("logprobs", None)  # a number there, which the router does not add
    for fields in [*({name: value} for name, value in everything.items()), everything]:
        reply = client.post(route, json=fields | GOOD[route])
        assert reply.status_code == 200, (fields, reply.text)


def test_the_defaults_of_sampling_parameters(client: httpx.Client):
    for params in [*({name: value} for name, value in SGLANG_SAMPLING.items()), SGLANG_SAMPLING]:
        for body in (
            {"text": "a", "sampling_params": params},
            {"text": ["a", "b"], "sampling_params": [params, params]},
        ):
            reply = client.post("/generate", json=body)
            assert reply.status_code == 200, (params, reply.text)


@pytest.mark.parametrize("route", GOOD)
def test_an_unknown_field_is_absent_when_it_is_empty(client: httpx.Client, route: str):
    for value in EMPTY:
        reply = client.post(route, json=GOOD[route] | {"nobody_knows_this": value})
        assert reply.status_code == 200 or "unknown" not in reply.text, (value, reply.text)
    reply = client.post(route, json=GOOD[route] | {"nobody_knows_this": 1})
    if route.startswith("/api/"):  # as Ollama does
        assert (reply.status_code, reply.headers["x-headrace-noted"]) == (200, "nobody_knows_this")
        return
    assert reply.status_code == 400
    error = checked_error(route, reply.json())
    assert "nobody_knows_this" in error["message"]
    assert error.get("param", "nobody_knows_this") == "nobody_knows_this"


def test_empty_fields_are_absent_at_every_depth(client: httpx.Client):
    for value in EMPTY:
        unknown = {"nobody_knows_this": value}
        part = {"type": "text", "text": "hi"} | unknown
        chat = {
            "messages": [{"role": "user", "content": [part]} | unknown],
            "stream": True,
            "stream_options": {"include_usage": True} | unknown,
            "response_format": {"type": "text", "json_schema": None},
        }
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert client.post("/generate", json={"text": "a", "sampling_params": unknown}).status_code == 200


def test_what_asks_the_vendor_to_keep_something_asks_for_nothing_here(client: httpx.Client):
    """Requests are not stored for a vendor's dashboard, and the prefix cache needs no permission."""
    for fields in ({"store": True, "metadata": {"a": "b"}}, {"prompt_cache_retention": "24h"}):
        reply = client.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"] | fields)
        assert reply.status_code == 200, (fields, reply.text)
    for value in ("yes", 1):
        reply = client.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"] | {"store": value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "store")


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["", "default", None])
def test_a_request_without_a_model_s_name_means_what_is_served(client: httpx.Client, route: str, name: str | None):
    assert client.post(route, json=GOOD[route] | {"model": name}).json()["model"] == MODEL
    assert client.post(route, json=GOOD[route]).json()["model"] == MODEL


def test_what_other_apis_define_is_refused_when_it_asks_for_something(client: httpx.Client):
    asking = {
        "cache_prompt": False, "mirostat": 2,
        "return_hidden_states": True, "ec_transfer_params": {"a": 1}, "use_beam_search": True,
        "length_penalty": 2.0, "samplers": ["top_k"], "t_max_predict_ms": 100,
    }  # fmt: skip
    for route in ("/v1/chat/completions", "/v1/completions"):
        for name, value in asking.items():
            reply = client.post(route, json=GOOD[route] | {name: value})
            assert reply.status_code == 400, name
            assert reply.json()["error"]["param"] == name


def test_a_model_without_experts_may_be_asked_which_it_chose():
    """Trainers ask always. A mixture refuses, in words."""
    for has_experts in (False, True):
        with running_server() as server:
            model = server.app.state.context.model
            ready = msgspec.structs.replace(model.ready, has_experts=has_experts)
            server.app.state.context.model = dataclasses.replace(model, ready=ready)
            server.frontend.has_experts = has_experts
            routes = ("/v1/chat/completions", "/v1/completions", "/generate")
            for path, body in (*((route, GOOD[route]) for route in routes), ("/generate", {"text": ["hi", "a"]})):
                reply = httpx.post(server.url + path, json=body | {"return_routed_experts": True})
                assert reply.status_code == (400 if has_experts else 200), (path, reply.text)
                if has_experts:
                    error = reply.json()["error"]
                    assert (error["param"], error["code"]) == ("return_routed_experts", "unsupported_parameter")
                    assert "/start_expert_distribution_record" in error["message"]
            wrong = httpx.post(f"{server.url}/generate", json={"text": "hi", "return_routed_experts": [True, False]})
            assert wrong.status_code == 400


def test_true_is_not_1_and_false_is_not_0(client: httpx.Client):
    for name, value in {"mirostat": True, "best_of": True, "log_metrics": 1}.items():
        assert client.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"] | {name: value}).status_code == 400


def test_messages_may_carry_labels_of_the_client_s_own(client: httpx.Client, server: Running):
    labels = {"id": "m1", "timestamp": 3.5, "cache_control": {"type": "ephemeral"}, "step_loss_mask": 1}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assistant = {"role": "assistant", "content": "a", "reasoning": "b", "provider_specific_fields": {"x": None}}
    plain = [USER, {"role": "assistant", "content": "a"}, USER]
    marked = [USER | labels, assistant, {"role": "user", "content": [part]} | labels]
    for messages in (plain, marked):
        assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    first, second = server.frontend.calls
    assert first.input_ids == second.input_ids


def test_a_choice_of_words_may_be_left_empty(client: httpx.Client):
    chat = GOOD["/v1/chat/completions"]
    assert client.post("/v1/chat/completions", json=chat | {"reasoning_effort": ""}).status_code == 200
    assert client.post("/v1/chat/completions", json=chat | {"reasoning_effort": "most"}).status_code == 400
    assert client.post("/v1/chat/completions", json={"messages": [{"role": "", "content": "a"}]}).status_code == 400


def test_template_arguments_that_ask_for_nothing(client: httpx.Client):
    chat = GOOD["/v1/chat/completions"]
    for kwargs in ({"enable_thinking": False}, {"thinking": None}):
        assert client.post("/v1/chat/completions", json=chat | {"chat_template_kwargs": kwargs}).status_code == 200
    reply = client.post("/v1/chat/completions", json=chat | {"chat_template_kwargs": {"enable_thinking": True}})
    assert reply.status_code == 400


def test_a_chat_may_go_without_the_generation_prompt(client: httpx.Client, server: Running):
    chat = GOOD["/v1/chat/completions"]
    for wanted in (True, False):
        assert client.post("/v1/chat/completions", json=chat | {"add_generation_prompt": wanted}).status_code == 200
    texts = [byte_tokenizer().decode(call.input_ids, False) for call in server.frontend.calls]
    assert [text.endswith("<|assistant|>") for text in texts] == [True, False]
    tokens = [
        client.post("/tokenize", json=chat | {"add_generation_prompt": wanted}).json()["tokens"]
        for wanted in (True, False)
    ]
    assert tokens == [call.input_ids for call in server.frontend.calls]


def test_minus_one_output_tokens_are_as_many_as_fit(client: httpx.Client, server: Running):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = client.post("/v1/completions", json={"prompt": "hi", name: -1})
        assert reply.json()["usage"]["completion_tokens"] > 16


def test_completions_know_the_output_limit_by_the_name_that_chats_have(client: httpx.Client):
    body = GOOD["/v1/completions"]
    reply = client.post("/v1/completions", json=body | {"max_completion_tokens": 3, "max_tokens": 3})
    assert reply.json()["usage"]["completion_tokens"] == 3
    assert client.post("/v1/completions", json=body | {"max_completion_tokens": 3, "max_tokens": 4}).status_code == 400
    reply = client.post("/v1/completions", json=body | {"max_completion_tokens": -2})
    assert reply.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_sampling_seed_is_seed(client: httpx.Client, server: Running, route: str):
    assert client.post(route, json=GOOD[route] | {"sampling_seed": 5}).status_code == 200
    sampling = server.frontend.calls[-1].sampling_params
    assert isinstance(sampling, SamplingParams)
    assert sampling.sampling_seed == 5


def test_sampling_fields_beside_sampling_params_are_neutral_only_where_no_default_of_a_model_can_differ(
    client: httpx.Client,
):
    neutral = {
        "n": 1, "seed": -1, "sampling_seed": -1, "frequency_penalty": 0, "presence_penalty": 0.0, "min_tokens": 0,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "model": "default", "detokenize": True,
        "chat_template_kwargs": {"enable_thinking": False}, "tfs_z": 1.0,
    }  # fmt: skip
    reply = client.post("/generate", json=GOOD["/generate"] | neutral)
    assert reply.status_code == 200, reply.text
    asking = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "skip_special_tokens": False,
        "detokenize": False,
        "model": "other",
    }
    for name, value in asking.items():
        reply = client.post("/generate", json=GOOD["/generate"] | {name: value})
        assert reply.status_code == 400, name
        assert reply.json()["error"]["param"] == name


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_names_of_generate_at_their_defaults(client: httpx.Client, route: str):
    body = GOOD[route] | {"logprob_start_len": -1, "top_logprobs_num": 0, "detokenize": True, "tfs_z": 1.0}
    assert client.post(route, json=body).status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_usage_can_be_on_every_chunk(client: httpx.Client, route: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = client.post(route, json=GOOD[route] | {"stream": True, "stream_options": options, "max_tokens": 5})
    frames = [json.loads(frame.removeprefix("data: ")) for frame in reply.text.split("\n\n")[:-2]]
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(frame["usage"]["prompt_tokens"] == frames[-1]["usage"]["prompt_tokens"] for frame in frames)
    assert [frame for frame in frames if not frame["choices"]] == frames[-1:]


@pytest.mark.parametrize(
    "options", [{"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}]
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_usage_on_every_chunk_needs_usage_at_all(client: httpx.Client, route: str, options: dict[str, bool]):
    reply = client.post(route, json=GOOD[route] | {"stream": True, "stream_options": options, "max_tokens": 5})
    assert reply.status_code == 200
    assert "usage" not in reply.text
    assert client.post(route, json=GOOD[route] | {"stream_options": options}).status_code == 400
