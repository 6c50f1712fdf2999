"""Two engines, of which one computes prompts and the other goes on with them: the answers are those of one engine that does both."""

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Answer,
    Pair,
    answer_of,
    free_port,
    random_ids,
    rooms,
    running_engine,
    running_pair,
)
from safetensors.torch import load_file, save_file

from headrace import Engine
from headrace.config.machine import SECRET_VARIABLE
from headrace.disaggregation import wire
from headrace.errors import ConfigError, RequestError
from headrace.server.app import create_app


@pytest.fixture(scope="module", params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest, patient: None, tiny_model: str) -> Iterator[Pair]:
    with running_pair(tiny_model, {}, {"disaggregation_transfer_backend": request.param}) as pair:
        yield pair


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> Iterator[Engine]:
    with running_engine(tiny_model) as engine:
        yield engine


PROMPTS = [random_ids(count, seed=count) for count in (1, 15, 16, 100, 129, 400)]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SEEDED, FILTERED, PENALISED], ids=["greedy", "seeded", "filtered", "penalised"]
)
def test_answers_are_those_of_one_engine(pair: Pair, alone: Engine, sampling: dict[str, Any]):
    before = pair.decode.internal_state()
    for ids in PROMPTS:
        call = {"input_ids": ids, "sampling_params": sampling}
        assert answer_of(pair.ask(**call)) == answer_of(alone.generate(**call))
    state = pair.decode.internal_state()
    assert state.transfer.rooms - before.transfer.rooms == len(PROMPTS)
    assert state.transfer.failed == before.transfer.failed
    assert state.computed_prefill_tokens == before.computed_prefill_tokens, (
        "no token of a prompt is computed on the decode side"
    )


def test_logprobs_and_hidden_states_come_with_the_first_token(pair: Pair, alone: Engine):
    call = {
        "input_ids": PROMPTS[3],
        "sampling_params": SEEDED,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6],
    }
    assert answer_of(pair.ask(**call)) == answer_of(alone.generate(**call))
    call = {"input_ids": PROMPTS[4], "sampling_params": GREEDY, "return_hidden_states": True}
    got, want = pair.ask(**call), alone.generate(**call)
    assert got["meta_info"]["hidden_states"] == want["meta_info"]["hidden_states"]


def test_both_sides_tell_what_happened(pair: Pair):
    pair.ask(input_ids=PROMPTS[4], sampling_params=GREEDY, rid="told")
    sides = [engine.explain_request("told")[0]["events"] for engine in (pair.prefill, pair.decode)]
    computed, received = ([event["event"] for event in events] for events in sides)
    assert ("chunk" in computed, "chunk" in received) == (True, False)
    [came] = [event for event in sides[1] if event["event"] == "transferred"]
    assert came["prompt_tokens"] == len(PROMPTS[4])
    assert received.index("transferred") < received.index("admitted")


def test_samples_of_one_prompt_have_rooms_of_their_own(pair: Pair, alone: Engine):
    call: dict[str, Any] = {"input_ids": PROMPTS[4], "sampling_params": SEEDED | {"n": 3}}
    assert [answer_of(one) for one in pair.ask(**call)] == [answer_of(one) for one in alone.generate(**call)]


def test_only_what_decode_does_not_have_is_sent(pair: Pair, alone: Engine):
    first, second = [*PROMPTS[5][:320], 7], [*PROMPTS[5][:320], 8, 9]
    want = [alone.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"] for ids in (first, second)]
    sent = [pair.prefill.internal_state().transfer.sent_tokens]
    for ids, output in zip((first, second), want, strict=True):
        assert pair.ask(input_ids=ids, sampling_params=GREEDY)["output_ids"] == output
        sent.append(pair.prefill.internal_state().transfer.sent_tokens)
    assert sent[2] - sent[1] == 16, "one page"


def test_nothing_is_left(pair: Pair):
    for engine in (pair.prefill, pair.decode):
        pool = engine.internal_state().pool
        assert pool.consistent
        assert pool.leased_tokens == 0
        assert engine.internal_state().memory_repairs == 0


def test_a_room_of_another_prompt_and_one_in_use_are_errors(pair: Pair):
    room = next(rooms)
    call = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": room}
    pair.prefill.generate(input_ids=PROMPTS[3], sampling_params=GREEDY, **call)
    with pytest.raises(RequestError, match="another prompt"):
        pair.decode.generate(input_ids=PROMPTS[4], sampling_params=GREEDY, **call)
    with pytest.raises(RequestError, match="in use by another request"):
        pair.prefill.generate(input_ids=PROMPTS[4], sampling_params=GREEDY, rid="another", **call)
    assert pair.decode.generate(input_ids=PROMPTS[3], sampling_params=GREEDY, **call)["meta_info"]["prompt_tokens"]
    with pytest.raises(RequestError, match="bootstrap_room is missing"):
        pair.decode.generate(input_ids=PROMPTS[3], sampling_params=GREEDY)


def test_without_a_prefill_server_the_prompt_is_computed(
    alone: Engine, tiny_model: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of this test")
    monkeypatch.setattr(wire, "SILENT_S", 0.5)
    want = answer_of(alone.generate(input_ids=PROMPTS[3], sampling_params=SEEDED))
    with running_engine(tiny_model, disaggregation_mode="decode") as decode:

        def ask(port: int) -> Answer:
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
            return answer_of(decode.generate(input_ids=PROMPTS[3], sampling_params=SEEDED, **room))

        assert ask(free_port()) == want, "nobody listens"
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert ask(silent.getsockname()[1]) == want, "somebody listens and says nothing"
        with socket.create_server(("127.0.0.1", 0)) as other:

            def answer() -> None:
                with other.accept()[0] as accepted, contextlib.suppress(OSError):  # the other side may have left
                    accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)

            thread = threading.Thread(target=answer)
            thread.start()
            assert ask(other.getsockname()[1]) == want, "somebody speaks another language"
            thread.join()
        assert decode.internal_state().transfer.failed == 3


def post(engine: Engine, path: str, body: dict[str, Any]) -> httpx.Response:
    """The reply to a request over HTTP, as the engine's server would give it."""
    running = engine._running
    app = create_app(running.tokenizer_manager, running.args, running.files.served(running.ready))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
            return await client.post(path, json=body, headers={"X-Request-Id": "of both"})

    return engine._calls.result(send())


TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ALONE = {"do_remote_prefill": False}
SENTENCE = "The quick brown fox jumps over the lazy dog, and then " * 3
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SENTENCE}], "max_tokens": 12, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": SENTENCE, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def handed_on(pair: Pair, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body for decode, once prefill has been asked: as vLLM's proxies do it."""
    first = body | {"kv_transfer_params": TO_PREFILL, "stream": False, "max_tokens": 1}
    for name in ("stream_options", "min_tokens"):
        first.pop(name, None)
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    reply = post(pair.prefill, path, first)
    assert reply.status_code == 200, reply.text
    return body | {"kv_transfer_params": reply.json()["kv_transfer_params"]}


def said(reply: httpx.Response) -> list[Any]:
    """What a reply says, without what is of this reply alone; of a stream the text, the finish reasons and the counts."""
    assert reply.status_code == 200, reply.text
    lines = reply.text.removesuffix("data: [DONE]\n\n").split("data: ")
    parts = [json.loads(line) for line in lines if line.strip()]
    if len(parts) == 1:
        return [parts[0]["choices"], parts[0]["usage"]["completion_tokens"]]
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return ["".join(texts), ends, [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]]


@pytest.mark.parametrize(
    ("path", "body", "computed_here"),
    [
        ("/v1/completions", TEXT, False),
        ("/v1/completions", TEXT | {"logprobs": 2, "echo": True}, False),
        ("/v1/completions", TEXT | {"prompt": [SENTENCE, "Once"], "n": 2, "temperature": 0.9, "seed": 5}, False),
        ("/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True}}, False),
        ("/v1/completions", TEXT | {"min_tokens": 4, "temperature": 0.9, "seed": 5}, True),
        ("/v1/chat/completions", CHAT, False),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 12, "stream": True}, False),
        ("/v1/chat/completions", CHAT | {"temperature": 0.9, "seed": 5, "logprobs": True, "top_logprobs": 2}, False),
        ("/v1/chat/completions", CHAT | {"stop": ["e", "a"], "temperature": 0.9, "seed": 5, "n": 2}, False),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            False,
        ),
    ],
)
def test_a_proxy_of_vllm_asks_one_after_the_other(pair: Pair, path: str, body: dict[str, Any], computed_here: bool):
    """The answer is that of the decode side alone. No token of a prompt is computed there but those of the last page, if the first token is of no
    use."""
    want = said(post(pair.decode, path, body | {"kv_transfer_params": ALONE}))
    second = handed_on(pair, path, body)
    pair.decode.flush_cache()
    before = pair.decode.internal_state()
    assert said(post(pair.decode, path, second)) == want
    after = pair.decode.internal_state()
    assert after.transfer.rooms > before.transfer.rooms
    assert after.transfer.failed == before.transfer.failed
    assert (after.computed_prefill_tokens > before.computed_prefill_tokens) == computed_here
    assert after.computed_prefill_tokens - before.computed_prefill_tokens <= 16


def test_what_a_prefill_server_says_is_good_for_a_native_call_too(pair: Pair, alone: Engine):
    call: dict[str, Any] = {"input_ids": PROMPTS[3], "sampling_params": SEEDED | {"n": 2}}
    first = call | {
        "sampling_params": call["sampling_params"] | {"max_new_tokens": 1},
        "kv_transfer_params": TO_PREFILL,
    }
    params = pair.prefill.generate(**first)[0]["kv_transfer_params"]
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", pair.port)
    over_http = post(pair.prefill, "/generate", first).json()[0]["kv_transfer_params"]
    before = pair.decode.internal_state().transfer.rooms
    for where in (params, over_http):
        got = pair.decode.generate(**call, kv_transfer_params=where)
        assert [answer_of(one) for one in got] == [answer_of(one) for one in alone.generate(**call)]
    assert pair.decode.internal_state().transfer.rooms == before + 4


def test_of_two_answers_that_a_router_joins_one_has_the_logprobs_of_the_prompt(pair: Pair, alone: Engine):
    call = {"input_ids": PROMPTS[3], "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
    want = json.loads(json.dumps(alone.generate(**call)["meta_info"]["input_token_logprobs"]))
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": next(rooms)}
    sent = pair.threads.submit(post, pair.prefill, "/generate", call | room)
    replies = [post(pair.decode, "/generate", call | room), sent.result()]
    assert [reply.json()["meta_info"]["input_token_logprobs"] for reply in replies] == [[], want]

    room["bootstrap_port"] = free_port()  # the decode server computes the prompt
    assert post(pair.decode, "/generate", call | room).json()["meta_info"]["input_token_logprobs"] == []
    [in_list] = post(pair.decode, "/generate", call | room | {"input_ids": [PROMPTS[3]]}).json()
    assert in_list["meta_info"]["input_token_logprobs"] == want, "routers join no lists of answers"


def test_pages_that_were_let_go_are_computed_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Of a room that prefill knows no more, and of one that it has never known."""
    want = said(post(pair.decode, "/v1/completions", TEXT | {"kv_transfer_params": ALONE}))
    second = handed_on(pair, "/v1/completions", TEXT)
    monkeypatch.setattr("headrace.scheduler.rooms.UNASKED_S", 0.0)
    monkeypatch.setattr("headrace.scheduler.rooms.PAST_S", 0.0)
    while pair.prefill.internal_state().pool.leased_tokens:
        pass
    for number in (second["kv_transfer_params"]["remote_request_id"], "123"):
        pair.decode.flush_cache()
        second["kv_transfer_params"]["remote_request_id"] = number
        assert said(post(pair.decode, "/v1/completions", second)) == want


def test_params_that_cannot_be_honoured_are_refused_by_name(pair: Pair, alone: Engine):
    for engine, params in (
        (pair.decode, TO_PREFILL),
        (pair.decode, {"do_remote_prefill": True}),
        (pair.prefill, {"do_remote_prefill": True}),
        (alone, TO_PREFILL),
        (alone, {"disagg_spec": {}, "a": 1}),
    ):
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/generate", {"text": "a"})):
            reply = post(engine, path, body | {"kv_transfer_params": params})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kv_transfer_params"), reply.text
    assert post(alone, "/v1/completions", TEXT | {"kv_transfer_params": None}).status_code == 200


def test_a_checksum_knows_bits_and_order():
    data = bytes(range(251)) * 50
    swapped = data[4096:8192] + data[:4096] + data[8192:]
    changed = [data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in (0, 4095, 5000, len(data) - 1)]
    assert len({wire.checksum(memoryview(one)) for one in (data, swapped, data[:-1], *changed)}) == 7


@pytest.mark.parametrize(
    ("what", "words"),
    [("secret", "its secret is another one"), ("layout", "kv: bfloat16 .* float32 goes on"), ("weights", "weights: ")],
)
def test_a_server_that_cannot_be_used_is_refused_in_words(
    pair: Pair, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
):
    options = {"kv_cache_dtype": "float32"} if what == "layout" else {}
    model = Path(tiny_model)
    if what == "weights":
        model = shutil.copytree(tiny_model, tmp_path / "other")
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 1
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    if what == "secret":
        monkeypatch.setenv(SECRET_VARIABLE, "another secret of this test")
    with running_engine(str(model), disaggregation_mode="decode", **options) as decode:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": 1}
        with pytest.raises(RequestError, match=words):
            decode.generate(input_ids=PROMPTS[3], sampling_params=SEEDED, **room)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disaggregation_transfer_backend": "nixl"}, "nixl is not there yet"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"kv_on_update": "keep"}, "--kv-on-update"),
    ],
)
def test_options_that_do_not_go_together(tiny_model: str, options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Engine(model_path=tiny_model, disaggregation_mode="decode", **options)


def test_a_secret_is_needed(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="--disaggregation-mode needs a secret"):
        Engine(model_path=tiny_model, single_process=True, disaggregation_mode="prefill")
