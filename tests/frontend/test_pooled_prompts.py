"""The shape of a call whose inputs become vectors: what is refused, and how its fields reach its inputs."""

import dataclasses
import math

import msgspec
import pytest
from frontend_fakes import VOCAB_SIZE

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import RequestError
from headrace.frontend.inputs import PromptInput
from headrace.frontend.pooled import Cut, split_pooled_call, texts_of
from headrace.frontend.prompts import CallLimits
from headrace.messages.requests import EmbeddingReqInput

LIMITS = CallLimits(vocab_size=VOCAB_SIZE, hidden_size=2, max_n=4, max_prompts=3, max_samples=3, context_length=64)
EMBEDS = PoolingConfig(task="embed", pooling="mean", dimensions=8)
SCORES = PoolingConfig(task="classify", pooling="cls", dimensions=1, labels=("LABEL_0",), is_pair=True)


def split(cuts_dimensions: bool = False, pooling: PoolingConfig = EMBEDS, **fields):
    request = msgspec.convert(fields, EmbeddingReqInput)
    return split_pooled_call(request, LIMITS, pooling, cuts_dimensions)


BAD = {
    "nothing": ({}, "exactly one", "text"),
    "two inputs": ({"text": "a", "input_ids": [1]}, "exactly one", "input_ids"),
    "empty list": ({"text": []}, "empty", "text"),
    "no ids": ({"input_ids": []}, "empty", "input_ids"),
    "no ids in a list": ({"input_ids": [[1], []]}, "empty", "input_ids"),
    "id beyond": ({"input_ids": [[VOCAB_SIZE]]}, "not a token id", "input_ids"),
    "too many": ({"text": ["a"] * 4}, "at most 3 inputs", "text"),
    "a pair of three": ({"text": [["a", "b", "c"]]}, "a pair is a list of two", "text"),
    "a pair of one": ({"text": ["a", ["b"]]}, "a pair is a list of two", "text"),
    "one text as a pair": ({"text": "a", "is_cross_encoder_request": True}, "a pair of strings", "text"),
    "ids as a pair": (
        {"input_ids": [1], "is_cross_encoder_request": True},
        "given as text",
        "is_cross_encoder_request",
    ),
    "surrogate": ({"text": "a\ud800"}, "surrogate", "text"),
    "surrogate in a document": ({"text": [["a", "\ud800"]]}, "surrogate", "text"),
    "no dimension": ({"text": "a", "dimensions": 0}, "between 1 and 8", "dimensions"),
    "many dimensions": ({"text": "a", "dimensions": 9}, "between 1 and 8", "dimensions"),
    "not Matryoshka": ({"text": "a", "dimensions": 4}, "--allow-dimensions", "dimensions"),
    "cut to nothing": ({"text": "a", "truncate_prompt_tokens": 0}, "-1 or between 1 and 64", "truncate_prompt_tokens"),
    "cut beyond": ({"text": "a", "truncate_prompt_tokens": 65}, "-1 or between", "truncate_prompt_tokens"),
    "two rids alike": ({"text": ["a", "b"], "rid": ["x", "x"]}, "twice", "rid"),
    "no such replica": ({"text": "a", "routed_dp_rank": 1}, "replicas are numbered", "routed_dp_rank"),
    "a salt for each of one": ({"text": "a", "cache_salt": ["s"]}, "there is one prompt", "cache_salt"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_refused_by_name(case):
    fields, message, param = BAD[case]
    with pytest.raises(RequestError, match=message) as caught:
        split(**fields)
    assert caught.value.param == param


def test_a_field_of_the_wrong_type_is_no_call_at_all():
    for fields in ({"text": "a", "dimensions": math.nan}, {"text": 1}, {"text": "a", "unknown": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(fields, EmbeddingReqInput)


def test_one_text_is_no_list_and_a_list_of_one_is():
    assert not split(text="a").is_list
    assert split(text=["a"]).is_list
    assert not split(input_ids=[1, 2]).is_list
    assert [prompt.given.ids for prompt in split(input_ids=[[1], [2, 3]]).prompts] == [[1], [2, 3]]


def test_an_empty_text_is_a_text():
    [prompt] = split(text="").prompts
    assert prompt.given == PromptInput(text="")


def test_pairs_and_texts_in_one_call():
    call = split(text=["a", ["q", "d"], "b"], pooling=SCORES)
    assert texts_of(call.prompts) == ["a", ("q", "d"), "b"]
    with pytest.raises(RequestError, match="makes embeddings of single texts"):
        split(text=["a", ["q", "d"], "b"])
    single = split(text=["q", "d"], is_cross_encoder_request=True, pooling=SCORES)
    assert texts_of(single.prompts) == [("q", "d")]
    assert not single.is_list
    several = split(text=[["q", "d"], ["q", "e"]], is_cross_encoder_request=True, pooling=SCORES)
    assert texts_of(several.prompts) == [("q", "d"), ("q", "e")]


def test_every_field_reaches_every_input():
    call = split(
        cuts_dimensions=True,
        text=["a", "b"],
        rid=["x", "y"],
        dimensions=4,
        truncate_prompt_tokens=7,
        truncation_side="left",
        cache_salt=["s", "t"],
        lora_path=["l", None],
    )
    first, second = call.prompts
    assert (first.rid, second.rid) == ("x", "y")
    assert first.namespace != second.namespace
    assert (first.adapter, second.adapter) == ("l", "")
    assert {prompt.dimensions for prompt in call.prompts} == {4}
    assert {prompt.cut for prompt in call.prompts} == {Cut(7, "left")}
    assert {prompt.num_samples for prompt in call.prompts} == {1}


def test_all_dimensions_ask_for_nothing():
    assert split(text="a", dimensions=8).prompts[0].dimensions == 0
    with pytest.raises(RequestError, match="this model classifies"):
        split(text="a", dimensions=1, pooling=SCORES)


def test_more_inputs_than_the_server_queues_are_refused():
    limits = dataclasses.replace(LIMITS, max_prompts=10)
    with pytest.raises(RequestError, match="queues at most 3"):
        split_pooled_call(EmbeddingReqInput(text=["a"] * 4), limits, EMBEDS, False)
