"""A fleet in simulated time: sessions ask, a balancer chooses, replicas compute, some die and come back empty.

Discrete events in one heap, in order of time: a turn of a session is sent, a step ends, a replica dies, a replica is back. The balancers are
those of `--dp-size` (frontend/balancers.py), called as the engine's link calls them; what a dead replica had goes to others with the tokens that
have come of it. Not in it: the network, tokenizers, HTTP, and the processor time of scheduler and balancer. One thread; the same seed gives
the same run. Replicas that nobody has asked cost nothing.
"""

import heapq
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from bench.fleet.options import FleetOptions
from bench.fleet.outcome import Outcome, Tally
from bench.fleet.replica import ANSWER_TOKEN, Replica
from bench.fleet.workload import Session, Workload
from headrace.frontend.balancers import Method, make_balancer
from headrace.messages.outputs import TokenIDOut
from headrace.messages.requests import TokenizedGenerateReqInput

_NOWHERE = -1


@dataclass(slots=True)
class _Sample:
    """A request and what has become of it. request: as it was first sent, by which the balancer knows it."""

    request: TokenizedGenerateReqInput
    session: Session
    arrived_s: float
    replica: int = _NOWHERE
    num_sends: int = 0
    num_outputs: int = 0
    first_token_s: float | None = None
    cached_tokens: int = 0

    def next_attempt(self) -> TokenizedGenerateReqInput:
        """As it is sent to a replica now: with the tokens that an earlier one gave."""
        self.num_sends += 1
        if self.num_sends == 1:
            return self.request
        outputs = self.answer().tobytes()
        return msgspec.structs.replace(self.request, output_ids=outputs, attempt=self.num_sends - 1)

    def answer(self) -> "array[int]":
        """The tokens that have come."""
        return array("i", [ANSWER_TOKEN]) * self.num_outputs


class _Alive(list[int]):
    """The replicas that live, in order; membership is quick for any number of them."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(range(num_replicas))
        self._set = set(self)

    def __contains__(self, replica: object) -> bool:
        return replica in self._set

    def change(self, replica: int, lives: bool) -> None:
        """A replica has died or is back."""
        (self._set.add if lives else self._set.discard)(replica)
        self[:] = sorted(self._set)


class Fleet:
    """One run: `num_replicas` replicas behind one balancer. on_done: called once for each answer."""

    def __init__(
        self,
        options: FleetOptions,
        num_replicas: int,
        policy: Method,
        seed: int,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        num_requests = options.requests_of(num_replicas)
        self._workload = Workload(options.workload, num_requests, options.rate * num_replicas, seed)
        self._sessions = self._workload.sessions()
        self._balancer = make_balancer(policy, num_replicas, options.replica.kv_tokens)
        self._alive = _Alive(num_replicas)
        self._replicas: dict[int, Replica] = {}
        self._lives = [0] * num_replicas
        self._samples: dict[str, _Sample] = {}
        self._held: list[_Sample] = []
        self._tally = Tally([0.0] * num_replicas)
        self._used: set[int] = set()
        self._on_done = on_done
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._end_s = 0.0
        self._plan_deaths(num_replicas, random.Random(f"{seed} failures"))

    def run(self) -> Outcome:
        """Simulate until every request has been answered."""
        begin_s = time.perf_counter()
        self._next_session()
        num_left = self._workload.num_requests
        while len(self._tally.e2e_s) < num_left:
            now_s, _, happens = heapq.heappop(self._events)
            happens(now_s)
        for replica in self._replicas.values():
            self._tally.num_retracted += replica.state.counters.num_retracted
        return self._tally.outcome(self._end_s, len(self._used), time.perf_counter() - begin_s)

    def _at(self, at_s: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happens))

    # -- what is asked

    def _next_session(self) -> None:
        """Wait for the next session to begin: only one waits at a time."""
        begun = next(self._sessions, None)
        if begun is None:
            return
        begins_s, session = begun

        def begin(now_s: float) -> None:
            self._next_session()
            self._ask(session, now_s)

        self._at(begins_s, begin)

    def _ask(self, session: Session, now_s: float) -> None:
        """A session's next turn."""
        sample = _Sample(session.next_request(), session, now_s)
        self._samples[sample.request.rid] = sample
        self._send(sample, now_s)

    def _send(self, sample: _Sample, now_s: float) -> None:
        """Give it to the replica that the balancer chooses, or hold it until one lives."""
        if not self._alive:
            self._held.append(sample)
            return
        index = self._balancer.choose(sample.request, self._alive)
        self._balancer.sent(index, sample.request)
        sample.replica = index
        replica = self._replicas.get(index)
        if replica is None:
            replica = self._replicas[index] = Replica(self._options.replica)
            self._used.add(index)
        replica.add(sample.next_attempt(), now_s)
        if not replica.is_busy:
            self._plan(index, replica, now_s)

    # -- what is computed

    def _plan(self, index: int, replica: Replica, now_s: float) -> None:
        """Plan the next steps of a replica between whose steps we are."""
        seconds = replica.plan(now_s)
        if seconds is None:
            return
        life = self._lives[index]

        def end_step(now_s: float) -> None:
            if self._lives[index] != life:
                return
            self._tally.busy_s[index] += seconds
            self._tally.num_steps += 1
            for output in replica.end_step():
                self._take(output, now_s)
            self._plan(index, replica, now_s)

        self._at(now_s + seconds, end_step)

    def _take(self, output: TokenIDOut, now_s: float) -> None:
        """Tokens have come of a request."""
        sample, tally = self._samples[output.rid], self._tally
        sample.num_outputs = output.num_output_tokens
        if sample.first_token_s is None:
            sample.first_token_s = now_s
        if output.stats is not None:
            sample.cached_tokens = output.stats.cached_tokens
        if output.finish is None:
            return
        assert output.finish.type == "length", output.finish
        del self._samples[output.rid]
        self._balancer.left(sample.replica, sample.request)
        num_prompt_tokens = sample.request.content.num_tokens
        tally.ttft_s.append(sample.first_token_s - sample.arrived_s)
        tally.e2e_s.append(now_s - sample.arrived_s)
        tally.prompt_tokens += num_prompt_tokens
        tally.cached_tokens += min(sample.cached_tokens, num_prompt_tokens)
        tally.output_tokens += sample.num_outputs
        self._end_s = now_s
        self._on_done()
        think_s = sample.session.answered(sample.answer())
        if sample.session.turns_left:
            self._at(now_s + think_s, lambda now_s: self._ask(sample.session, now_s))

    # -- what breaks

    def _plan_deaths(self, num_replicas: int, rng: random.Random) -> None:
        lasts_s = self._workload.num_requests / self._workload.rate
        for _ in range(self._options.failures):
            at_s, index = rng.uniform(0, lasts_s), rng.randrange(num_replicas)
            self._at(at_s, lambda now_s, index=index: self._die(index, now_s))  # type: ignore[misc]

    def _die(self, index: int, now_s: float) -> None:
        """A replica dies with all that it has cached; its requests go to others."""
        if index not in self._alive:
            return
        self._alive.change(index, lives=False)
        self._lives[index] += 1
        self._balancer.forget(index)
        self._tally.num_deaths += 1
        self._at(now_s + self._options.restart_s, lambda now_s: self._return(index, now_s))
        replica = self._replicas.pop(index, None)
        if replica is None:
            return
        self._tally.num_retracted += replica.state.counters.num_retracted
        lost = [self._samples[rid] for rid in replica.unfinished()]
        self._tally.num_moved += len(lost)
        for sample in lost:
            self._balancer.left(index, sample.request)
            sample.replica = _NOWHERE
        for sample in lost:
            self._send(sample, now_s)

    def _return(self, index: int, now_s: float) -> None:
        """A replica is back."""
        self._alive.change(index, lives=True)
        held, self._held = self._held, []
        for sample in held:
            self._send(sample, now_s)
