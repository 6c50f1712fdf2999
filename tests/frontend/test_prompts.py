"""The shape of a call: what is refused, and that every field of it reaches every sample."""

import dataclasses
import math

import pytest
from frontend_fakes import VOCAB_SIZE, request

from headrace.errors import RequestError
from headrace.frontend.prompts import CallLimits, split_call
from headrace.messages.grammar import GrammarSpec
from headrace.messages.packing import pack_float32, pack_int32
from headrace.messages.requests import GenerateReqInput, PromptContent
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES
from headrace.sampling.params import GenerationDefaults, SamplingParams, ThinkingBudget

LIMITS = CallLimits(vocab_size=VOCAB_SIZE, hidden_size=2, max_n=4, max_prompts=3, max_samples=100, context_length=64)


BAD = {
    "nothing": ({}, "exactly one"),
    "two inputs": ({"text": "a", "input_ids": [1]}, "exactly one"),
    "empty text": ({"text": ""}, "empty"),
    "empty list": ({"text": []}, "empty"),
    "empty text in a list": ({"text": ["a", ""]}, "empty"),
    "no ids": ({"input_ids": []}, "empty"),
    "no ids in a list": ({"input_ids": [[]]}, "empty"),
    "one prompt without ids": ({"input_ids": [[1], []]}, "empty"),
    "ids and lists": ({"input_ids": [1, [2]]}, "mixes"),
    "negative id": ({"input_ids": [-1]}, "-1 is not a token id"),
    "id beyond": ({"input_ids": [[1], [VOCAB_SIZE]]}, f"{VOCAB_SIZE} is not a token id"),
    "huge id": ({"input_ids": [2 * 10**9]}, "not a token id"),
    "no embeds": ({"input_embeds": []}, "empty"),
    "an empty row": ({"input_embeds": [[]]}, "empty"),
    "row too short": ({"input_embeds": [[1.0]]}, "needs 2"),
    "infinite embed": ({"input_embeds": [[1.0, math.inf]]}, "finite"),
    "embed beyond float32": ({"input_embeds": [[1.0, 1e300]]}, "finite"),
    "surrogate": ({"text": "a\ud800"}, "surrogate"),
    "surrogate in rid": ({"text": "a", "rid": "\ud800"}, "surrogate"),
    "surrogate in stop": ({"text": "a", "sampling_params": {"stop": "\ud800"}}, "surrogate"),
    "surrogate in salt": ({"text": "a", "cache_salt": "\ud800"}, "surrogate"),
    "empty rid": ({"text": ["a", "b"], "rid": ["x", ""]}, "rid"),
    "long rid": ({"text": "a", "rid": "r" * 513}, "rid is longer"),
    "too many prompts": ({"text": ["a"] * 4}, "at most 3 prompts"),
    "n 0": ({"text": "a", "sampling_params": {"n": 0}}, "n must be between 1 and 4"),
    "n too large": ({"text": "a", "sampling_params": {"n": 5}}, "n must be between 1 and 4"),
    "n a million": ({"text": "a", "sampling_params": {"n": 10**6}}, "n must be between 1 and 4"),
    "list for one prompt": ({"text": "a", "return_logprob": [True]}, "one prompt"),
    "too few rids": ({"text": ["a", "b"], "rid": ["x"]}, r"items \(1\) must equal the number of prompts \(2\)"),
    "too many params": (
        {"text": ["a"], "sampling_params": [{}, {}]},
        r"items \(2\) must equal the number of prompts \(1\)",
    ),
    "list with n": (
        {"text": ["a", "b"], "return_logprob": [True, True], "sampling_params": {"n": 2}},
        "return_logprob must be one value",
    ),
    "lists of ids with n": (
        {"text": ["a"], "return_logprob": True, "token_ids_logprob": [[1]], "sampling_params": {"n": 2}},
        "token_ids_logprob must be one list",
    ),
    "start below": ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "at least -1"),
    "top below": ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "between 0 and 256"),
    "top beyond": ({"text": "a", "return_logprob": True, "top_logprobs_num": 257}, "between 0 and 256"),
    "top without logprobs": ({"text": "a", "top_logprobs_num": 1}, "needs return_logprob"),
    "picked id beyond": ({"text": "a", "return_logprob": True, "token_ids_logprob": [999]}, "999 is not a token id"),
    "picked lists mixed": ({"text": "a", "return_logprob": True, "token_ids_logprob": [1, [2]]}, "mixes"),
    "picked lists for one": (
        {"text": "a", "return_logprob": True, "token_ids_logprob": [[1]]},
        r"lists \(1\) must equal",
    ),
    "unknown processor": ({"text": "a", "custom_logit_processor": "x"}, "does not name a processor"),
    "priority without the policy": ({"text": "a", "priority": 1}, "--schedule-policy priority"),
    "too many bad words": ({"text": "a", "sampling_params": {"bad_words": ["x"] * 129}}, "at most 128"),
    "an empty bad word": ({"text": "a", "sampling_params": {"bad_words": [""]}}, "must not be empty"),
    "long stops": (
        {"text": "a", "sampling_params": {"stop": ["x" * 1000] * 9}},
        "9000 characters together, at most 8192",
    ),
    "many stops": ({"text": "a", "sampling_params": {"stop": ["x"] * 10**5}}, "at most 32 strings in stop, got 100000"),
    "long bad words": ({"text": "a", "sampling_params": {"bad_words": ["x" * 1000] * 9}}, "bad_words have 9000"),
    "many stop ids": ({"text": "a", "sampling_params": {"stop_token_ids": [1] * 1025}}, "at most 1024 ids"),
    "many allowed ids": ({"text": "a", "sampling_params": {"allowed_token_ids": [1] * 10**5}}, "at most 257 ids"),
    "many biases": ({"text": "a", "sampling_params": {"logit_bias": {str(i): 1 for i in range(1025)}}}, "at most 1024"),
    "patterns of all prompts": (
        {"text": ["a"] * 3, "sampling_params": [{"stop_regex": [f"{i}{j}" for j in range(11)]} for i in range(3)]},
        "33 stop patterns",
    ),
    "priority beyond 32 bits": ({"text": "a", "priority": 2**70}, "priority must be between"),
    "empty bytes": ({"input_embeds": b""}, "0 bytes are not whole rows of 2"),
    "half a row": ({"input_embeds": b"abcd"}, "4 bytes are not whole rows of 2"),
    "bytes of no numbers": ({"input_embeds": pack_float32([1.0, math.nan])}, "finite"),
    "a bad pattern": ({"text": "a", "sampling_params": {"stop_regex": "("}}, "not accepted"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_shape_is_refused(case):
    fields, message = BAD[case]
    with pytest.raises(RequestError, match=message):
        split_call(request(**fields), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_embeds": pack_float32([1.0, 1.0]) * (1 << 21)},
        {"input_embeds": [pack_float32([1.0, 1.0]) * (1 << 20)] * 2},
        {"input_ids": [1] * (1 << 22)},
    ],
    ids=["embeds", "two prompts of embeds", "ids"],
)
def test_samples_together_are_bounded_in_bytes(fields):
    limits = dataclasses.replace(LIMITS, max_n=5, context_length=1 << 30)

    split_call(request(**fields, sampling_params={"n": 4}), limits)

    with pytest.raises(RequestError, match="bytes together; the limit is"):
        split_call(request(**fields, sampling_params={"n": 5}), limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"return_logprob": 1}, "return_logprob must be a boolean, got 1"),
        ({"logprob_start_len": [True]}, "logprob_start_len must be a list of integers, got True"),
        ({"sampling_params": "x"}, "sampling_params must be an object, got 'x'"),
    ],
)
def test_a_value_of_another_type_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        split_call(GenerateReqInput(text=["a"], **fields), LIMITS)


@pytest.mark.parametrize("value", [True, 1.5, "1", None])
def test_only_integers_are_token_ids(value):
    with pytest.raises(RequestError, match="token ids must be integers"):
        split_call(GenerateReqInput(input_ids=[1, value]), LIMITS)


def test_values_may_differ_by_prompt_and_spread_otherwise():
    call = split_call(
        request(["a", "b"], rid="r", return_logprob=[True, False], top_logprobs_num=[2, 0], return_hidden_states=True),
        LIMITS,
    )

    assert call.is_list
    assert [p.rid for p in call.prompts] == ["r/0", "r/1"]
    assert [p.return_logprob for p in call.prompts] == [True, False]
    assert [p.top_logprobs_num for p in call.prompts] == [2, 0]
    assert [p.return_hidden_states for p in call.prompts] == [True, True]


def test_the_answer_is_a_list_for_lists_and_for_several_samples_only():
    assert not split_call(request("a"), LIMITS).is_list
    assert not split_call(request(input_ids=[1, 2]), LIMITS).is_list
    assert split_call(request(["a"]), LIMITS).is_list
    assert split_call(request(input_ids=[[1, 2]]), LIMITS).is_list
    assert split_call(request("a", sampling_params={"n": 2}), LIMITS).is_list


def test_keys_give_namespaces_that_differ_for_every_pair():
    keys = [(None, None), ("a", None), (None, "a"), ("a", "b"), ("b", "a"), ('a", "b', ""), ("ab", None)]
    spaces = [
        split_call(request("x", extra_key=key, cache_salt=salt), LIMITS).prompts[0].namespace for key, salt in keys
    ]

    assert spaces[0] == ""
    assert len(set(spaces)) == len(spaces)
    assert split_call(request("x", extra_key="", cache_salt=""), LIMITS).prompts[0].namespace == ""


# What each field of a call becomes in what the scheduler gets: (value of the call, field of the sample, its value).
CARRIED = {
    "rid": (["x", "y"], "rid", ["x/0", "x/1", "y/0", "y/1"]),
    "stream": (True, "task.stream", [True] * 4),
    "return_logprob": (True, "task.logprobs.top_num", [0] * 4),
    "logprob_start_len": (1, "task.logprobs.prompt_start", [2] * 4),
    "normalized_logprob_start_len": (1, "task.logprobs.prompt_start", [2] * 4),
    "return_normalized_logprob": (True, "task.logprobs.prompt_start", [1, 3, 1, 3]),
    "top_logprobs_num": (3, "task.logprobs.top_num", [3] * 4),
    "token_ids_logprob": ([9, 8], "task.logprobs.token_ids", [(9, 8)] * 4),
    "return_hidden_states": ([True, False], "task.return_hidden_states", [True, True, False, False]),
    "custom_logit_processor": (["loud", None], "task.custom_logit_processor", ["loud", "loud", "", ""]),
    "priority": (5, "priority", [5] * 4),
    "extra_key": (["k", None], "namespace", ['["k", ""]', '["k", ""]', "", ""]),
    "cache_salt": ("s", "namespace", ['["", "s"]'] * 4),
    "prediction": (["ab", None], "task.predicted_ids", [b"a\0\0\0b\0\0\0"] * 2 + [b""] * 2),
}
SEEN_ELSEWHERE = {
    "return_progress",
    "return_routed_experts",
    "image_data",
    "audio_data",
    "video_data",
    "lora_path",
    "routed_dp_rank",
    "data_parallel_rank",
    "text",
    "input_ids",
    "input_embeds",
    "sampling_params",
    "return_text_in_logprobs",
    "session_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "kv_transfer_params",
}


def test_every_field_of_a_call_is_carried_or_refused():
    assert set(GenerateReqInput.__struct_fields__) == set(CARRIED) | SEEN_ELSEWHERE


@pytest.mark.parametrize("name", CARRIED)
async def test_a_field_reaches_every_sample(make_frontend, name):
    value, target, expected = CARRIED[name]
    frontend = make_frontend(
        schedule_policy="priority", custom_logit_processors="loud=some.module:function", speculative_algorithm="ngram"
    )
    more = {"return_logprob": True} if "logprob" in name else {}

    await frontend.call(["ab", "cd"], sampling_params={"n": 2}, **{**more, name: value})

    got = []
    for rid in frontend.engine.order:
        item = frontend.engine.requests[rid]
        for part in target.split("."):
            item = getattr(item, part)
        got.append(item)
    assert got == expected


SAMPLING = {
    "max_new_tokens": (7, 7),
    "min_new_tokens": (2, 2),
    "stop": (["zz"], ("zz",)),
    "stop_token_ids": ([5, 6], (5, 6)),
    "stop_regex": ("z+z", ("z+z",)),
    "temperature": (0.5, 0.5),
    "top_p": (0.5, 0.5),
    "top_k": (9, 9),
    "min_p": (0.1, 0.1),
    "typical_p": (0.2, 0.2),
    "frequency_penalty": (0.5, 0.5),
    "presence_penalty": (-0.5, -0.5),
    "repetition_penalty": (1.5, 1.5),
    "ignore_eos": (True, True),
    "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False),
    "no_stop_trim": (True, True),
    "logit_bias": ({"3": 1.5}, ((3, 1.5),)),
    "bad_words": (["no"], ((110, 111), (32, 110, 111))),
    "allowed_token_ids": ([1, 2], (1, 2)),
    "seed": (11, 11),
    "stream_interval": (4, 4),
    "thinking_budget": (ThinkingBudget(num_tokens=3, end_id=5), ThinkingBudget(num_tokens=3, end_id=5)),
}


def test_every_sampling_parameter_is_checked_here():
    assert set(SamplingParams.__struct_fields__) == set(SAMPLING) | {
        "n",
        "sampling_seed",  # in tests/sampling
        *GRAMMAR_KINDS,
        "grammar_after",  # in tests/e2e
    }


@pytest.mark.parametrize("name", SAMPLING)
async def test_a_sampling_parameter_reaches_every_sample_of_its_prompt_alone(make_frontend, name):
    value, expected = SAMPLING[name]
    frontend = make_frontend()

    await frontend.call(["ab", "cd"], rid=["x", "y"], sampling_params=[{name: value, "n": 2}, {}])

    requests = frontend.engine.requests
    first, second, other = (getattr(requests[rid].task.params, name) for rid in ("x/0", "x/1", "y"))
    assert first == expected
    assert second == (12 if name == "seed" else expected)
    assert other != expected


async def test_a_grammar_reaches_every_sample_of_its_prompt_alone(make_frontend):
    frontend = make_frontend()

    await frontend.call(["ab", "cd"], rid=["x", "y"], sampling_params=[{"json_schema": {"b": 1, "a": 2}, "n": 2}, {}])

    grammars = [frontend.engine.requests[rid].task.params.grammar for rid in ("x/0", "x/1", "y")]
    assert grammars == [GrammarSpec("json_schema", '{"b":1,"a":2}', "json_schema")] * 2 + [None]


def test_prompts_with_the_same_parameters_share_one_grammar():
    call = split_call(request(["a", "b"], sampling_params={"regex": "a+"}), LIMITS)
    first, second = (prompt.grammar for prompt in call.prompts)
    assert first == GrammarSpec("regex", "a+", "regex")
    assert first is second


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"regex": "a", "lark": 'start: "a"'}, "lark"),
        ({"json_schema": "{"}, "json_schema"),
        ({"ebnf": "a" * (MAX_GRAMMAR_BYTES + 1)}, "ebnf"),
    ],
)
def test_a_grammar_that_is_not_well_formed_is_refused_by_name(sampling, param):
    with pytest.raises(RequestError) as caught:
        split_call(request(["a", "b"], sampling_params=[{}, sampling]), LIMITS)
    assert caught.value.param == param


def test_a_server_without_grammars_refuses_them():
    limits = dataclasses.replace(LIMITS, has_grammars=False)
    with pytest.raises(RequestError, match=r"choice: .*--grammar-backend none") as caught:
        split_call(request("a", sampling_params={"choice": ["b"]}), limits)
    assert (caught.value.param, caught.value.code) == ("choice", "unsupported_parameter")
    assert split_call(request("a", sampling_params={"choice": []}), limits).prompts[0].grammar is None


@pytest.mark.parametrize("text", ["a" * MAX_GRAMMAR_BYTES, "é" * (MAX_GRAMMAR_BYTES // 2)], ids=["ASCII", "two bytes"])
def test_every_sample_counts_the_bytes_of_its_grammar(text):
    limits = dataclasses.replace(LIMITS, max_n=64)
    fits = request("a", sampling_params={"regex": text, "n": 16})
    assert split_call(fits, limits).prompts[0].grammar is not None
    with pytest.raises(RequestError, match="bytes together"):
        split_call(request("a", sampling_params={"regex": text, "n": 64}), limits)


async def test_the_user_s_value_wins_over_the_model_s_and_that_over_ours(make_frontend):
    defaults = GenerationDefaults(temperature=0.25, top_p=0.75)
    frontend = make_frontend(defaults=defaults)
    await frontend.call("a", rid="r", sampling_params={"top_p": 0.5})
    sampling = frontend.engine.requests["r"].task.params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, -1)

    plain = make_frontend(defaults=defaults, sampling_defaults="openai")
    await plain.call("a", rid="r")
    assert plain.engine.requests["r"].task.params.temperature == 1.0


async def test_token_ids_and_embeddings_are_sent_as_they_are(make_frontend):
    frontend = make_frontend()
    await frontend.call(input_ids=[[3, 4], [5]], rid=["x", "y"])
    await frontend.call(input_embeds=[[1, 2.5], [0.0, -1.0]], rid="e")
    await frontend.call(input_embeds=[pack_float32([1, 2.5, 0, -1]), [[0.5, 0.5]]], rid="b")

    requests = frontend.engine.requests
    assert requests["x"].content.ids() == [3, 4]
    assert requests["y"].content == PromptContent(pack_int32([5]))
    assert requests["e"].content.ids() == [0, 0]
    assert requests["e"].content.embeds == requests["b/0"].content.embeds == pack_float32([1, 2.5, 0, -1])
    assert requests["b/1"].content.embeds == pack_float32([0.5, 0.5])
    assert requests["b/0"].content.num_tokens == 2


async def test_prompt_logprobs_of_embeddings_are_refused(make_frontend):
    with pytest.raises(RequestError, match="embeddings"):
        await make_frontend().start(input_embeds=[[1.0, 2.0]], return_logprob=True, logprob_start_len=0)


async def test_logprobs_beyond_the_prompt_are_refused(make_frontend):
    with pytest.raises(RequestError, match=r"length of the prompt \(2\)"):
        await make_frontend().start("ab", return_logprob=True, logprob_start_len=3)


async def test_a_deadline_is_set_from_the_arrival(make_frontend):
    frontend = make_frontend(request_timeout_s=5.0, clock=lambda: 100.0)
    await frontend.call("a", rid="r")

    assert frontend.engine.requests["r"].deadline_s == 105.0
    assert frontend.engine.requests["r"].created_s == 100.0


async def test_a_prediction_is_no_reason_to_refuse_a_request(make_frontend):
    """Not read where nothing is guessed by it, and cut where it is long."""
    for algorithm, length in (("off", 0), ("ngram", 64)):
        frontend = make_frontend(speculative_algorithm=algorithm)
        await frontend.call("ab", prediction="x" * 200_000)
        [request] = frontend.engine.requests.values()
        assert len(request.task.predicted_ids) // 4 == length
