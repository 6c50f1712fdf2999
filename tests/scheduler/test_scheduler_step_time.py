"""Steps whose time is bounded: what the scheduler learns about the time of steps, and how many prompt tokens it then plans."""

import copy
import math

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.step import ModelWorkerBatch
from headrace.scheduler.step_cost import (
    LEAD,
    LEAST_FIXED,
    LEAST_SHARE,
    LEAST_TOKENS,
    LONGEST_MIXED,
    SHARED_STEP_S,
    TOKENS_PER_ROW,
    PromptBudget,
    StepCost,
    StepWork,
)

LIMIT_S = 0.25
# Seconds: of a token, a position that a token sees, a row that samples, any step. As of a model of 135 million parameters on two cores.
TYPICAL = (6e-4, 1.5e-7, 8e-4, 6e-3)
SLOW = (5e-3, 1e-6, 5e-3, 0.05)
"""As of a model of half a billion parameters on two older cores."""
COSTS = st.tuples(st.floats(1e-6, 1e-2), st.floats(0.0, 1e-6), st.floats(0.0, 1e-2), st.floats(1e-4, 0.1))


def true_seconds(costs: tuple[float, ...], work: StepWork) -> float:
    return sum(c * x for c, x in zip(costs, (*work, 1), strict=True))


def work_of(batch: ModelWorkerBatch) -> StepWork:
    starts, counts = batch.starts.astype(float), batch.counts.astype(float)
    return StepWork(batch.num_tokens, float(counts @ (starts + counts / 2)), int(batch.num_logits.sum()))


def some_steps(rng: np.random.Generator, count: int) -> list[StepWork]:
    """Steps with a chunk of a prompt and up to 32 decode rows."""
    steps = []
    for _ in range(count):
        rows, tokens, start = (int(rng.integers(low, high)) for low, high in ((0, 33), (16, 513), (0, 2000)))
        steps.append(
            StepWork(rows + tokens, 400 * rows + tokens * (start + tokens / 2), rows + int(rng.integers(0, 3)))
        )
    return steps


def test_the_time_of_a_step_like_earlier_ones_is_known_and_grows_with_its_tokens():
    errors = []
    for seed in range(100):
        cost, rng = StepCost(), np.random.default_rng(seed)
        costs = tuple(10 ** rng.uniform(low, high) for low, high in ((-6, -2), (-9, -6), (-6, -2), (-4, -1)))
        *known, new = some_steps(rng, 121)
        for work in known:
            cost.learn(work, true_seconds(costs, work))
        errors.append(abs(cost.seconds(new) / true_seconds(costs, new) - 1))
        assert cost.seconds(new._replace(tokens=new.tokens + 100)) >= cost.seconds(new)

    assert np.median(errors) < 0.05
    assert max(errors) < 0.35


def test_steps_that_other_processes_made_ten_times_longer_change_little():
    errors = []
    for seed in range(100):
        cost, rng = StepCost(), np.random.default_rng(seed)
        *known, new = some_steps(rng, 201)
        for i, work in enumerate(known):
            cost.learn(work, true_seconds(TYPICAL, work) * (10 if i % 20 == 19 else 1))
        errors.append(abs(cost.seconds(new) / true_seconds(TYPICAL, new) - 1))

    assert np.median(errors) < 0.1
    assert max(errors) < 0.35


def test_a_machine_that_stays_four_times_slower_is_believed():
    cost, rng = StepCost(), np.random.default_rng(0)
    *known, new = some_steps(rng, 301)
    for i, work in enumerate(known):
        cost.learn(work, true_seconds(TYPICAL, work) * (4 if i >= 100 else 1))

    assert cost.seconds(new) == pytest.approx(4 * true_seconds(TYPICAL, new), rel=0.1)


@given(costs=COSTS, start=st.integers(0, 100_000), count=st.integers(1, 5000))
def test_the_tokens_for_a_time_are_those_that_take_this_time(costs, start, count):
    cost = StepCost()
    cost._cost = list(costs)

    assert cost.prompt_tokens(start, cost.prompt_seconds(start, count)) == pytest.approx(count)


def test_a_machine_that_has_become_four_times_slower_is_believed_after_three_steps():
    cost, rng = StepCost(), np.random.default_rng(0)
    *known, new = some_steps(rng, 104)
    for i, work in enumerate(known):
        cost.learn(work, true_seconds(TYPICAL, work) * (4 if i >= 100 else 1))

    assert cost.seconds(new) == pytest.approx(4 * true_seconds(TYPICAL, new), rel=0.2)


def test_a_day_of_decoding_leaves_what_is_known_about_prompts():
    rig = rig_of(LIMIT_S)
    mixed_steps(rig, TYPICAL)
    add_requests(rig, 10, 300)
    rig.drain()
    add_requests(rig, 1, 20, max_new_tokens=1000, first=10)
    for _ in range(10):
        rig.turn()
    before = rig.state.cost.seconds(StepWork(500, 100_000.0, 10))
    rig.worker.seconds = lambda batch: 1.0
    rig.drain()

    assert rig.state.cost.seconds(StepWork(500, 100_000.0, 10)) == before


def test_what_seems_to_cost_nothing_is_bounded_by_tokens_only():
    assert StepCost().prompt_tokens(0, 1.0) == math.inf
    assert PromptBudget(512, StepCost(), 1.0).allows(0, 2000) == 512


def mixed_steps(rig: Rig, costs: tuple[float, ...], *, every: bool = False) -> list[tuple[int, float]]:
    """Lets the rig's worker take what `costs` say. Returns the list that gets, of each step with decode rows and prompt tokens (every: of all
    steps), both numbers: of its prompt tokens, and of its seconds."""
    seen: list[tuple[int, float]] = []

    def seconds(batch: ModelWorkerBatch) -> float:
        took = true_seconds(costs, work_of(batch))
        decode_rows = sum(batch.counts == 1)
        if every or (decode_rows and batch.num_tokens > decode_rows):
            seen.append((int(batch.num_tokens - decode_rows), took))
        return took

    rig.worker.seconds = seconds
    return seen


def rig_of(max_step_s: float, **options: object) -> Rig:
    sizes = {"num_pages": 30_000, "chunk": 512, "step_tokens": 2048, "max_running": 40}
    return Rig(**(sizes | options), max_step_s=max_step_s)


def add_requests(rig: Rig, count: int, num_tokens: int, max_new_tokens: int = 12, first: int = 0) -> None:
    for i in range(first, first + count):
        prompt = np.random.default_rng(i).integers(0, 2, num_tokens).tolist()
        rig.add(f"r{i}", prompt, max_new_tokens, ignore_eos=True, stream=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_streams_wait_for_is_planned_to_end_in_time(seed):
    rng = np.random.default_rng(seed)
    costs = tuple(rng.uniform((2e-3, 0.0, 0.0, 1e-3), (2e-2, 3e-5, 5e-3, 0.05)))
    lengths = rng.integers(17, 161, rng.integers(8, 13)).tolist()
    num_bounded = 0
    rig = rig_of(LIMIT_S, overlap=True)
    mixed_steps(rig, costs)
    for i, length in enumerate(lengths):
        add_requests(rig, 1, length, first=i)
        cost, first_step = copy.deepcopy(rig.state.cost), rig.state.next_step
        rig.turn()
        for batch in rig.state.in_flight:
            if batch.step < first_step:
                continue  # planned with what was known before
            num_decode_rows = batch.num_tokens - batch.num_prompt_tokens
            if batch.num_prompt_tokens and num_decode_rows:
                decode_s = cost.seconds(StepWork(num_decode_rows, 200.0 * num_decode_rows, num_decode_rows))
                one_more_s = cost.prompt_seconds(160, LEAST_TOKENS)
                # Prompts that end here sample a token, too.
                ends_s = (batch.work().sampled - num_decode_rows) * costs[2]
                num_bounded += 1
                assert batch.expected_s <= max(LIMIT_S, decode_s + LEAST_SHARE * LIMIT_S) + one_more_s + 2 * ends_s
    rig.drain()

    assert num_bounded > 3
    assert len(rig.finish) == len(lengths)


def test_the_bound_is_reached_soon_and_used_up():
    rig = rig_of(LIMIT_S)
    seen = mixed_steps(rig, TYPICAL)
    add_requests(rig, 40, 400)
    rig.drain()
    whole = [took for tokens, took in seen if tokens > 200]

    # The first two steps are planned before any has been timed.
    assert max(took for _, took in seen[2:]) < 1.3 * LIMIT_S
    assert len(whole) > 20
    assert np.median(whole) == pytest.approx(LIMIT_S, rel=0.05)


def chunks(rig: Rig, rid: str) -> list[int]:
    return [event.num_tokens for event in rig.rows[rid][-1].stats.events if event.kind == "chunk"]


def test_a_prompt_that_nobody_waits_for_is_cut_by_tokens_where_steps_are_short():
    rig = rig_of(1e-3, overlap=False)
    mixed_steps(rig, TYPICAL)
    add_requests(rig, 1, 2048, max_new_tokens=1)
    rig.drain()

    assert chunks(rig, "r0") == [16, 64, 256, 512, 512, 512, 176]  # a slow start: nothing was known


def test_without_a_bound_prompts_are_cut_by_tokens_alone():
    rig = rig_of(math.inf)
    mixed_steps(rig, SLOW)
    add_requests(rig, 1, 2048, max_new_tokens=1)
    rig.turn()

    assert len(rig.state.in_flight) == 1
    rig.drain()
    assert chunks(rig, "r0") == [512] * 4


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    "costs", [(5e-3, 1e-6, 5e-3, 0.05), (1e-3, 1e-6, 1e-3, 0.01), (4e-2, 2e-6, 0.04, 0.2), TYPICAL]
)
def test_what_is_in_flight_ends_within_a_second_though_no_stream_waits(costs, stages):
    rig = rig_of(LIMIT_S, num_stages=stages)
    took = mixed_steps(rig, costs, every=True)
    add_requests(rig, 1, 3000, max_new_tokens=1)
    worst = 0.0
    while rig.busy:
        rig.turn()
        planned = [true_seconds(costs, batch.work()) for batch in rig.state.in_flight]
        worst = max(worst, sum(planned) + took[-1][1])

    assert worst < 1.0 or max(tokens for tokens, _ in took) <= LEAST_TOKENS


@pytest.mark.parametrize("costs", [TYPICAL, (1e-3, 1e-6, 1e-3, 0.01), (4e-3, 1e-6, 1e-3, 0.1)])
def test_where_several_tenants_are_what_is_in_flight_is_shorter_but_hardly_slower(costs):
    """Any of them may send something small next."""

    def steps(*tenants):
        rig = rig_of(LIMIT_S, chunk=2048)
        took = mixed_steps(rig, costs, every=True)
        for number in range(60):
            prompt = np.random.default_rng(number).integers(0, 2, 100).tolist()
            rig.add(f"r{number}", prompt, 1, tenant=tenants[number % len(tenants)])
        rig.drain()
        return took[5:-1]

    alone, shared = steps("a"), steps("a", "b")
    fixed_s = costs[-1]
    assert max(seconds for _, seconds in shared) < 1.2 * max(SHARED_STEP_S, LEAST_FIXED * fixed_s)
    assert sum(seconds for _, seconds in shared) < 1.25 * sum(seconds for _, seconds in alone) + 0.3


@pytest.mark.parametrize(("decode_s", "tenants", "most"), [(0.05, "ab", 1), (0.05, "aa", 2), (0.005, "ab", 2)])
def test_a_long_step_ends_before_the_next_is_planned_where_another_tenant_may_send_something(decode_s, tenants, most):
    rig = rig_of(LIMIT_S)
    mixed_steps(rig, (1e-5, 0.0, decode_s / 2, 0.0), every=True)
    for number in range(8):
        rig.add(f"r{number}", [0, 1, number % 2], 40, tenant=tenants[number % 2])
    in_flight = []
    while rig.busy:
        rig.turn()
        in_flight.append(len(rig.state.in_flight))

    assert max(in_flight[10:]) == most - 1  # a turn ends with the oldest step


def test_the_next_step_is_planned_shortly_before_a_long_one_should_end_and_has_what_came_meanwhile():
    rig = rig_of(LIMIT_S)
    mixed_steps(rig, (1e-5, 0.0, 0.025, 0.0), every=True)
    for number in range(4):
        rig.add(f"r{number}", [0, 1, number % 2], 60, tenant="ab"[number % 2], ignore_eos=True)
    for _ in range(20):
        rig.turn()
    waited = []

    def ends_within(wait_s):
        waited.append(wait_s)
        rig.now += wait_s
        return False

    rig.worker.ends_within = ends_within
    rig.turn()
    (awaited,) = rig.state.in_flight
    rig.add("late", [0, 1, 1], 2, tenant="b", ignore_eos=True)
    rig.turn()

    assert waited == [pytest.approx(0.1 - LEAD * 0.1, rel=0.01)]
    (after,) = rig.state.in_flight
    assert (awaited.step + 1, len(awaited.rows), len(after.rows)) == (after.step, 4, 5)
    rig.drain()


def test_prompts_of_another_tenant_go_on_beside_streams_that_take_most_of_a_step():
    def num_steps(tenant):
        rig = rig_of(LIMIT_S, default_step_s=LIMIT_S)
        took = mixed_steps(rig, (2e-3, 0.0, 0.025, 0.0))
        add_requests(rig, 1, 300, max_new_tokens=1)  # what a token costs is learnt
        rig.drain()
        for number in range(6):
            rig.add(f"stream{number}", [0, 1, number % 2], 300, tenant="a", ignore_eos=True)
        for _ in range(8):
            rig.turn()
        took.clear()
        rig.add("long", [1] * 600, 1, tenant=tenant, ignore_eos=True)
        while "long" not in rig.finish:
            rig.turn()
        return len(took)

    assert num_steps("b") <= 1.2 * num_steps("a")


class Timeline:
    """Simulated time: a step takes what `costs` say, and the next one begins when it ends."""

    def __init__(self, costs: tuple[float, ...], **options: object) -> None:
        self.rig = rig_of(LIMIT_S, **options)
        self.now_s = 0.0

        def seconds(batch: ModelWorkerBatch) -> float:
            took = true_seconds(costs, work_of(batch))
            self.now_s += took
            return took

        self.rig.worker.seconds = seconds
        self.first_s: dict[str, float] = {}

    def turn(self) -> float:
        """One turn. Returns when it began: what arrives just after that is seen in the next one."""
        began_s = self.now_s
        self.rig.turn()
        for rid, ids in self.rig.ids.items():
            if ids:
                self.first_s.setdefault(rid, self.now_s)
        return began_s

    def until_first(self, rid: str) -> float:
        for _ in range(5000):
            if rid in self.first_s:
                return self.first_s[rid]
            self.turn()
        raise AssertionError(f"{rid} has no token")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [8, 150, 700])
@pytest.mark.parametrize("after", [0, 3, 20])
@pytest.mark.parametrize("costs", [SLOW, TYPICAL, (1e-2, 2e-6, 0.01, 0.1)])
def test_a_short_prompt_behind_a_long_one_has_its_first_token_soon(costs, after, num_tokens, overlap):
    alone = Timeline(costs, overlap=overlap)
    add_requests(alone.rig, 1, num_tokens, first=7)
    alone_s = alone.until_first("r7")

    time = Timeline(costs, overlap=overlap)
    add_requests(time.rig, 2, 6000, max_new_tokens=1)
    for _ in range(after):
        time.turn()
    arrived_s = time.turn()
    add_requests(time.rig, 1, num_tokens, first=7)

    assert time.until_first("r7") - arrived_s < 1.2 + 2 * alone_s
    assert "r1" not in time.first_s


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_so_it_has_beside_a_stream(num_tokens):
    def first_token(long_prompts: int) -> float:
        time = Timeline(SLOW)
        add_requests(time.rig, 1, 20, max_new_tokens=400)
        time.until_first("r0")
        for _ in range(20):
            time.turn()
        add_requests(time.rig, long_prompts, 6000, first=1)
        for _ in range(20):
            time.turn()
        arrived_s = time.turn()
        add_requests(time.rig, 1, num_tokens, first=7)
        return time.until_first("r7") - arrived_s

    assert first_token(2) < 1.2 + 2 * first_token(0)


def test_a_long_prompt_is_not_held_up_for_ever_by_those_that_are_shorter():
    alone, time = Timeline(SLOW), Timeline(SLOW, max_running=4)
    add_requests(alone.rig, 1, 2000)
    alone_s = alone.until_first("r0")
    add_requests(time.rig, 1, 100, max_new_tokens=2, first=1)
    add_requests(time.rig, 1, 2000)
    for i in range(2, 2000):
        add_requests(time.rig, 1, 100 + i % 50, max_new_tokens=2, first=i)
        time.turn()
        if "r0" in time.first_s:
            break

    # A quarter of the time for prompts is its own, and streams have a part of all time.
    assert time.first_s["r0"] < 5 * alone_s


@pytest.mark.parametrize(
    ("costs", "length", "new", "tokens", "options"),
    [
        (SLOW, 8, 1, 1, {"overlap": True}),
        (SLOW, 16, 1, 1, {"overlap": True}),
        (SLOW, 16, 1, 1, {"overlap": False}),
        ((5e-3, 0.0, 0.0, 0.05), 8, 1, 1, {"overlap": False}),
        ((5e-4, 1e-6, 1e-4, 6e-3), 100, 4, 4, {"overlap": True}),
        ((2e-2, 1e-6, 1e-3, 0.3), 24, 2, 1, {"overlap": True}),
    ],
)
def test_a_long_prompt_grows_whatever_others_come(costs, length, new, tokens, options):
    """Also where shorter ones that end in a step leave less than a few tokens of it, and late in a prompt, where a token costs more."""
    time = Timeline(costs, max_running=8, **options)
    add_requests(time.rig, 1, 6000)
    time.turn()
    req, seen, stood = time.rig.state.by_rid["r0"], 0, 0
    for turn in range(1, 400):
        if req.rid in time.first_s:
            break
        add_requests(time.rig, new, length, max_new_tokens=tokens, first=turn * new)
        time.turn()
        stood = 0 if req.num_scheduled > seen else stood + 1
        seen = req.num_scheduled
        assert stood < 8, (turn, seen)
    assert seen > 600


def test_of_those_that_wait_the_shortest_goes_before_the_rest_of_a_long_one():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    add_requests(rig, 1, 640)
    rig.turn()
    add_requests(rig, 1, 320, first=1)
    add_requests(rig, 1, 16, first=2)
    add_requests(rig, 1, 40, first=3)
    turns = first_steps(rig)

    assert turns["r2"] == 0
    assert turns["r3"] == 2
    assert turns["r1"] < turns["r0"]


def test_prompts_that_arrive_together_begin_with_the_first_and_the_shortest():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    add_requests(rig, 2, 640)
    add_requests(rig, 1, 16, first=2)
    turns = first_steps(rig)

    assert turns["r2"] == 0
    assert turns["r0"] < turns["r1"]


def test_keys_with_short_prompts_take_turns():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    rig.add("long", np.random.default_rng(0).integers(0, 2, 640).tolist(), 4, ignore_eos=True, tenant="a")
    rig.turn()
    for name, tenant, num_tokens in (("much0", "a", 6), ("much1", "a", 8), ("little", "b", 10)):
        rig.add(name, [0, 1] * (num_tokens // 2), 4, ignore_eos=True, tenant=tenant)
    turns = first_steps(rig)

    assert turns["much0"] == turns["little"] == 0
    assert turns["much1"] == 1


def test_the_step_that_ends_a_short_prompt_is_short():
    rig = rig_of(LIMIT_S, overlap=False)
    mixed_steps(rig, SLOW)
    add_requests(rig, 1, 6000)
    while rig.state.cost.most_tokens < 100:
        rig.turn()
    add_requests(rig, 1, 24, first=1)
    took = mixed_steps(rig, SLOW, every=True)
    rig.turn()

    assert rig.ids["r1"]
    assert took[-1][0] > 24
    assert took[-1][1] < 1.1 * LIMIT_S


def test_a_prompt_does_not_wait_for_a_prefix_longer_than_it_takes_to_compute_it():
    time = Timeline(SLOW)
    shared = np.random.default_rng(0).integers(0, 2, 4000).tolist()
    time.rig.add("long", shared, 1)
    time.turn()
    time.rig.add("few shared", [*shared[:100], 1 - shared[100]], 1)
    time.rig.add("all shared", [*shared[:3900], 1 - shared[3900]], 1)

    assert time.until_first("few shared") < time.until_first("long")
    assert time.until_first("all shared") >= time.first_s["long"]
    assert time.rig.rows["all shared"][-1].stats.cached_tokens == 3900


def test_texts_that_are_computed_whole_share_a_step_while_it_is_short_enough():
    rig = rig_of(LIMIT_S, whole_prompts=True, radix=False, overlap=False)
    took = mixed_steps(rig, SLOW, every=True)
    add_requests(rig, 60, 60, max_new_tokens=0)
    add_requests(rig, 1, 400, max_new_tokens=0, first=60)
    rig.drain()

    tokens = [tokens for tokens, _ in took]
    assert sum(tokens) == 60 * 60 + 400
    assert tokens.count(60 * 2) > 20
    assert all(seconds < 1.0 for count, seconds in took if count != 400)
    assert 400 in tokens


def steps_of_many_streams(costs: tuple[float, ...], **options: object) -> list[tuple[int, float]]:
    """Of 16 streams at a time, whose prompts are two and a half times as long as their answers: prompt tokens and seconds of each step."""
    rig = rig_of(LIMIT_S, max_running=16, **options)
    took = mixed_steps(rig, costs, every=True)
    add_requests(rig, 32, 150, max_new_tokens=60)
    rig.drain()
    return took[16:]  # until then it is not known how long tokens take


def test_fewer_steps_of_many_streams_have_prompts_at_the_default_bound_but_some_take_longer():
    costs = (2.5e-3, 1e-6, 1e-3, 0.08)
    default, asked = (steps_of_many_streams(costs, default_step_s=seconds) for seconds in (LIMIT_S, 0.0))
    with_prompts, with_prompts_asked = (sum(tokens > 0 for tokens, _ in steps) for steps in (default, asked))

    assert with_prompts < 0.9 * with_prompts_asked
    assert 1.1 * LIMIT_S < max(seconds for _, seconds in default) < 1.1 * LONGEST_MIXED * LIMIT_S
    assert max(seconds for _, seconds in asked) < 1.1 * LIMIT_S


@pytest.mark.parametrize("token_s, tokens", [(4e-4, 240), (8e-4, 32 * TOKENS_PER_ROW), (1.2e-3, 80)])
def test_the_default_bound_is_exceeded_only_if_prompts_then_get_enough_tokens_for_each_stream(token_s, tokens):
    cost = StepCost()
    cost._cost, cost.most_tokens = [token_s, 0.0, 0.0, 0.15 - 32 * token_s], 512
    decoding = StepWork(32, 0.0, 32)

    assert PromptBudget.beside(decoding, 512, cost, 0.25, 0.3125).allows(0, 512) == tokens


def test_the_default_bound_is_kept_where_it_is_enough_for_the_prompts_of_all_streams():
    default, asked = (steps_of_many_streams(TYPICAL, default_step_s=seconds) for seconds in (LIMIT_S, 0.0))

    assert default == asked


def test_prompts_progress_even_if_decoding_takes_longer_than_the_bound():
    rig = rig_of(1e-3)
    seen = mixed_steps(rig, (1.0, 1e-3, 1.0, 1.0))
    add_requests(rig, 6, 100)
    rig.drain()

    assert len(rig.finish) == 6
    assert {tokens for tokens, _ in seen} <= set(range(1, LEAST_TOKENS + 1))


def test_streams_do_not_wait_for_a_step_much_larger_than_any_that_was_timed():
    cost = StepCost()
    for i in range(100):  # small steps take the same time whatever their tokens: the weights must be read
        cost.learn(StepWork(1 + i % 40, 0.0, 1), 0.05)
    decoding = StepWork(3, 0.0, 3)

    assert cost.prompt_tokens(0, LIMIT_S) > 1000
    assert PromptBudget.beside(decoding, 512, cost, LIMIT_S).allows(0, 512) == 2 * 40 - 3


def test_tokens_are_the_same_whatever_the_bound():
    for max_step_s in (math.inf, 1.0, 0.05, 1e-6):
        rig = rig_of(max_step_s, num_pages=1500, max_running=8)
        mixed_steps(rig, TYPICAL)
        add_requests(rig, 12, 150)
        rig.drain()
        for i in range(12):
            prompt = np.random.default_rng(i).integers(0, 2, 150).tolist()
            assert rig.ids[f"r{i}"] == expected_outputs(prompt, 12, 9, True)
        rig.check_idle()


def first_steps(rig: Rig) -> dict[str, int]:
    """The turns until each request has its first token, once all have ended."""
    turns: dict[str, int] = {}
    for turn in range(2000):
        rig.turn()
        turns |= {rid: turn for rid in rig.ids if rig.ids[rid] and rid not in turns}
        if not rig.busy:
            return turns
    raise AssertionError("not idle")


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    add_requests(rig, 1, 640)
    rig.turn()
    add_requests(rig, 2, 16, first=1)
    turns = first_steps(rig)

    assert turns["r1"] == 0
    assert turns["r2"] == 1
    assert turns["r0"] == 18 + 1  # it gave two halves of a step away


def test_it_tells_how_far_a_prompt_of_several_steps_is():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    add_requests(rig, 1, 100)
    rig.drain()
    add_requests(rig, 1, 16, first=1)
    rig.drain()

    assert rig.back.prompts == {"r0": [0, 32, 64, 96]}


def test_long_prompts_are_computed_one_after_the_other():
    rig = rig_of(math.inf, chunk=32, overlap=False)
    add_requests(rig, 1, 320)
    rig.turn()
    add_requests(rig, 2, 320, first=1)
    turns = first_steps(rig)

    assert turns == {"r0": 8, "r1": 18, "r2": 28}


def test_a_less_important_prompt_does_not_go_before_the_rest_of_a_long_one():
    rig = rig_of(math.inf, chunk=32, overlap=False, policy="priority")
    rig.add("long", np.random.default_rng(0).integers(0, 2, 320).tolist(), 4, ignore_eos=True, priority=1)
    rig.turn()
    rig.add("short", [0, 1] * 8, 4, ignore_eos=True)
    turns = first_steps(rig)

    assert turns["long"] < turns["short"]
