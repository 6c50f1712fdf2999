"""What is measured at start of steps with draft tokens, with a worker whose steps take what the test says."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from headrace.errors import ExecutionError
from headrace.execution.step_times import NUM_TOKENS, measured_seconds, paced
from headrace.messages.control import ReadyInfo
from headrace.speculative.pace import SLOW, StepTimes

QUIET = {1: 0.010, 4: 0.012, 16: 0.020}


@dataclass
class Worker:
    """A step of n tokens takes seconds[n], and delays[i] more if it is step i. plans: of the steps that ran. fails: the steps fail."""

    seconds: dict[int, float] = field(default_factory=lambda: dict(QUIET))
    delays: dict[int, float] = field(default_factory=dict)
    plans: list = field(default_factory=list)
    fails: bool = False

    def submit(self, plan):
        self.plans.append(plan)

    def collect(self):
        if self.fails:
            raise ExecutionError("no memory")
        [count] = self.plans[-1].counts.tolist()
        return SimpleNamespace(forward_s=self.seconds[count] + self.delays.get(len(self.plans) - 1, 0.0))


class Cache:
    def __init__(self):
        self.values = {}
        self.num_writes = 0

    def measured(self, name):
        return self.values.get(name)

    def keep_measured(self, values):
        self.values |= values
        self.num_writes += bool(values)


def setup(num_ranks=1):
    config = SimpleNamespace(num_threads=2, kv_cache_dtype="int8", attention_backend="cpu")
    return SimpleNamespace(config=config, args=SimpleNamespace(num_ranks=num_ranks))


def ready(load_s=0.0, **limits):
    found = {"max_total_tokens": 4096, "context_length": 2048, **limits}
    return ReadyInfo(
        **found, max_running_requests=4, vocab_size=1000, hidden_size=8, page_size=16, dtype="bfloat16", kv_cache_dtype="int8", device="cpu",
        attention_backend="cpu", model_class="llama", weight_bytes=1, kv_bytes=1, load_s=load_s,
    )  # fmt: skip


def test_the_fastest_step_of_each_size_counts():
    worker = Worker(delays={0: 9.0, 1: 0.5, 6: 0.5})

    assert measured_seconds(worker, ready(), setup(), None) == QUIET
    # All tokens of a step are sampled from, and steps stay within what the scheduler will hand out.
    assert all(plan.num_logits.tolist() == plan.counts.tolist() for plan in worker.plans)
    assert max(slot for plan in worker.plans for slot in plan.out_slots.tolist()) < 4096


def test_what_was_measured_is_kept_and_gets_better_with_every_start_that_has_the_time():
    cache, busy = Cache(), Worker(delays=dict.fromkeys(range(99), 0.5))
    assert measured_seconds(busy, ready(), setup(), cache)[1] == 0.51

    short = Worker()
    assert measured_seconds(short, ready(load_s=1.0), setup(), cache)[1] == 0.51
    assert not short.plans
    long = Worker()
    assert measured_seconds(long, ready(load_s=1000.0), setup(), cache) == QUIET
    again = Worker()
    assert measured_seconds(again, ready(load_s=0.0), setup(), cache) == QUIET
    assert not again.plans
    assert cache.num_writes == 2


def test_other_threads_are_measured_anew():
    cache = Cache()
    measured_seconds(Worker(), ready(), setup(), cache)
    of_four = Worker(seconds={1: 0.006, 4: 0.008, 16: 0.012})
    with_four = setup()
    with_four.config.num_threads = 4

    assert measured_seconds(of_four, ready(), with_four, cache) == of_four.seconds


def test_ranks_run_no_steps_at_start():
    """One that is late would end the start."""
    runner, drafts, info = drafts_with(QUIET, "auto", num_ranks=2)

    assert runner.drafts is drafts
    assert drafts.times in (None, SLOW)
    assert info.speculation == "auto: it was not measured how long its steps take"


@pytest.mark.parametrize("limits", [{"max_total_tokens": 32}, {"context_length": 24}])
def test_without_room_nothing_is_measured(limits):
    worker = Worker()
    assert measured_seconds(worker, ready(**limits), setup(), None) == {}
    assert not worker.plans


def test_a_step_that_fails_is_left_to_the_first_request():
    assert measured_seconds(Worker(fails=True), ready(), setup(), None) == {}


def test_one_token_is_among_what_is_measured():
    assert min(NUM_TOKENS) == 1


@dataclass
class Runner:
    drafts: object


def drafts_with(seconds, algorithm, num_ranks=1, **more):
    """What is drafted, and what is said of it, where steps take so long."""
    drafts = SimpleNamespace(times=None)
    runner = Runner(drafts)
    where = setup(num_ranks)
    where.config.speculative_algorithm = algorithm
    where.is_cpu = True
    worker = Worker(seconds=seconds)
    submit = worker.submit

    def submit_without_drafts(plan):
        assert runner.drafts is None
        submit(plan)

    worker.submit = submit_without_drafts
    return runner, drafts, paced(runner, worker, ready(**more), where, None)


def test_drafts_follow_what_was_measured():
    runner, drafts, info = drafts_with(QUIET, "auto")

    assert runner.drafts is drafts
    assert drafts.times == StepTimes.measured(QUIET)
    assert info.speculative_algorithm == "auto"
    assert info.speculation == "auto: a step of 4 tokens takes 1.20, of 16 tokens 2.00 times as long as one of 1 token"


def test_auto_drafts_nothing_where_it_would_not_pay_and_others_do_as_asked():
    slow = {1: 0.010, 4: 0.040, 16: 0.160}
    runner, _, info = drafts_with(slow, "auto")
    assert runner.drafts is None
    assert info.speculative_algorithm == "off"
    assert info.speculation.startswith("off: a step of 4 tokens takes 4.00, of 16 tokens 16.00 times as long")

    runner, drafts, info = drafts_with(slow, "ngram")
    assert runner.drafts is drafts
    assert info.speculative_algorithm == "ngram"


def test_what_was_not_measured_is_drafted_as_usual():
    runner, drafts, info = drafts_with(QUIET, "auto", max_total_tokens=16)

    assert runner.drafts is drafts
    assert drafts.times in (None, SLOW)
    assert info.speculation == "auto: it was not measured how long its steps take"


def test_why_nothing_is_drafted_is_said():
    where = setup()
    where.config.speculative_algorithm = "off"
    info = msgspec.structs.replace(ready(), decisions=("dtype a: b", "speculative_algorithm off: there is a reason"))

    assert paced(Runner(None), Worker(), info, where, None).speculation == "off: there is a reason"
    assert paced(Runner(None), Worker(), ready(), where, None).speculation == "off"
