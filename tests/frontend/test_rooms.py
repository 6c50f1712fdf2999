"""Which room each sample of a call has, and what is refused: as SGLang's routers fill the fields, for one prompt and for several."""

from typing import Any

import pytest

from headrace.config.web import parse_prefill_hosts
from headrace.errors import ConfigError, RequestError
from headrace.frontend.prompts import CallLimits, split_call
from headrace.frontend.rooms import HERE, check_rooms, of_sample
from headrace.messages.requests import GenerateReqInput, Room
from headrace.sampling.params import SamplingParams


def limits(mode: Any) -> CallLimits:
    return CallLimits(
        vocab_size=100,
        hidden_size=2,
        max_n=4,
        max_prompts=3,
        max_samples=100,
        context_length=64,
        disaggregation=mode,
        bootstrap_port=8998,
    )


def rooms(mode: Any, **fields: Any) -> list[Room | None]:
    call = GenerateReqInput(**{"text": "a", **fields})
    check_rooms(call, mode)
    return [prompt.room for prompt in split_call(call, limits(mode)).prompts]


def test_a_router_fills_the_fields_of_one_prompt_and_of_a_batch():
    one = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 2**63 - 1}
    assert rooms("decode", **one) == [Room("10.0.0.1", 9000, 2**63 - 1, 2**63 - 1)]
    batch = {"text": ["a", "b"], "bootstrap_host": ["p", "q"], "bootstrap_port": [None, 9001], "bootstrap_room": [7, 9]}
    assert rooms("decode", **batch) == [Room("p", 8998, 7, 7), Room("q", 9001, 9, 9)]
    assert rooms("prefill", bootstrap_room=3) == [Room("", 8998, 3, 3)]
    assert rooms("decode", **one, disagg_prefill_dp_rank=2)[0].replica == 2


def test_each_sample_of_each_prompt_has_a_room_of_its_own():
    made = rooms("decode", text=["a", "b"], sampling_params=SamplingParams(n=3), bootstrap_host="p", bootstrap_room=40)
    assert [of_sample(room, number).number for room in made for number in range(3)] == [40, 41, 42, 43, 44, 45]
    assert of_sample(made[1], 2) == Room("p", 8998, 45, 43)

    of_chat = {"sampling_params": SamplingParams(n=2), "bootstrap_host": ["p", "p"], "bootstrap_port": [None, 9001]}
    assert rooms("decode", **of_chat, bootstrap_room=[7, 3]) == [Room("p", 8998, 7, 7)], "as routers send for `n`"


def test_a_request_that_one_server_does_alone_has_no_room():
    for mode in ("null", "prefill", "decode"):
        assert rooms(mode, bootstrap_host=HERE) == [None]


@pytest.mark.parametrize("empty", [{}, {"bootstrap_host": "", "bootstrap_room": None, "bootstrap_port": []}])
def test_a_server_that_does_both_ignores_fields_that_ask_for_nothing(empty: dict[str, Any]):
    assert rooms("null", **empty) == [None]


@pytest.mark.parametrize(
    ("mode", "fields", "param", "words"),
    [
        ("null", {"bootstrap_room": 1}, "bootstrap_room", "no --disaggregation-mode"),
        ("null", {"bootstrap_host": ["h"]}, "bootstrap_host", "no --disaggregation-mode"),
        ("prefill", {}, "bootstrap_room", "missing"),
        ("decode", {"bootstrap_host": "h"}, "bootstrap_room", "missing"),
        ("decode", {"text": ["a", "b"], "bootstrap_room": [1, None]}, "bootstrap_room", "missing"),
        ("decode", {"bootstrap_room": 1}, "bootstrap_host", "missing"),
        (
            "decode",
            {"bootstrap_host": ["8.8.8.8"], "bootstrap_room": 1},
            "bootstrap_host",
            "8.8.8.8 is not among --disagg",
        ),
        (
            "decode",
            {"bootstrap_host": "169.254.169.254", "bootstrap_room": 1},
            "bootstrap_host",
            "is not among --disagg",
        ),
        (
            "decode",
            {"bootstrap_host": "::ffff:8.8.8.8", "bootstrap_room": 1},
            "bootstrap_host",
            "is not among --disagg",
        ),
        ("decode", {"bootstrap_host": "h", "bootstrap_room": -1}, "bootstrap_room", "between 0 and"),
        ("decode", {"bootstrap_host": "h", "bootstrap_room": 2**63}, "bootstrap_room", "between 0 and"),
        ("decode", {"bootstrap_host": "h", "bootstrap_room": [1, 2]}, "bootstrap_room", "2 values for 1 prompts"),
        ("decode", {"bootstrap_host": "h", "bootstrap_room": 1, "bootstrap_port": 0}, "bootstrap_port", "between 1"),
    ],
)
def test_what_is_refused_names_the_field(mode: str, fields: dict[str, Any], param: str, words: str):
    with pytest.raises(RequestError, match=words) as refused:
        rooms(mode, **fields)
    assert refused.value.param == param


def test_the_operator_names_prefill_servers():
    named = parse_prefill_hosts("Prefill.example, 8.8.8.0/24, 2001:db8::1")
    pairs = [("8.8.8.8", "8.8.8.8"), ("prefill.Example", "9.9.9.9"), ("other.example", "9.9.9.9"), ("h", "2001:db8::1")]
    assert [named.allows(*pair) for pair in pairs] == [True, True, False, True]
    assert not named.allows("127.0.0.1", "127.0.0.1"), "what is private is named, too"
    assert parse_prefill_hosts("*").allows("h", "9.9.9.9")
    assert parse_prefill_hosts(None).allows("h", "::ffff:10.1.2.3")
    for wrong in ("http://h", "10.0.0.1/8", "300.1.1.1", "h:8998"):
        with pytest.raises(ConfigError, match="--disaggregation-prefill-hosts takes names"):
            parse_prefill_hosts(wrong)
