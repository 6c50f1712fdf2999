"""One simulated replica: the scheduler's own planner, KV manager, prefix cache and commit, in simulated time.

Only the worker is made up: a step takes the seconds that its work costs, and every row gets the same token. As in a server, one step is planned
while another runs (overlap), and steps are planned and committed between two steps only.
"""

import math

import numpy as np

from bench.fleet.options import ReplicaOptions
from headrace.cache.base import PageAllocator
from headrace.cache.radix_cache import RadixCache
from headrace.messages.outputs import TokenIDOut
from headrace.messages.requests import TokenizedGenerateReqInput
from headrace.messages.step import Int32Array, StepResult, one_id_a_row
from headrace.scheduler import commit, planner
from headrace.scheduler.admission import NewTokenRatio
from headrace.scheduler.grammar_queue import NO_GRAMMARS, GrammarQueue
from headrace.scheduler.kv_manager import KVManager, KvPart
from headrace.scheduler.request import Req
from headrace.scheduler.state import ScheduleBatch, SchedulerConfig, SchedulerState
from headrace.scheduler.step_cost import StepWork

ANSWER_TOKEN = 7
"""What every answer is made of: the users' own text tells two sessions apart."""
_UNLIMITED = 1 << 60


class Replica:
    """See the module docstring. is_busy: a step runs. It dies by being dropped."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        pages = PageAllocator(options.kv_tokens // options.page_size, options.page_size)
        kv = KVManager([KvPart(pages, RadixCache(options.page_size))], options.max_running)
        config = SchedulerConfig(
            policy="fcfs",
            chunk_tokens=options.chunk_tokens,
            step_tokens=max(options.chunk_tokens, options.max_running * options.tokens_per_step),
            max_running=options.max_running,
            max_queued=_UNLIMITED,
            # Several tokens a row are known to the planner only once they are committed.
            max_steps_in_flight=2 if options.tokens_per_step == 1 else 1,
            eos_token_ids=frozenset(),
            vocab_size=ANSWER_TOKEN + 1,
            stream_interval=1,
            max_step_s=options.max_step_s if options.tokens_per_step == 1 else math.inf,
        )
        self.state = SchedulerState(config, kv, NewTokenRatio(1.0), GrammarQueue(NO_GRAMMARS))
        self._step_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step runs."""
        return bool(self.state.in_flight)

    def add(self, request: TokenizedGenerateReqInput, now_s: float) -> None:
        """A request arrives. It waits until the next step is planned."""
        state, config = self.state, self.state.config
        req = Req.from_input(request, now_s, state.next_order, config.eos_of(request.task), config.stream_interval)
        state.next_order += 1
        state.by_rid[req.rid] = req
        if state.rooms is None or not state.rooms.add(req, now_s):
            self._wait(req)

    def take_from_rooms(self, now_s: float) -> list[TokenIDOut]:
        """What `Scheduler` does about rooms before it plans. Returns the outputs that are due."""
        state = self.state
        outputs: list[TokenIDOut] = []
        if state.rooms is None:
            return outputs
        for req, made, why in state.rooms.take_ready(now_s, state.counters.computed_prefill_tokens):
            assert not why, why
            out = None if made is None else commit.take_prefilled(state, req, made, now_s)
            outputs += [] if out is None else [out]
            if req.finish is None:
                self._wait(req)
        return outputs

    def _wait(self, req: Req) -> None:
        self.state.fair_share.arrive(req, self.state.waiting.tenants)
        self.state.waiting.add(req)

    def plan(self, now_s: float) -> float | None:
        """Plan as many steps as may be in flight. Returns the seconds of the oldest, which begins now, or None when there is nothing to do."""
        state = self.state
        while len(state.in_flight) < state.config.max_steps_in_flight:
            batch = planner.plan(state, now_s)
            if batch is None:
                break
            state.in_flight.append(batch)
        state.moved.clear()
        state.prompts.clear()
        assert not state.ended, "a request does not fit, which the options exclude"
        if not state.in_flight:
            state.ratio.reset()
            return None
        self._step_s = self._seconds(state.in_flight[0])
        return self._step_s

    def end_step(self) -> list[TokenIDOut]:
        """The oldest step has ended. Returns the outputs that are due."""
        state = self.state
        batch = state.in_flight.popleft()
        ids, id_starts = self._ids(batch)
        result = StepResult(batch.step, ids, id_starts, forward_s=self._step_s)
        commit.count_step(state, batch, result)
        return commit.commit(state, batch, result)

    def unfinished(self) -> list[str]:
        """The requests that would be lost if it died now, in the order of their arrival."""
        return list(self.state.by_rid)

    def _seconds(self, batch: ScheduleBatch) -> float:
        """How long a step takes. With several tokens a row, a row that decodes pays for each as if it came with a step of its own."""
        cost = self._options.cost
        if self._options.tokens_per_step == 1:
            return cost.of(batch.work())
        tokens = sampled = 0
        attended, num_steps = 0.0, 1
        for req, start, count, num_logits in batch.rows:
            made = self._made(req, start, num_logits)
            computed = made if start >= req.num_prompt_tokens else count
            tokens += computed
            attended += computed * (start + 0.5 * computed)
            sampled += made
            num_steps = max(num_steps, made)
        return cost.of(StepWork(tokens, attended, sampled)) + (num_steps - 1) * cost.step_s

    def _ids(self, batch: ScheduleBatch) -> tuple[Int32Array, Int32Array]:
        """The made-up tokens, as in `StepResult`."""
        if self._options.tokens_per_step == 1:
            return one_id_a_row([ANSWER_TOKEN if num_logits else -1 for *_, num_logits in batch.rows])
        counts = [self._made(req, start, num_logits) for req, start, _, num_logits in batch.rows]
        id_starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=id_starts[1:])
        return np.full(id_starts[-1], ANSWER_TOKEN, np.int32), id_starts

    def _made(self, req: Req, start: int, num_logits: int) -> int:
        """Tokens that a row gives: the first of an answer comes alone."""
        if start < req.num_prompt_tokens:
            return num_logits
        return num_logits * min(self._options.tokens_per_step, max(1, req.num_new_tokens_left))
