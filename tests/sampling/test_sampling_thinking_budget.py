"""A limit of reasoning: when its end is due, and that a sampler forces it once."""

import numpy as np
import pytest
import torch
from test_sampler import VOCAB, one, sample, sampler, sequence

from headrace.errors import RequestError
from headrace.sampling.params import GenerationDefaults, SamplingParams, ThinkingBudget
from headrace.sampling.penalties import ThinkingLimit

END, OTHER_END, BEGIN = 50, 51, (60, 61)
OPEN = ThinkingBudget(num_tokens=2, end_id=END, end_ids=(END, OTHER_END), begins=(BEGIN,), is_open=True)
CLOSED = ThinkingBudget(num_tokens=2, end_id=END, end_ids=(OTHER_END,), begins=(BEGIN, (62,)))


@pytest.mark.parametrize(
    ("budget", "outputs", "is_due"),
    [
        (OPEN, [], False),
        (OPEN, [1], False),
        (OPEN, [1, 2], True),
        (OPEN, [1, 2, 3], True),
        (OPEN, [1, 2, END], False),
        (OPEN, [1, 2, END, *BEGIN, 3, 4, 5], False),
        (OPEN, [1, 2, OTHER_END, 3], False),
        # One that ended by itself goes on counting when it begins again.
        (OPEN, [1, END, 7, *BEGIN], False),
        (OPEN, [1, END, 7, *BEGIN, 3], True),
        (CLOSED, [1, 2, 3, 4], False),
        (CLOSED, [*BEGIN, 1], False),
        (CLOSED, [*BEGIN, 1, 2], True),
        (CLOSED, [BEGIN[1], BEGIN[0], 1, 2], False),
        (CLOSED, [62, 1, OTHER_END, END, 2], False),
        (ThinkingBudget(num_tokens=0, end_id=END, is_open=True), [], True),
        (ThinkingBudget(num_tokens=0, end_id=END, is_open=True), [END], False),
    ],
)
def test_when_the_end_is_due(budget: ThinkingBudget, outputs: list[int], is_due: bool):
    limit = ThinkingLimit(budget)
    assert limit.is_due(np.array(outputs, np.int32)) == is_due
    limit.rewind()
    steps = [limit.is_due(np.array(outputs[:end], np.int32)) for end in range(len(outputs) + 1)]
    assert steps[-1] == is_due


def run(num_steps: int, budget: ThinkingBudget, table: torch.Tensor, **options) -> list[int]:
    made = sampler(sequence(0, thinking_budget=budget, **options))
    return [sample(made, table[step : step + 1], num_outputs=step).token_ids.item() for step in range(num_steps)]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1e9}], ids=str)
def test_a_sampler_forces_the_end_once(options: dict):
    table = torch.from_numpy(np.random.default_rng(3).standard_normal((8, VOCAB)).astype(np.float32))
    # Two tokens, the end, and the model begins again.
    for step, token_id in ((3, 60), (4, 61)):
        table[step, token_id] = 1e20
    free = run(8, ThinkingBudget(num_tokens=100, end_id=END), table, **options)
    assert END not in free
    bound = run(8, OPEN, table, **options)
    assert bound == [*free[:2], END, *free[3:]]


def test_what_is_forbidden_is_not_forced():
    logits = torch.zeros((1, VOCAB))
    logits[0, 9] = 5.0
    due = ThinkingBudget(num_tokens=0, end_id=END, is_open=True)
    assert one(logits, thinking_budget=due) == END
    assert one(logits, thinking_budget=due, bad_words=((END,),)) == 9
    assert one(logits, thinking_budget=due, allowed_token_ids=(3, 9)) == 9
    assert one(logits, thinking_budget=due, min_new_tokens=1, ends=(END,)) == 9
    assert one(logits, thinking_budget=due, logit_bias=((END, -100.0),)) == END


@pytest.mark.parametrize(
    "fields",
    [
        {"num_tokens": -1, "end_id": 1},
        {"num_tokens": 1, "end_id": VOCAB},
        {"num_tokens": 1, "end_id": 1, "end_ids": (-1,)},
        {"num_tokens": 1, "end_id": 1, "begins": ((VOCAB,),)},
        {"num_tokens": 1, "end_id": 1, "begins": ((),)},
        {"num_tokens": 1, "end_id": 1, "begins": ((1,),) * 100},
        {"num_tokens": 1, "end_id": 1, "begins": ((1,) * 100,)},
    ],
)
def test_bounds_are_checked(fields: dict):
    params = SamplingParams(thinking_budget=ThinkingBudget(**fields))
    with pytest.raises(RequestError) as caught:
        params.resolve(
            defaults=GenerationDefaults(), vocab_size=VOCAB, default_max_new_tokens=5, room_tokens=50, bad_word_ids=[],
            grammar=None, seed=0, max_n=1,
        )  # fmt: skip
    assert caught.value.param == "thinking_budget"
