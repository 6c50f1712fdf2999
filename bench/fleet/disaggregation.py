"""Mixed servers beside as many that are prefill or decode servers, simulated: how many requests a second they answer within limits.

    python -m bench.fleet.disaggregation [--servers 4] [--itl-ms 50,25,15] [--num-requests 400] [--gb-per-s 3] [--seed 1] [--output FILE]

Replicas are those of `python -m bench.fleet`, with the scheduler's own rooms. The mixed ones bound the time of their steps by the limit of gaps, as
a user with such a limit would. KV takes time from a prompt's last chunk on, at --gb-per-s (bench/results/2026-11-28-disaggregation.json has what
was measured), and no processor time of either side. For each limit the largest rate is looked for at which 99 of 100 first tokens keep theirs, and
so do gaps, and their mean in 99 of 100 answers: one that waits for a place after its first token has one long gap among many.
"""

import heapq
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import count, product
from typing import Any, cast

import msgspec

from bench.fleet.options import ReplicaOptions, WorkloadOptions
from bench.fleet.replica import Replica
from bench.fleet.workload import Workload
from bench.program import counts, parser_of, refusals, report_of, write_report
from headrace.benchmark.figures import distribution
from headrace.disaggregation.sink import Incoming, PageSink
from headrace.disaggregation.source import Outgoing, PageSource
from headrace.frontend.balancers import make_balancer
from headrace.messages.outputs import TokenIDOut
from headrace.messages.requests import Room, TokenizedGenerateReqInput
from headrace.scheduler.retract import expected_tokens
from headrace.scheduler.rooms import DecodeRooms, PrefillRooms
from headrace.scheduler.state import SchedulerState

PAGE_BYTES = 16 * 30 * 2 * 3 * 64 * 2
"""Of SmolLM2-135M in bfloat16, whose steps `costs.DEFAULT_COSTS` are."""
_PLAIN = WorkloadOptions(groups=1, system_tokens=0, turns=1)
WORKLOADS = {
    "chats": (replace(_PLAIN, turn_tokens=220, output_tokens=200), 2.0),
    "documents": (replace(_PLAIN, turn_tokens=2000, output_tokens=100), 10.0),
    "short answers": (replace(_PLAIN, turn_tokens=2000, output_tokens=10), 10.0),
}
"""Mean lengths (nearly ShareGPT's, of summaries, of decisions) and within how many seconds the first token shall come."""
DEFAULT_BOUND_S, BOUNDS = 0.2, (0.5, 0.7, 0.9)
"""Of steps: of servers by default, and of mixed ones as parts of the limit of gaps; the best of them counts."""


class _Link:
    """`PageSource` of all prefill servers and `PageSink` of all decode servers, without bytes. arrive: called when a room's are sent."""

    progress = num_pages = num_bytes = 0

    def __init__(self, arrive: Callable[[Incoming, bytes], None]) -> None:
        self.transfer = self
        self._arrive = arrive
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}

    def adapter(self, lora_id: int) -> str:
        return ""

    def open(self, one: Outgoing) -> None:
        self._outgoing[one.room] = one

    def ask(self, one: Incoming) -> None:
        self._incoming[one.room] = one
        self.tell()

    def asked_again(self, rooms: Container[int]) -> set[int]:
        return set()

    def withdraw(self, rooms: Iterable[Incoming | Outgoing]) -> None:
        for one in rooms:
            self._incoming.pop(one.room, None)
            if (sent := self._outgoing.pop(one.room, None)) is not None:
                sent.is_over = True

    def tell(self) -> None:
        for room, one in list(self._incoming.items()):
            one.num_news += 1
            if (sent := self._outgoing.get(room)) is None:
                continue
            sent.is_asked = True
            if sent.output:
                self.withdraw([one])
                self._arrive(one, sent.output)


def _expected(state: SchedulerState) -> int:
    return sum(expected_tokens(state, req) for req in state.running)


def simulate(
    asked: WorkloadOptions, given: Any, options: ReplicaOptions, num_prefill: int, rate: float
) -> dict[str, Any]:
    """num_prefill: 0 = all are mixed. given: of the command line. Seconds; num_own: prompts that decode servers computed."""
    num_servers, workload = given.servers, Workload(asked, given.num_requests, rate, given.seed)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order, clock = count(), 0.0

    def at(at_s: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(events, (at_s, next(order), happens))

    def arrive(one: Incoming, output: bytes) -> None:
        def has_come(now_s: float) -> None:
            one.num_arrived, one.is_done = len(one.pages), True
            one.output = msgspec.msgpack.decode(output, type=TokenIDOut)
            wake(now_s)

        last_pages = min(len(one.pages), -(-options.chunk_tokens // options.page_size))
        at(clock + last_pages * PAGE_BYTES / given.gb_per_s / 1e9, has_come)

    link = _Link(arrive)
    servers = [Replica(options) for _ in range(num_servers)]
    for server in servers[:num_prefill]:
        server.state.rooms = PrefillRooms(cast("PageSource", link), server.state.kv)
    for server in servers[num_prefill:] if num_prefill else ():
        state, costs = server.state, (server.state.cost.prompt_seconds, options.cost.token_s)
        state.rooms = DecodeRooms(cast("PageSink", link), state.kv, *costs, partial(_expected, state))
    sides = [range(num_prefill), range(num_prefill, num_servers)]
    balancers = [make_balancer("shortest_queue", num_servers) for _ in sides]
    told_s: dict[str, float] = {}
    requests: dict[str, TokenizedGenerateReqInput] = {}
    first_s: dict[str, float] = {}
    ttft_s, gaps_s, each_s, ended = list[float](), list[float](), list[float](), 0

    def take(number: int, outputs: list[TokenIDOut], now_s: float) -> None:
        nonlocal ended
        side = int(number >= num_prefill)
        for out in outputs:
            if side and out.ids:
                (gaps_s if out.rid in first_s else ttft_s).append(now_s - told_s[out.rid])
                told_s[out.rid] = now_s
                first_s.setdefault(out.rid, now_s)
            if out.finish is not None:
                balancers[side].left(number, requests[out.rid])
                if side:
                    each_s.append((now_s - first_s[out.rid]) / max(1, out.num_output_tokens - 1))
                    ended += 1

    def plan(number: int, now_s: float) -> None:
        take(number, servers[number].take_from_rooms(now_s), now_s)
        if (seconds := servers[number].plan(now_s)) is not None:
            at(now_s + seconds, lambda now_s: end_step(number, now_s))

    def end_step(number: int, now_s: float) -> None:
        take(number, servers[number].end_step(), now_s)
        plan(number, now_s)
        if number < num_prefill:
            wake(now_s)

    def wake(now_s: float) -> None:
        for number, server in enumerate(servers):
            if not server.is_busy:
                plan(number, now_s)

    for number, (begins_s, session) in enumerate(workload.sessions()):

        def begin(now_s: float, number: int = number, session: Any = session) -> None:
            room = Room("", 1, number, number) if num_prefill else None
            request = session.next_request()
            task = msgspec.structs.replace(request.task, stream=True)
            request = msgspec.structs.replace(request, task=task, room=room)
            requests[request.rid], told_s[request.rid] = request, now_s
            for balancer, side in zip(balancers, sides, strict=True):
                if side:
                    chosen = balancer.choose(request, side)
                    balancer.sent(chosen, request)
                    servers[chosen].add(request, now_s)
            wake(now_s)

        at(begins_s, begin)
    while ended < workload.num_requests:
        clock, _, happens = heapq.heappop(events)
        happens(clock)
    rooms = [server.state.rooms.stats() for server in servers[num_prefill:] if server.state.rooms is not None]
    return {
        "rate": workload.rate,
        "ttft_s": asdict(distribution(ttft_s)),
        "itl_s": asdict(distribution(gaps_s)),
        "per_token_s": asdict(distribution(each_s)),
        "num_own": sum(each.failed for each in rooms),
    }


def most(at_rate: Callable[[float], dict[str, Any]], ttft_s: float, itl_s: float) -> dict[str, Any]:
    """What the largest rate gives that keeps the limits, to 5 %; the least that is tried if none does."""

    def tried(rate: float) -> dict[str, Any]:
        found = at_rate(rate)
        is_even = max(found["itl_s"]["p99"], found["per_token_s"]["p99"]) <= itl_s
        return found | {"keeps": is_even and found["ttft_s"]["p99"] <= ttft_s}

    best, factor = tried(0.1), 4.0
    while factor > 1.05:
        found = tried(best["rate"] * factor)
        if found["keeps"]:
            best = found
        else:
            factor **= 0.5
    return best


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--itl-ms", type=counts, default=(50, 25, 15))
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--gb-per-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    with refusals():
        for (name, (workload, ttft_s)), itl_ms in product(WORKLOADS.items(), given.itl_ms):
            for num_prefill in range(given.servers):
                tried = []
                for bound_s in (DEFAULT_BOUND_S,) if num_prefill else [share * itl_ms / 1e3 for share in BOUNDS]:
                    at_rate = partial(simulate, workload, given, ReplicaOptions(max_step_s=bound_s), num_prefill)
                    case = {"workload": name, "itl_ms": itl_ms, "prefill": num_prefill, "bound_s": bound_s}
                    tried.append(case | most(at_rate, ttft_s, itl_ms / 1e3))
                found.append(max(tried, key=lambda one: (one["keeps"], one["rate"])))
        write_report(report_of("disaggregation-fleet", {"results": found}), given.output)


if __name__ == "__main__":
    main()
