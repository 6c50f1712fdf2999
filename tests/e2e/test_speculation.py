"""Guessed tokens change no answer, to the last bit: greedy, drawn, penalised or with logprobs, alone or together, whatever is guessed."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import FILTERED, GREEDY, PENALISED, SEEDED, Answer, Case, make_cases, one_by_one, running_engine, together
from oracle import Answers, guessing

from headrace.api.engine import Engine
from headrace.attention import select
from headrace.execution import build
from headrace.execution.graphs import GraphPool, VerifiedStep
from headrace.speculative.ngram import NgramDrafter

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice, TensorAttention

SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "filtered": FILTERED,
    "penalised": PENALISED,
    "at least": {"temperature": 0.8, "seed": 5, "min_new_tokens": 9, "max_new_tokens": 16, "stop_token_ids": [42, 7]},
    "biased": {"temperature": 0, "logit_bias": {"17": 2.0, "400": 3.0}, "max_new_tokens": 16, "ignore_eos": True},
}
CASES = make_cases(
    [1, 17, 130, 200], {name: SAMPLINGS[name] for name in ("greedy", "seeded", "filtered", "penalised")}
) + [Case(name, [5, 6, 7, 8], SAMPLINGS[name], 0) for name in ("at least", "biased")]


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> dict[str, Answer]:
    with running_engine(tiny_model, speculative_algorithm="off") as engine:
        return one_by_one(engine, CASES)


def known(plain: dict[str, Answer], cases: list[Case] = CASES) -> Answers:
    """What an oracle knows of these."""
    return Answers({(tuple(case.ids), 0, case.sampling.get("seed", 0)): plain[case.name].ids for case in cases})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 16},
        {"max_total_tokens": 448},
        {"disable_radix_cache": True, "quantization": "int8"},
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_answers_are_those_without_guesses(
    tiny_model: str, plain: dict[str, Answer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "quantization" in options:
        with running_engine(tiny_model, speculative_algorithm="off", **options) as engine:
            plain = one_by_one(engine, CASES)
    answers = known(plain)
    with guessing(monkeypatch, tiny_model, answers, **options) as engine:
        alone = one_by_one(engine, CASES)
        guessed_alone = answers.num_guessed
        beside = together(engine, CASES)

    assert alone == plain
    assert beside == plain
    assert guessed_alone > 100
    assert answers.num_guessed > guessed_alone


def test_steps_that_a_device_queues_give_the_same_answers(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of the tests, without graphs: steps without guesses are queued, and those that have some wait for the device."""
    cases = [case for case in CASES if len(case.ids) < 200]
    with running_engine(tiny_model, attention_backend="torch_native", speculative_algorithm="off") as engine:
        plain = one_by_one(engine, cases)
    device = FakeDevice()
    monkeypatch.setattr(build, "CudaDevice", lambda where: device)
    monkeypatch.setattr(build.Setup, "is_cpu", False)
    for options in ({}, {"max_total_tokens": 448}, {"disable_overlap_schedule": True}):
        answers = known(plain, cases)
        with guessing(monkeypatch, tiny_model, answers, attention_backend="torch_native", **options) as engine:
            assert one_by_one(engine, cases) == plain
            assert together(engine, cases) == plain
        assert answers.num_guessed > 200
    assert device.num_waits > 10


def test_no_index_is_kept_of_a_request_that_has_ended(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters: list[NgramDrafter] = []
    init = NgramDrafter.__init__

    def noted(self: NgramDrafter, *arguments: Any) -> None:
        init(self, *arguments)
        drafters.append(self)

    monkeypatch.setattr(NgramDrafter, "__init__", noted)
    with running_engine(tiny_model, speculative_algorithm="ngram") as engine:
        engine.generate(input_ids=[[9, index] for index in range(5)], sampling_params=GREEDY)
        engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
        [drafter] = drafters
        assert len(drafter._rows) <= 1


def numbers(value: Any) -> Iterator[float]:
    """Those in lists of lists."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from numbers(part)
    elif isinstance(value, float | int):
        yield value


def assert_same(found: dict[str, Answer], plain: dict[str, Answer]) -> None:
    """Logprobs but for rounding: attention sums in another order in a graph."""
    for name, answer in found.items():
        assert replace(answer, logprobs={}) == replace(plain[name], logprobs={})
        got, want = ([*numbers([*each.logprobs.values()])] for each in (answer, plain[name]))
        assert got == pytest.approx(want, abs=1e-4), name


def test_graphs_that_verify_guesses_give_the_same_answers(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {"attention_backend": "torch_native", "dtype": "float32"}
    with running_engine(tiny_model, **own, speculative_algorithm="off") as engine:
        plain = one_by_one(engine, CASES)
    monkeypatch.setattr(build, "CudaDevice", lambda where: FakeDevice())
    monkeypatch.setattr(build.Setup, "is_cpu", False)
    monkeypatch.setattr(build, "_graph_sizes", lambda *arguments: (1, 4, 8))
    monkeypatch.setattr(select, "make_backend", lambda *arguments, **named: TensorAttention())
    num_tokens: list[int] = []
    verify = GraphPool.verify

    def noting(graphs: GraphPool, *step: Any) -> VerifiedStep:
        num_tokens.append(len(step[-1]))
        return verify(graphs, *step)

    monkeypatch.setattr(GraphPool, "verify", noting)
    own["context_length"] = 256  # the attention of the tests reads all of it
    for options in ({}, {"max_total_tokens": 448, "disable_overlap_schedule": True}):
        answers = known(plain)
        with guessing(monkeypatch, tiny_model, answers, **own, **options) as engine:
            assert_same(together(engine, CASES), plain)
            assert_same(one_by_one(engine, CASES[::7]), plain)
        assert answers.num_guessed > 100
        assert len(num_tokens) > 5  # how many requests meet in a step depends on the machine
        assert max(num_tokens) > 16, "several sequences"
        num_tokens.clear()


REPEATING = "One two three four five six seven eight nine ten. " * 4


@pytest.fixture(scope="module")
def without_guesses() -> Iterator[Engine]:
    """smollm2."""
    with running_engine("smollm2", speculative_algorithm="off") as engine:
        yield engine


@pytest.fixture(scope="module")
def with_ngrams() -> Iterator[Engine]:
    """smollm2."""
    with running_engine("smollm2", speculative_algorithm="ngram") as engine:
        yield engine


@pytest.fixture(scope="module")
def automatic() -> Iterator[Engine]:
    """smollm2, which guesses by its own choice."""
    with running_engine("smollm2") as engine:
        yield engine


@pytest.fixture(scope="module")
def counted(without_guesses: Engine) -> tuple[str, int]:
    """What smollm2 makes of text that repeats itself, and in how many steps."""
    return text_and_steps(without_guesses)


def text_and_steps(engine: Engine, **sampling: Any) -> tuple[str, int]:
    def num_steps() -> int:
        return int(engine.get_server_info()["internal_states"][0]["num_steps"])

    before = num_steps()
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True, **sampling}
    text = engine.generate(REPEATING, params)["text"]
    return text, num_steps() - before


@pytest.mark.parametrize("guessing_engine", ["with_ngrams", "automatic"])
def test_text_that_repeats_itself_takes_fewer_steps(
    counted: tuple[str, int], guessing_engine: str, request: pytest.FixtureRequest
) -> None:
    text, steps = text_and_steps(request.getfixturevalue(guessing_engine))

    assert text == counted[0]
    assert steps < counted[1] / 2


# Of few tokens that it may say even a random model makes a text that repeats itself.
FEW_TOKENS = {"logit_bias": dict.fromkeys(("17", "30", "40", "400", "900"), 80.0)}


@pytest.fixture(scope="module")
def counted_of_few(tiny_model: str) -> tuple[str, int]:
    with running_engine(tiny_model, speculative_algorithm="off") as engine:
        return text_and_steps(engine, **FEW_TOKENS)


@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
def test_ranks_and_stages_take_fewer_steps_too(tiny_model: str, counted_of_few: tuple[str, int], size: str) -> None:
    options: dict[str, Any] = {"speculative_algorithm": "ngram", size: 2, "single_process": False}
    with running_engine(tiny_model, **options) as engine:
        text, steps = text_and_steps(engine, **FEW_TOKENS)

    assert text == counted_of_few[0]
    assert steps < counted_of_few[1]  # how many there are depends on how long steps take


def test_a_predicted_text_is_taken_as_far_as_it_is_right(with_ngrams: Engine) -> None:
    prompt, sampling = "The three primary colours are", {"temperature": 0, "max_new_tokens": 40}
    plain = with_ngrams.generate(prompt, sampling)
    right = with_ngrams.generate(prompt, sampling, prediction=plain["text"])
    wrong = with_ngrams.generate(prompt, sampling, prediction="Nothing of this will be said.")

    assert right["output_ids"] == wrong["output_ids"] == plain["output_ids"]
    counts = [answer["meta_info"]["spec_accept_token_num"] for answer in (plain, right, wrong)]
    assert counts[1] > 20
    assert counts[1] > counts[2] == counts[0]


def test_a_step_has_logits_for_drafts_and_for_all_prompts_that_end_in_it(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("add", "extend", "begin", "follow", "end", "leave")
    wrong = SimpleNamespace(**{name: lambda *arguments: None for name in names})
    wrong.propose = lambda seqs: [[7] * min(16, 64 // len(seqs) - 1) for _ in seqs]
    monkeypatch.setattr(build, "make_drafts", lambda *options, **named: wrong)
    with running_engine(tiny_model, speculative_algorithm="ngram") as engine:
        stream = engine.generate(
            input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 60, "ignore_eos": True}, stream=True
        )
        next(stream)
        outputs = engine.generate(
            input_ids=[[9, index] for index in range(60)], sampling_params={"max_new_tokens": 2, "ignore_eos": True}
        )
        assert [output["meta_info"]["completion_tokens"] for output in outputs] == [2] * 60
        *_, last = stream
    assert last["meta_info"]["completion_tokens"] == 60


SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["capital_of_the_country", "number_of_inhabitants"], "properties":
    {"capital_of_the_country": {"type": "string", "maxLength": 12}, "number_of_inhabitants": {"type": "integer", "maximum": 99999}}}"""


Outputs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def of_schema(without_guesses: Engine, automatic: Engine) -> tuple[Outputs, Outputs]:
    """What smollm2 says without and with guesses: drawn, greedy and penalised rows of one batch, beside one without a grammar; then hidden states."""
    prompts = ["France in JSON:", "Japan in JSON:", "Kenya in JSON:", "The capital of France is"]
    samplings = [
        {"temperature": 0, "json_schema": SCHEMA, "max_new_tokens": 80},
        {"temperature": 0.9, "seed": 3, "json_schema": SCHEMA, "max_new_tokens": 80},
        {"temperature": 0, "frequency_penalty": 0.4, "json_schema": SCHEMA, "max_new_tokens": 80},
        {"temperature": 0, "max_new_tokens": 24},
    ]

    def states(engine: Engine) -> dict[str, Any]:
        sampling = samplings[0] | {"max_new_tokens": 30}
        found: dict[str, Any] = engine.generate(prompts[0], sampling, return_hidden_states=True)
        return found

    plain = [*without_guesses.generate(prompts, samplings), states(without_guesses)]
    guessed = [automatic.generate(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    beside = automatic.generate(prompts, samplings)
    assert [output["text"] for output in beside] == [output["text"] for output in guessed]
    return plain, [*guessed, states(automatic)]


def test_what_a_schema_demands_is_guessed_and_the_answer_is_the_same(of_schema: tuple[Outputs, Outputs]) -> None:
    plain, guessed = of_schema
    assert [output["output_ids"] for output in guessed] == [output["output_ids"] for output in plain]
    assert "spec_verify_ct" not in plain[0]["meta_info"]
    for output in guessed[:3]:
        meta = output["meta_info"]
        assert meta["spec_accept_token_num"] >= 5
        assert meta["spec_accept_length"] > 2


def test_hidden_states_are_those_of_the_tokens(of_schema: tuple[Outputs, Outputs]) -> None:
    plain, guessed = of_schema
    assert guessed[-1]["meta_info"]["hidden_states"] == plain[-1]["meta_info"]["hidden_states"]
