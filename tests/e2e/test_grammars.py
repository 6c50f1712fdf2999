"""Outputs that must match a grammar: they do, they are the same however they are computed, and nobody beside them notices."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest
from engines import running_engine

from headrace.api.engine import Engine
from headrace.errors import HeadraceError, RequestError
from headrace.grammar import compiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None, 3]},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PAIR = {
    "type": "array",
    "items": {"type": "boolean"},
    "minItems": 2,
    "maxItems": 2,
}
GBNF = 'root ::= "<" digit digit? ">"\ndigit ::= [0-9]'
LARK = 'start: "(" WORD ("," WORD)~0..2 ")"\nWORD: /[a-f]{1,4}/'

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.5, "seed": 5},
    "penalised": {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.95},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "person": {"json_schema": json.dumps(PERSON)},
    "pair": {"json_schema": PAIR},
    "regex": {"regex": r"[a-c]{2,5}-\d{3}"},
    "choice": {"choice": ["yes", "no", "yes and no"]},
    "gbnf": {"ebnf": GBNF},
    "lark": {"lark": LARK},
}
PROMPT = "Tell me something about"
MOST_TOKENS = 200


def check(name: str, text: str) -> None:
    """Whether the output matches its grammar, by somebody else's judgement."""
    match name:
        case "person":
            jsonschema_rs.validate(PERSON, json.loads(text))
        case "pair":
            jsonschema_rs.validate(PAIR, json.loads(text))
        case "regex":
            assert re.fullmatch(r"[a-c]{2,5}-\d{3}", text, re.ASCII), text
        case "choice":
            assert text in ("yes", "no", "yes and no")
        case "gbnf":
            assert re.fullmatch(r"<[0-9][0-9]?>", text), text
        case "lark":
            assert re.fullmatch(r"\([a-f]{1,4}(,[a-f]{1,4}){0,2}\)", text), text


def params_of(grammar: str, sampling: str, **others: Any) -> dict[str, Any]:
    return {"max_new_tokens": MOST_TOKENS, **SAMPLINGS[sampling], **GRAMMARS[grammar], **others}


CASES = list(itertools.product(GRAMMARS, SAMPLINGS))
PLAIN = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with running_engine(tiny_model, max_total_tokens=16384) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[tuple[str, str], dict[str, Any]]:
    """The answer to each case when nobody else is there."""
    return {case: engine.generate(PROMPT, params_of(*case)) for case in CASES}


def ids_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_output_matches_its_grammar_and_ends_by_itself(alone, case):
    answer = alone[case]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    check(case[0], answer["text"])


def test_a_batch_gives_the_same_outputs_and_plain_requests_in_it_do_not_notice(engine, alone):
    plain_alone = engine.generate(PROMPT, PLAIN)["output_ids"]
    params = [part for case in CASES for part in (params_of(*case), PLAIN)]
    answers = engine.generate([PROMPT] * len(params), params)
    assert ids_of(answers[::2]) == [alone[case]["output_ids"] for case in CASES]
    assert all(ids == plain_alone for ids in ids_of(answers[1::2]))


def test_cold_and_warm_caches_give_the_same(engine, alone):
    assert engine.flush_cache()
    for _ in range(2):
        answers = engine.generate([PROMPT] * len(CASES), [params_of(*case) for case in CASES])
        assert ids_of(answers) == [alone[case]["output_ids"] for case in CASES]


def test_several_samples_of_a_prompt_each_match(engine):
    answers = engine.generate(PROMPT, params_of("person", "seeded", n=4))
    assert len({answer["text"] for answer in answers}) > 1
    for answer in answers:
        check("person", answer["text"])
    again = engine.generate(PROMPT, params_of("person", "seeded", n=4))
    assert ids_of(again) == ids_of(answers)


def test_retracted_requests_give_the_same(tiny_model, engine):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 25, "maxItems": 25}
    params = [{"json_schema": schema, "max_new_tokens": 200, "temperature": 1.0, "seed": seed} for seed in range(8)]
    want = ids_of(engine.generate([PROMPT] * 8, params))
    with running_engine(tiny_model, max_total_tokens=256, schedule_conservativeness=0.1) as tight:
        answers = tight.generate([PROMPT] * 8, params)
        assert tight.internal_state().num_retracted > 0
    assert ids_of(answers) == want


def test_a_death_in_the_middle_changes_nothing(engine, alone):
    """The scheduler begins again and gets every sample with what it had."""

    async def die() -> None:
        engine._manager.link.detokenizer_down()
        engine._manager.link.detokenizer_up()

    got: dict[int, dict[str, Any]] = {}
    replayed = engine._manager.link.num_replayed
    stream = engine.generate([PROMPT] * len(CASES), [params_of(*case) for case in CASES], stream=True)
    for number, answer in enumerate(stream):
        got[answer["index"]] = answer
        if number == len(CASES):
            asyncio.run_coroutine_threadsafe(die(), engine._loop).result()
    assert engine._manager.link.num_replayed > replayed
    assert [got[i]["output_ids"] for i in range(len(CASES))] == [alone[case]["output_ids"] for case in CASES]


def test_one_step_at_a_time_gives_the_same(tiny_model, alone):
    with running_engine(tiny_model, disable_overlap_schedule=True, chunked_prefill_size=3) as simple:
        answers = simple.generate([PROMPT] * len(CASES), [params_of(*case) for case in CASES])
    assert ids_of(answers) == [alone[case]["output_ids"] for case in CASES]


def test_torch_masks_like_the_native_kernels(tiny_model):
    """Logits differ in their last bits, so the outputs may; that they match may not."""
    with running_engine(tiny_model, disable_native_kernels=True) as torch_engine:
        for case in CASES[:6]:
            check(case[0], torch_engine.generate(PROMPT, params_of(*case))["text"])


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_new_tokens": 150}], ids=str)
def test_a_complete_output_ends_whatever_else_was_asked(engine, sampling):
    answer = engine.generate(PROMPT, params_of("regex", "seeded", **sampling))
    check("regex", answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_an_output_that_could_end_goes_on_to_the_minimum(engine):
    free = {"regex": "a*", "temperature": 1.0, "max_new_tokens": 30}
    answer = engine.generate(PROMPT, free | {"min_new_tokens": 12})
    assert re.fullmatch("a*", answer["text"])
    assert answer["meta_info"]["completion_tokens"] >= 12
    whole = engine.generate(PROMPT, free | {"ignore_eos": True})
    assert whole["meta_info"]["completion_tokens"] == 30


def test_stop_strings_still_stop(engine):
    answer = engine.generate(PROMPT, params_of("regex", "greedy", stop="-"))
    assert re.fullmatch("[a-c]{2,5}", answer["text"])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "-"}


def test_a_limit_cuts_the_output(engine):
    answer = engine.generate(PROMPT, params_of("person", "greedy", max_new_tokens=4))
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert answer["meta_info"]["completion_tokens"] == 4


def test_logprobs_are_those_of_the_unconstrained_model(engine):
    answer = engine.generate(PROMPT, params_of("choice", "greedy"), return_logprob=True, top_logprobs_num=1)
    values = [item[0] for item in answer["meta_info"]["output_token_logprobs"]]
    tops = [row[0][0] for row in answer["meta_info"]["output_top_logprobs"]]
    assert all(value <= top for value, top in zip(values, tops, strict=True))
    assert any(value < top for value, top in zip(values, tops, strict=True)), "a random model does not want to say yes"


def test_a_grammar_may_begin_after_a_token(engine, tokenizer):
    end = "<|im_start|>"  # any special token may end the thoughts
    bias = {str(tokenizer.special_tokens[end]): 8.0}
    params = params_of("pair", "seeded", grammar_after=end, logit_bias=bias, skip_special_tokens=False)
    thoughts, _, rest = engine.generate(PROMPT, params)["text"].partition(end)
    assert len(thoughts) > 0
    check("pair", rest.removesuffix("<|im_end|>"))
    for wrong, message in ((" several tokens", "one token"), ("\ud800", "Unicode")):
        with pytest.raises(RequestError, match=message):
            engine.generate(PROMPT, params_of("pair", "greedy", grammar_after=wrong))
    with pytest.raises(RequestError, match="needs a grammar"):
        engine.generate(PROMPT, {"grammar_after": end})


def test_embeddings_may_be_a_prompt(engine):
    answer = engine.generate(input_embeds=[[0.1] * 64] * 3, sampling_params=params_of("choice", "greedy"))
    check("choice", answer["text"])


def test_a_session_goes_on_with_another_grammar(engine):
    session = engine.open_session(1000)
    params = {"session_params": {"id": session}}
    first = engine.generate(PROMPT, params_of("regex", "seeded"), **params)
    second = engine.generate(" and", params_of("choice", "seeded"), **params)
    check("regex", first["text"])
    check("choice", second["text"])
    engine.close_session(session)


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": {"type": "strin"}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"ebnf": "root ::= missing"},
        {"lark": 'start: "a'},
    ],
    ids=str,
)
def test_a_grammar_that_is_refused_is_named_and_ends_only_its_request(engine, params):
    async def both() -> list[Any]:
        good = engine.async_generate(PROMPT, params_of("pair", "greedy"))
        bad = engine.async_generate(PROMPT, {"max_new_tokens": 5, **params})
        return await asyncio.gather(good, bad, return_exceptions=True)

    good, bad = asyncio.run(both())
    check("pair", good["text"])
    assert isinstance(bad, RequestError), bad
    assert next(iter(params)) in bad.message


def test_a_schema_that_is_refused_names_the_keyword_and_its_place(engine):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(RequestError, match=r"uniqueItems.*#/properties/tags") as refusal:
        engine.generate(PROMPT, {"json_schema": schema})
    assert refusal.value.param == "json_schema"


def test_a_grammar_that_edits_leave_nothing_of_ends_with_a_message(engine):
    with pytest.raises(HeadraceError, match="leave no token"):
        engine.generate(PROMPT, params_of("choice", "greedy", allowed_token_ids=[100]))
    check("choice", engine.generate(PROMPT, params_of("choice", "greedy"))["text"])


def test_a_stream_goes_on_while_the_first_grammar_waits_for_the_tokens(tiny_model, monkeypatch):
    may_make = threading.Event()
    make = compiler.MatcherTokens
    monkeypatch.setattr(compiler, "MatcherTokens", lambda *given: may_make.wait(60) and make(*given))
    with running_engine(tiny_model) as engine, ThreadPoolExecutor(1) as thread:
        stream = engine.generate(PROMPT, PLAIN, stream=True)
        next(stream)
        bound = thread.submit(engine.generate, PROMPT, params_of("regex", "greedy"))
        *_, last = stream
        assert len(last["output_ids"]) == PLAIN["max_new_tokens"]
        assert ids_of([engine.generate(PROMPT, PLAIN)]) == [last["output_ids"]], (
            "nor does a request that comes later wait"
        )
        assert not bound.done()
        may_make.set()
        check("regex", bound.result(60)["text"])


def test_what_becomes_of_grammars_is_counted(engine):
    before = engine.internal_state().grammars
    for _ in range(2):
        engine.generate(PROMPT, {"regex": "count|counted", "max_new_tokens": 8})
        with pytest.raises(RequestError):
            engine.generate(PROMPT, {"regex": "count(", "max_new_tokens": 8})
    after = engine.internal_state().grammars
    assert after.num_compiled == before.num_compiled + 1
    assert after.num_refused == before.num_refused + 1
    assert after.num_cache_hits == before.num_cache_hits + 2
    assert after.num_killed == before.num_killed
    assert after.cached_bytes > before.cached_bytes


def test_a_timeline_says_when_the_grammar_was_compiled(engine):
    engine.generate(PROMPT, {"regex": "timeline|line", "max_new_tokens": 8}, rid="compiled")
    [timeline] = engine.explain_request("compiled")
    assert "grammar_compiled" in [event["event"] for event in timeline["events"]]
