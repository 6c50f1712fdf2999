"""Which room each sample of a call has, and what is refused: as SGLang's routers and vLLM's proxies fill the fields."""

from typing import Any

import pytest

from headrace.config.server_args import ServerArgs
from headrace.config.web import parse_prefill_hosts
from headrace.errors import ConfigError, RequestError
from headrace.frontend.prompts import CallLimits, split_call
from headrace.frontend.rooms import HERE, chosen_room, handed_on, of_sample, replica_of, rooms_of, with_rooms
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
        num_replicas=2,
        disaggregation=mode,
        bootstrap_port=8998,
    )


def rooms(mode: Any, **fields: Any) -> list[Room | None]:
    call = with_rooms(GenerateReqInput(**{"text": "a", **fields}), mode)
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


TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}


def handed(sampling: SamplingParams, host: str = "10.0.0.1", server: Any = None, **fields: Any) -> dict[str, Any]:
    """What the reply of a prefill server with two replicas gives for the decode server, and `prefill` room."""
    args = ServerArgs(model_path="m", host=host, disaggregation_mode="prefill", dp_size=2)
    asked = GenerateReqInput(text=["a", "b"], sampling_params=sampling, kv_transfer_params=TO_PREFILL, **fields)
    call = chosen_room(asked, args, server)
    translated = with_rooms(call, "prefill")
    assert isinstance(translated, GenerateReqInput)
    own = [prompt.room for prompt in split_call(translated, limits("prefill")).prompts]
    for room in own:
        assert replica_of(call, room, args) == (room.first % 2 if call.replica is None else call.replica)
    params = handed_on(call)["kv_transfer_params"]
    assert isinstance(params, dict)
    return params | {"own": own}


def test_a_proxy_takes_what_the_prefill_server_says_to_the_decode_server():
    """The first token is used if it was sampled as the decode server would, whatever the limits of its length were."""
    sampling = SamplingParams(n=2, seed=3, max_new_tokens=1)
    params = handed(sampling)
    own = params.pop("own")
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (False, True)

    def taken(sampling: SamplingParams, **fields: Any) -> list[Room | None]:
        return rooms("decode", text=["a", "b"], sampling_params=sampling, kv_transfer_params=params, **fields)

    first, second = taken(SamplingParams(n=2, seed=3, max_new_tokens=40))
    assert first == Room("10.0.0.1", 8998, own[0].number, own[0].first, -1, True, True)
    assert second.number == own[1].number == first.number + 2
    assert of_sample(first, 1).is_computed
    for other in (SamplingParams(n=2, seed=4), SamplingParams(n=2, seed=3, min_new_tokens=2)):
        assert not taken(other)[0].has_token
    assert not taken(sampling, return_logprob=True)[0].has_token
    assert taken(sampling, stream=True)[0].has_token
    asked_twice = handed(sampling)["remote_request_id"], handed(sampling)["remote_request_id"]
    assert len({params["remote_request_id"], *asked_twice}) == 3


def test_a_least_number_of_tokens_matters_only_if_one_side_had_none():
    params = handed(SamplingParams(max_new_tokens=1, min_new_tokens=9))
    made = rooms("decode", sampling_params=SamplingParams(min_new_tokens=9), kv_transfer_params=params)
    assert made[0].has_token


@pytest.mark.parametrize(
    ("host", "server", "told"),
    [
        ("10.0.0.1", ("127.0.0.1", 80), "10.0.0.1"),
        ("0.0.0.0", ("10.0.0.7", 80), "10.0.0.7"),
        ("::", ("fd00::7", 80), "fd00::7"),
        ("0.0.0.0", ("/tmp/socket", None), "127.0.0.1"),
        ("0.0.0.0", None, "127.0.0.1"),
    ],
)
def test_a_prefill_server_says_where_it_was_reached(host: str, server: Any, told: str):
    assert handed(SamplingParams(), host, server)["remote_host"] == told


def test_a_schema_is_the_same_as_an_object_and_as_text():
    params = handed(SamplingParams(json_schema={"type": "object"}))
    as_text = SamplingParams(json_schema='{"type":"object"}')
    assert rooms("decode", sampling_params=as_text, kv_transfer_params=params)[0].has_token


def test_a_named_replica_is_told():
    params = handed(SamplingParams(), routed_dp_rank=1)
    assert rooms("decode", kv_transfer_params=params)[0].replica == 1


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
@pytest.mark.parametrize("params", [{}, {"remote_host": None}, {"do_remote_decode": False, "tp_size": 2}])
def test_a_proxy_that_asks_for_nothing_is_answered_by_one_server(mode: str, params: dict[str, Any]):
    assert rooms(mode, kv_transfer_params=params) == [None]


WHERE = {"remote_host": "h", "remote_port": 1, "remote_request_id": "1"}


@pytest.mark.parametrize(
    ("mode", "params", "words"),
    [
        ("null", TO_PREFILL, "do_remote_decode: .* .no --disaggregation-mode"),
        ("null", {"do_remote_prefill": True}, "do_remote_prefill: .* .no --disaggregation-mode"),
        ("null", {"a": 1}, "neither do_remote_decode nor"),
        ("decode", TO_PREFILL, "do_remote_decode: this is a decode server"),
        ("prefill", WHERE | {"do_remote_prefill": True}, "do_remote_prefill: this is a prefill server"),
        ("decode", {"do_remote_prefill": True, "do_remote_decode": True}, "exclude each other"),
        ("decode", {"do_remote_prefill": 1}, "do_remote_prefill: expected"),
        ("decode", {"do_remote_prefill": True}, "'remote_host'"),
        ("decode", WHERE | {"do_remote_prefill": True, "remote_host": None}, "remote_host: expected"),
        ("decode", WHERE | {"do_remote_prefill": True, "remote_port": "x"}, "remote_port: expected"),
        (
            "decode",
            WHERE | {"do_remote_prefill": True, "remote_request_id": "cmpl-1"},
            "remote_request_id: this is not",
        ),
        ("prefill", TO_PREFILL, "remote_host: expected"),
    ],
)
def test_params_that_cannot_be_honoured_are_refused(mode: str, params: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words) as refused:
        rooms(mode, kv_transfer_params=params)
    assert refused.value.param == "kv_transfer_params"


def test_two_dialects_and_a_stream_that_cannot_say_where_are_refused():
    params = WHERE | {"do_remote_prefill": True}
    with pytest.raises(RequestError, match="kv_transfer_params and bootstrap_room"):
        rooms("decode", kv_transfer_params=params, bootstrap_room=1)
    with pytest.raises(RequestError, match="stream: the reply"):
        handed(SamplingParams(), stream=True)


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
    with pytest.raises(RequestError, match="other is not among"):  # without networks, no name is looked up
        rooms_of(GenerateReqInput(bootstrap_host="other", bootstrap_room=1), [1], "decode", 1, parse_prefill_hosts("p"))
    assert parse_prefill_hosts(None).allows("h", "::ffff:10.1.2.3")
    for wrong in ("http://h", "10.0.0.1/8", "300.1.1.1", "h:8998"):
        with pytest.raises(ConfigError, match="--disaggregation-prefill-hosts takes names"):
            parse_prefill_hosts(wrong)
