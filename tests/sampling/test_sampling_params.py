"""Bounds, types and precedence of the sampling parameters."""

import math

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.sampling.params import GREEDY_BELOW, MAX_SEED, GenerationDefaults, ResolvedSamplingParams, SamplingParams

VOCAB = 100
NO_DEFAULTS = GenerationDefaults()


def resolve(params: SamplingParams, defaults=NO_DEFAULTS, **changes) -> ResolvedSamplingParams:
    arguments = {
        "vocab_size": VOCAB,
        "default_max_new_tokens": 128,
        "room_tokens": 50,
        "bad_word_ids": (),
        "grammar": None,
        "seed": 7,
        "max_n": 4,
    } | changes
    return params.resolve(defaults=defaults, **arguments)


def with_value(name: str, value: object) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 20} | {name: value}))


ACCEPTED = [
    ("temperature", [0, 0.0, 1e-7, 1.0, 2.0, 100.0, 1e30]),
    ("top_p", [1e-9, 0.5, 1.0]),
    ("top_k", [-1, 0, 1, 50, VOCAB, 2**31 - 1]),
    ("min_p", [0.0, 0.5, 1.0]),
    ("typical_p", [1e-9, 0.5, 1.0]),
    ("frequency_penalty", [-2.0, 0.0, 2.0]),
    ("presence_penalty", [-2.0, 0.0, 2.0]),
    ("repetition_penalty", [1e-5, 1.0, 2.0]),
    ("n", [1, 4]),
    ("max_new_tokens", [0, 1, 50]),
    ("min_new_tokens", [0, 1, 20]),
    ("seed", [-1, 0, 1, MAX_SEED]),
    ("sampling_seed", [-1, 0, MAX_SEED]),
    ("stream_interval", [1, 4096]),
    ("stop", ["a", ["a"] * 32, ["x" * 4096], []]),
    ("stop_regex", ["", "a", ["a"] * 32, ["x" * 4096]]),
    ("stop_token_ids", [[], [0], [VOCAB - 1]]),
    ("allowed_token_ids", [[], [0], [VOCAB - 1]]),
    ("logit_bias", [{}, {"0": -100.0}, {str(VOCAB - 1): 100.0}]),
]

REFUSED = [
    ("temperature", [-1e-9, -1.0, math.nan, math.inf, -math.inf]),
    ("top_p", [0.0, -0.1, 1.0000001, math.nan, math.inf]),
    ("top_k", [-2, 2**31]),
    ("min_p", [-1e-9, 1.0000001, math.nan, math.inf]),
    ("typical_p", [0.0, -1.0, 1.0000001, math.nan, math.inf]),
    ("frequency_penalty", [-2.0000001, 2.0000001, math.nan, math.inf]),
    ("presence_penalty", [-2.0000001, 2.0000001, math.nan, -math.inf]),
    ("repetition_penalty", [0.0, -1.0, 1e-6, 1e-320, 2.0000001, math.nan, math.inf]),
    ("n", [0, -1, 5, 10**6]),
    ("max_new_tokens", [-1, 51, 10**9]),
    ("min_new_tokens", [-1, 21]),
    ("seed", [-2, MAX_SEED + 1]),
    ("sampling_seed", [-2, MAX_SEED + 1]),
    ("stream_interval", [0, -1, 4097]),
    ("stop", [["a", ""], ["a"] * 33, ["x" * 4097]]),
    ("stop_regex", [[""], ["a"] * 33, ["x" * 4097]]),
    ("stop_token_ids", [[-1], [VOCAB], [2 * 10**9]]),
    ("allowed_token_ids", [[-1], [VOCAB]]),
    (
        "logit_bias",
        [{str(VOCAB): 0.0}, {"-1": 0.0}, {"a": 0.0}, {"": 0.0}, {"1.5": 0.0}, {"²": 0.0}, {"1" * 5000: 0.0}],
    ),
    ("logit_bias", [{"1": 100.001}, {"1": -100.001}, {"1": math.nan}, {"1": math.inf}]),
    ("logit_bias", [{str(i).zfill(9): 0.0 for i in range(1025)}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED for value in values])
def test_values_at_and_inside_the_bounds_are_accepted(name, value):
    assert isinstance(resolve(with_value(name, value)), ResolvedSamplingParams)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values])
def test_values_outside_the_bounds_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as refusal:
        resolve(with_value(name, value))
    assert refusal.value.param == name
    assert len(refusal.value.message) < 300


WRONG_TYPES = {
    "max_new_tokens": ["1", 1.5, True, [1]],
    "min_new_tokens": ["1", 1.5, None],
    "stop": [1, [1], {}],
    "stop_token_ids": ["1", ["1"], [1.5], [True], 3],
    "temperature": ["1", True, [1]],
    "top_p": ["1", True],
    "top_k": ["1", 1.5, True],
    "min_p": ["0", True],
    "n": ["2", 2.5, True, None],
    "ignore_eos": ["true", 1, None],
    "logit_bias": [[], [[1, 2]], {"1": "2"}, {"1": None}],
    "allowed_token_ids": ["1", [1.5], [None]],
    "bad_words": ["word", [1]],
    "seed": ["1", 1.5, True],
    "unknown": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_TYPES.items() for value in values])
def test_wrong_types_are_refused_when_decoded(name, value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({name: value}), type=SamplingParams)


def test_the_request_wins_over_generation_config_and_that_over_our_default():
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    asked = SamplingParams(temperature=0.2, top_p=0.5, top_k=3, min_p=0.3, repetition_penalty=1.5)
    for params, default, want in (
        (asked, defaults, (0.2, 0.5, 3, 0.3, 1.5)),
        (SamplingParams(), defaults, (0.6, 0.9, 20, 0.1, 1.1)),
        (SamplingParams(), NO_DEFAULTS, (1.0, 1.0, -1, 0.0, 1.0)),
    ):
        got = resolve(params, default)
        assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == want


def test_a_default_outside_the_bounds_is_refused_too():
    with pytest.raises(RequestError, match="top_p"):
        resolve(SamplingParams(), GenerationDefaults(top_p=3.0))


def test_what_was_not_said_is_filled_in():
    got = resolve(SamplingParams(), seed=99)
    assert got.seed == 99
    assert got.max_new_tokens == 50  # the endpoint's 128, clipped to the room
    assert resolve(SamplingParams(), room_tokens=1000).max_new_tokens == 128
    assert resolve(SamplingParams(seed=3), seed=99).seed == 3


def test_temperatures_that_would_overflow_are_greedy():
    assert resolve(SamplingParams(temperature=GREEDY_BELOW / 2)).is_greedy
    assert not resolve(SamplingParams(temperature=GREEDY_BELOW)).is_greedy


def test_top_k_is_clipped_to_the_vocabulary_and_ids_are_deduplicated():
    got = resolve(SamplingParams(top_k=10**6, stop_token_ids=[3, 3, 1], allowed_token_ids=[5, 5]))
    assert (got.top_k, got.stop_token_ids, got.allowed_token_ids) == (VOCAB, (3, 1), (5,))


def test_min_new_tokens_is_held_against_the_clipped_maximum():
    with pytest.raises(RequestError, match="min_new_tokens"):
        resolve(SamplingParams(min_new_tokens=60))


def test_too_many_bad_words_are_refused():
    resolve(SamplingParams(), bad_word_ids=[(1,)] * 256)
    with pytest.raises(RequestError, match="bad words"):
        resolve(SamplingParams(), bad_word_ids=[(1,)] * 257)


def test_a_resolved_struct_survives_the_wire():
    got = resolve(SamplingParams(logit_bias={"3": 1.5}, stop=["a"], temperature=0.5), bad_word_ids=[[1, 2]])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=ResolvedSamplingParams) == got


def test_a_seed_has_two_names_and_minus_one_is_none():
    assert resolve(SamplingParams(sampling_seed=5)).seed == 5
    assert resolve(SamplingParams(seed=5, sampling_seed=5)).seed == 5
    assert resolve(SamplingParams(seed=-1), seed=9).seed == 9
    assert resolve(SamplingParams(seed=-1, sampling_seed=4)).seed == 4
    with pytest.raises(RequestError, match="differ"):
        resolve(SamplingParams(seed=5, sampling_seed=6))


def test_top_k_of_0_is_off():
    assert resolve(SamplingParams(top_k=0), GenerationDefaults(top_k=40)).top_k == -1
