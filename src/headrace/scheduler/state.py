"""The scheduler's state between two turns of its loop, and the plan of a step (`ScheduleBatch`). Planner, retract, commit and control work on it."""

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import numpy as np

from headrace.messages.outputs import PromptPart, SpeculationCounts
from headrace.messages.requests import EngineTask
from headrace.messages.step import EncodeWork, ModelWorkerBatch, NewSequence
from headrace.messages.weights import MemoryTag, PauseMode
from headrace.scheduler.admission import DEFAULT_CLIP_TOKENS, NewTokenRatio
from headrace.scheduler.encodings import Encodings
from headrace.scheduler.fairness import FairShare, Shares
from headrace.scheduler.grammar_queue import GrammarQueue
from headrace.scheduler.kv_manager import KVManager
from headrace.scheduler.pins import Pins
from headrace.scheduler.request import Req, SampleGroups
from headrace.scheduler.rooms import Rooms
from headrace.scheduler.step_cost import StepCost, StepWork
from headrace.scheduler.tier_queue import TierQueue
from headrace.scheduler.waiting import WaitingQueue

Row = tuple[Req, int, int, int]
"""Request, start, count and num_logits: the step computes `count` of its tokens from position `start` on.

num_logits: 0, or 1 if the step also samples the token after them, and one more for each draft.
"""


@dataclass(slots=True)
class ScheduleBatch:
    """The plan of one step.

    planned_s: when the step was planned. left, part_starts, encode: see `ModelWorkerBatch`. out_slots: where the KV of the rows' tokens goes.
    num_prompt_tokens: how many of the tokens catch up with known ones; expected_s: how long the step should then take. 0 if that is not known.
    """

    step: int
    page_size: int
    planned_s: float
    rows: list[Row] = field(default_factory=list)
    out_slots: "array[int]" = field(default_factory=lambda: array("i"))
    new: list[NewSequence] = field(default_factory=list)
    left: tuple[int, ...] = ()
    part_starts: tuple[int, ...] = ()
    encode: EncodeWork | None = None
    num_prompt_tokens: int = 0
    expected_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.out_slots)

    @property
    def samples_last(self) -> bool:
        """Whether the row that was added last gives a token."""
        return self.rows[-1][3] > 0

    def work(self) -> StepWork:
        attended = sum(count * (start + 0.5 * count) for _, start, count, _ in self.rows)
        return StepWork(self.num_tokens, attended, sum(num_logits for *_, num_logits in self.rows))

    def add(self, req: Req, count: int) -> None:
        """Add a row for the next `count` tokens of the request, which has pages for them."""
        start, pages, size = req.num_scheduled, req.pages, self.page_size
        self.rows.append((req, start, count, req.join_step(count, self.planned_s)))
        if count == 1:
            self.out_slots.append(pages[start // size] * size + start % size)
        else:
            self.out_slots.extend(pages[p // size] * size + p % size for p in range(start, start + count))

    def sort_by_part(self, num_parts: int) -> None:
        """Put the rows of each part of the KV cache together, the first part's first."""
        ends = accumulate(count for _, _, count, _ in self.rows)
        slots = [self.out_slots[end - count : end] for (_, _, count, _), end in zip(self.rows, ends, strict=True)]
        order = sorted(range(len(self.rows)), key=lambda row: self.rows[row][0].part)
        self.rows = [self.rows[row] for row in order]
        self.out_slots = array("i")
        for row in order:
            self.out_slots += slots[row]
        num_rows = [0] * num_parts
        for req, *_ in self.rows:
            num_rows[req.part] += 1
        self.part_starts = tuple(accumulate(num_rows, initial=0))

    def worker_batch(self) -> ModelWorkerBatch:
        """The plan as plain integers, for the worker. Without rows it has work for the encoder."""
        reqs, starts, counts, num_logits = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        return ModelWorkerBatch(
            step=self.step,
            new=tuple(self.new),
            left=self.left,
            part_starts=self.part_starts,
            seqs=np.array([req.seq for req in reqs], np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array(counts, np.int32),
            num_logits=np.array(num_logits, np.int32),
            out_slots=np.array(self.out_slots, np.int32),
            encode=self.encode,
        )


@dataclass(slots=True)
class Counters:
    """Totals since start, by their names in `InternalState`, which says what they count."""

    num_steps: int = 0
    num_retracted: int = 0
    num_aborted: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    computed_prefill_tokens: int = 0
    prefix_query_tokens: int = 0
    memory_repairs: int = 0
    forward_s: float = 0.0
    host_s: float = 0.0
    prompt_steps: int = 0
    prompt_steps_s: float = 0.0
    prompt_steps_expected_s: float = 0.0
    num_sat_out: int = 0
    masks_s: float = 0.0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Resolved limits. chunk_tokens: most prompt tokens in a step, over all requests; step_tokens: most tokens in a step.

    max_step_s: how long a step with decode rows and prompt tokens should take at most, see also `ALONE_STEP_S`; infinite = steps of both kinds are
    bounded by tokens alone. default_step_s: a `max_step_s` that nobody has asked for, see `TOKENS_PER_ROW`; 0 = it was asked for.
    preemption_threshold: a waiting request may displace running ones whose priority is lower by at least this; 0 = never.
    eos_token_ids end a request unless it ignores them, and turn_end_ids one of a chat (`eos_of`). max_steps_in_flight: 1 = synchronous, 2 = overlap.
    num_stages: 1, or that of a pipeline, which computes as many steps at a time. speculates: whether the worker guesses tokens. whole_prompts: no
    prompt may be cut, because each of its tokens sees all others.
    weight_update_timeout_s: time limit for reading weights or an adapter; 0 = no limit.
    encoder_rows, encoder_slices: see `Encodings`; of a model without encoder they mean nothing. whole_images: no image may be cut, because its
    tokens see each other. persists_tenants, writes_back, unknown_token_s: see `TierQueue`. pin_share: see `Pins`.
    kv_on_update: what becomes of KV when the weights change; "flush": requests that have begun end before that, else they go on, with KV that is
    computed again ("recompute") or the one they have ("keep").
    """

    policy: str
    chunk_tokens: int
    step_tokens: int
    max_running: int
    max_queued: int
    max_steps_in_flight: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    stream_interval: int
    num_stages: int = 1
    max_step_s: float = math.inf
    default_step_s: float = 0.0
    priority_ageing_s: float = 10.0
    preemption_threshold: int = 0
    conservativeness: float = 1.0
    clip_estimate_tokens: int = DEFAULT_CLIP_TOKENS
    weight_update_timeout_s: float = 600.0
    decode_log_interval: int = 0
    speculates: bool = False
    whole_prompts: bool = False
    encoder_rows: int = 0
    encoder_slices: int = 1
    whole_images: bool = False
    replica: int = 0
    persists_tenants: bool = False
    writes_back: bool = False
    unknown_token_s: float = 1e-4
    kv_on_update: Literal["flush", "recompute", "keep"] = "flush"
    pin_share: float = 0.25
    turn_end_ids: frozenset[int] = frozenset()

    def eos_of(self, task: EngineTask) -> frozenset[int]:
        """The model's tokens that end a request with this task, unless it ignores them."""
        return self.eos_token_ids | self.turn_end_ids if task.ends_with_turn else self.eos_token_ids


@dataclass(slots=True)
class Gate:
    """Whether steps may be planned. pause: the requested mode, if paused. released: tags of released memory.

    exclusive: the worker is preparing an operation that must not run beside steps. draining: an operation waits for requests that have
    begun (`retract.is_drained`), so no new ones begin. drains: else it waits for the steps in flight only, and none begins.
    held: nothing runs, and a prepared update waits for its commit.
    """

    pause: PauseMode | None = None
    released: frozenset[MemoryTag] = frozenset()
    exclusive: bool = False
    draining: bool = False
    drains: bool = True
    held: bool = False

    @property
    def holds(self) -> bool:
        """Whether no step may be planned."""
        return (
            self.pause is not None
            or bool(self.released)
            or self.exclusive
            or self.held
            or (self.draining and not self.drains)
        )


@dataclass(slots=True)
class SchedulerState:
    """Requests by state, steps in flight, resources and counts.

    running: admitted requests in order of admission, ended ones included while a step in flight uses them.
    compiling: requests that will wait once their grammar is compiled. encodings: outputs of the media encoder.
    tier: requests that will wait once their prefix is loaded; None without --kv-cache-dir. rooms: with --disaggregation-mode.
    by_rid: requests that have not ended. in_flight: oldest first. collected_s: when the last one ended that is not in it.
    ended: requests that the planner ended; their last output is still to be sent.
    now_s: start of the step that is being planned.
    moved: rid -> whether it runs now, of those that began to run or wait again since that was last told. prompts: of those whose prompt is not yet
    computed, what has been since then.
    groups: of those in by_rid, the samples of one prompt.
    cost: how long steps take. last_decode: the last step without prompt tokens, and its seconds, until it is learnt.
    gen_throughput: tokens per second, as the log said last.
    passed: rid of the first prompt, if shorter ones passed it and left nothing of the last step for it.
    gate: whether steps may be planned.
    source: marks its outputs, see `BatchTokenIDOut`.
    """

    config: SchedulerConfig
    kv: KVManager
    ratio: NewTokenRatio
    compiling: GrammarQueue
    encodings: Encodings = field(default_factory=Encodings)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Req] = field(default_factory=list)
    by_rid: dict[str, Req] = field(default_factory=dict)
    in_flight: deque[ScheduleBatch] = field(default_factory=deque)
    collected_s: float = 0.0
    groups: SampleGroups = field(default_factory=SampleGroups)
    ended: list[Req] = field(default_factory=list)
    moved: dict[str, bool] = field(default_factory=dict)
    prompts: dict[str, PromptPart] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    cost: StepCost = field(default_factory=StepCost)
    last_decode: tuple[ScheduleBatch, float] | None = None
    gen_throughput: float = 0.0
    passed: str = ""
    fair_share: FairShare = field(default_factory=FairShare)
    shares: Shares = field(default_factory=Shares)
    now_s: float = 0.0
    gate: Gate = field(default_factory=Gate)
    next_order: int = 0
    next_step: int = 0
    source: int = 0
    tier: TierQueue | None = None
    rooms: Rooms | None = None
    pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self.pins = Pins(self.kv, self.config.pin_share)

    @property
    def num_places(self) -> int:
        """Samples that may run at a time."""
        return min(self.kv.max_seqs, self.config.max_running)

    @property
    def weight_version(self) -> str:
        return self.kv.weights.name

    @property
    def not_ready(self) -> list[Req]:
        """Requests that do not wait in the queue yet."""
        return [*self.compiling, *(self.tier or ()), *(self.rooms or ())]
