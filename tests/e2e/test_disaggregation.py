"""Two engines, of which one computes prompts and the other goes on with them: the answers are those of one engine that does both."""

import itertools
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import FILTERED, GREEDY, PENALISED, SEEDED, Answer, answer_of, random_ids, running_engine
from safetensors.torch import load_file, save_file

from headrace import Engine
from headrace.config.machine import SECRET_VARIABLE
from headrace.disaggregation import wire
from headrace.errors import ConfigError, RequestError
from headrace.scheduler.rooms import DecodeRooms

numbers = itertools.count(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Pair:
    """A prefill and a decode engine. ask: both get the same call, as from a router; the answer is the decode side's."""

    def __init__(self, prefill: Engine, decode: Engine, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.threads = ThreadPoolExecutor(2)

    def ask(self, room: int = 0, **call: Any) -> Any:
        number = room or next(numbers) * 1000
        call |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": number}
        sent = self.threads.submit(self.prefill.generate, **call)
        answer = self.decode.generate(**call)
        sent.result()
        return answer


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """Nobody is taken for dead, and nobody gives up, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, "a secret of this test")
        patch.setattr(wire, "SILENT_S", 120.0)
        patch.setattr(DecodeRooms, "is_over", lambda rooms, one, now_s: False)
        yield


@pytest.fixture(scope="module", params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest, patient: None, tiny_model: str) -> Iterator[Pair]:
    port, backend = free_port(), request.param
    with ExitStack() as stack:
        prefill = stack.enter_context(
            running_engine(tiny_model, disaggregation_mode="prefill", disaggregation_bootstrap_port=port)
        )
        decode = stack.enter_context(
            running_engine(tiny_model, disaggregation_mode="decode", disaggregation_transfer_backend=backend)
        )
        yield Pair(prefill, decode, port)


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
    assert state.computed_prefill_tokens == 0, "no token of a prompt is computed on the decode side"


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
    room = next(numbers) * 1000
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
                with other.accept()[0] as accepted:
                    accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)

            thread = threading.Thread(target=answer)
            thread.start()
            assert ask(other.getsockname()[1]) == want, "somebody speaks another language"
            thread.join()
        assert decode.internal_state().transfer.failed == 3


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
