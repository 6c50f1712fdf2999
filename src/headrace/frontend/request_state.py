"""What the front end knows of a sample while it lives, and of the call that waits for it.

Owns the accumulated output and the times of each sample, keeps track of what the waiter has not read yet, and wakes it.

A sample's life: created -> sent -> waiting or streaming -> finished -> cleaned. Output is accumulated here, so a waiter that is
slow to read costs no memory beyond the output itself: what is pending is only "this sample has something new".
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.errors import HeadraceError
from headrace.frontend.sample_update import (
    LogprobLists,
    PromptProgress,
    SampleLogprobs,
    SampleTimes,
    SampleUpdate,
    SampleUsage,
    TokenText,
    failure_of,
)
from headrace.frontend.sessions import Turn
from headrace.frontend.tenants import ANONYMOUS, Tenant, TenantLimits
from headrace.media_kinds import MediaKind
from headrace.messages.namespaces import of_adapter
from headrace.messages.outputs import FinishReason, PromptPart, SampleStats, TokenIDOut, TokenVersions
from headrace.messages.packing import unpack_int32
from headrace.messages.requests import EngineTask, PromptContent, Room, TokenizedGenerateReqInput
from headrace.metrics.timeline import Note, Timeline


@dataclass(slots=True, eq=False)
class Adapter:
    """lora_id: the engine's number for it while it is in memory, else 0; each load gives a new one. num_users: samples that use it.

    fingerprint: of the files that it was loaded from; empty = not loaded yet. Different files are never loaded under the same name.
    """

    name: str
    path: str
    fingerprint: str = ""
    pinned: bool = False
    lora_id: int = 0
    num_users: int = 0
    last_used: int = 0
    leaving: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self, num_users: int = 1) -> None:
        self.num_users -= num_users
        assert self.num_users >= 0, (self.name, self.num_users)
        if not self.num_users:
            self.unused.set()


@dataclass(slots=True, eq=False)
class ReqState:
    """One sample. Times are seconds of the manager's clock, 0.0 = not yet.

    shown_id: the prompt's rid as its client knows it, the same for all samples of a prompt. index: place in the answer.
    first_of_prompt: counts that belong to the prompt are taken from this sample. queued: no token yet. runs: its scheduler computes it, it
    does not wait; see `SamplesMoved`.
    first_logprob_id: the prompt token at logprob_start_len, listed without a value; None = no prompt logprobs.
    leader: the sample of the same prompt whose prompt logprobs this one shows; it gives no update before they have arrived. If
    the leader ends before its first token, there are none. logged_input: for the log. dumped_prompt: the prompt's beginning,
    for dumps. turn: its place in a session. adapter: held in memory until the sample leaves the table.
    request: as it was first sent. replica: the replica that has it, -1 = none. routed_replica: the only one that may have it.
    num_sends: how often it was sent. num_deaths: how many times in a row the replica that had it died; num_outputs_at_death: its
    number of outputs at the last death; see `engine_link`.
    media_bytes, media_tokens: of the media that its request carries. held_bytes: of `packed_bytes`, counted in the table. began_s: when it first
    began to run. num_processed: tokens of its prompt that are computed or were cached. versions: of its tokens, where they change.
    _num_taken_texts etc.: how much of its output earlier updates contained.
    """

    rid: str
    shown_id: str
    index: int
    first_of_prompt: bool
    call: "CallState"
    created_s: float
    sent_s: float = 0.0
    began_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0
    first_logprob_id: int | None = None
    num_prompt_tokens: int = 0
    num_processed: int = 0
    media_bytes: int = 0
    held_bytes: int = 0
    media_tokens: Mapping[MediaKind, int] = field(default_factory=dict)
    leader: "ReqState | None" = None
    logged_input: str = ""
    dumped_prompt: str = ""
    retry_after_s: float = 1.0
    timeline: Timeline = field(default_factory=lambda: Timeline("", "", "", 0.0, 0.0))
    turn: Turn | None = None
    adapter: Adapter | None = None
    picked_ids: tuple[int, ...] = ()
    top_num: int = 0
    wants_logprobs: bool = False
    wants_mean_logprob: bool = False
    wants_hidden_states: bool = False
    queued: bool = True
    runs: bool = False
    abort_asked: bool = False
    request: TokenizedGenerateReqInput | None = None
    replica: int = -1
    routed_replica: int | None = None
    num_sends: int = 0
    num_deaths: int = 0
    num_outputs_at_death: int = 0
    finish: FinishReason | None = None
    stats: SampleStats = field(default_factory=lambda: SampleStats(0, 0))
    output_ids: list[int] = field(default_factory=list)
    input_logprobs: LogprobLists = field(default_factory=LogprobLists)
    output_logprobs: LogprobLists = field(default_factory=LogprobLists)
    hidden_states: bytearray = field(default_factory=bytearray)
    hidden_size: int = 0
    pooled: bytes | None = None
    versions: tuple[TokenVersions, ...] = ()
    _followers: list["ReqState"] = field(default_factory=list)
    _is_heard: bool = False
    _progress: PromptProgress | None = None
    _texts: list[str] = field(default_factory=list)
    _num_unread_characters: int = 0
    _num_taken_texts: int = 0
    _num_taken_ids: int = 0
    _num_taken_logprobs: int = 0
    _num_taken_prompt_logprobs: int = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_unread_bytes(self) -> int:
        ids = len(self.output_ids) - self._num_taken_ids
        logprobs = len(self.output_logprobs) - self._num_taken_logprobs
        # Mostly text of one byte a character; an id, and each entry of a logprob list, is some digits.
        return self._num_unread_characters + 4 * ids + 32 * logprobs * (1 + self.top_num + len(self.picked_ids))

    @property
    def packed_bytes(self) -> int:
        """Of its logprobs and hidden states. Samples of a prompt share the prompt's."""
        own = 0 if self.leader is not None else self.input_logprobs.num_bytes
        return own + self.output_logprobs.num_bytes + len(self.hidden_states)

    @property
    def failed(self) -> HeadraceError | None:
        """See `failure_of`; None while it lives."""
        return failure_of(self.finish, self.retry_after_s) if self.finish is not None else None

    def apply(self, text: str, row: TokenIDOut, now_s: float, hidden_size: int) -> None:
        """Accumulate an output and its text; its finish reason is for `end`. Raises ValueError for arrays that do not fit together."""
        if row.stats is not None:
            self.stats = row.stats if self.num_sends <= 1 else self._same_prefill(row.stats)
        ids = unpack_int32(row.ids)
        if ids:
            if not self.first_token_s:
                self.first_token_s = now_s
                self._note_processed(self.num_prompt_tokens, self.stats.cached_tokens, now_s)
            self.last_token_s = now_s
            self.output_ids += ids
        if text:
            self._texts.append(text)
            self._num_unread_characters += len(text)
        if row.prompt_logprobs is not None:
            self._start_prompt_logprobs()
            self.input_logprobs.extend(row.prompt_logprobs, self.picked_ids)
        if row.logprobs is not None and self.wants_logprobs:
            self.output_logprobs.extend(row.logprobs, self.picked_ids)
        if row.hidden_states:
            if len(row.hidden_states) % (4 * hidden_size):
                raise ValueError(f"{len(row.hidden_states)} bytes of hidden states, rows of {hidden_size} values")
            self.hidden_states += row.hidden_states
            self.hidden_size = hidden_size
        if row.pooled:
            self.pooled = row.pooled
        self.versions += row.versions
        if row.finish is None:
            self._tell()

    def begin(self, now_s: float) -> None:
        """It runs: a step is to compute some of it."""
        self.runs = True
        self.began_s = self.began_s or now_s

    def note_prompt(self, part: PromptPart, now_s: float) -> None:
        """Some of its prompt is computed. What is computed again after its first token is nothing new."""
        if not self.first_token_s:
            self._note_processed(part.processed_tokens, part.cached_tokens, now_s)
            if self._progress is not None:
                self.call.notify(self)

    def _note_processed(self, num_processed: int, num_cached: int, now_s: float) -> None:
        self.num_processed = num_processed
        # Other samples of the prompt wait for this one.
        if self.call.wants_progress and self.first_of_prompt:
            time_ms = round((now_s - (self.began_s or now_s)) * 1000)
            total = self.num_prompt_tokens
            self._progress = PromptProgress(total, min(num_cached, total), min(num_processed, total), time_ms)

    def _same_prefill(self, stats: SampleStats) -> SampleStats:
        """Statistics of a later attempt: the prefill that the client sees is that of the attempt that gave the first output."""
        if not self._is_heard:
            return stats
        first = self.stats
        return msgspec.structs.replace(stats, cached_tokens=first.cached_tokens, queue_time_s=first.queue_time_s)

    def end(self, finish: FinishReason, now_s: float) -> None:
        self.finish = finish
        self.finished_s = now_s
        self._tell()

    def write_timeline(self) -> None:
        timeline = self.timeline
        timeline.sent_s = self.sent_s
        timeline.first_token_s = self.first_token_s
        timeline.finished_s = self.finished_s
        timeline.num_prompt_tokens = self.num_prompt_tokens
        timeline.num_processed_tokens = self.num_processed
        timeline.num_output_tokens = len(self.output_ids)
        timeline.num_replays = max(0, self.num_sends - 1)
        timeline.stats = self.stats
        timeline.finish = self.finish
        timeline.runs = self.runs
        if self.adapter is not None:
            timeline.adapter = self.adapter.name
        if self.replica >= 0:
            timeline.replica = self.replica
        timeline.prompt = self.dumped_prompt

    def note(self, kind: Note, now_s: float) -> None:
        """Remember in `timeline` what happened to it outside the scheduler."""
        self.timeline.num_output_tokens = len(self.output_ids)
        self.timeline.note(kind, now_s)

    def follow(self, leader: "ReqState") -> None:
        """Show the prompt logprobs of `leader`, which alone asks for them. Before anything is sent."""
        self.leader = leader
        self.input_logprobs = leader.input_logprobs
        leader._followers.append(self)

    def _tell(self) -> None:
        """Wake the waiter, unless what it would see is not complete yet."""
        self._is_heard = True
        if self.leader is not None and not self.leader._is_heard:
            return
        self.call.notify(self)
        for follower in self._followers:
            if follower._is_heard:
                follower.call.notify(follower)
        self._followers.clear()

    def update(self) -> SampleUpdate:
        num_ids, stats = len(self.output_ids), self.stats
        ended = self.finish is not None
        progress, self._progress = self._progress, None
        # An update that only tells of the prompt leaves logprobs to the first that has output.
        tells_all = ended or num_ids > self._num_taken_ids or progress is None
        update = SampleUpdate(
            self.shown_id,
            self.index,
            self.call.is_list,
            "".join(self._texts[self._num_taken_texts :]),
            self.output_ids[self._num_taken_ids :],
            self.finish,
            SampleUsage(
                self.num_prompt_tokens,
                num_ids,
                min(stats.cached_tokens, self.num_prompt_tokens),
                self.media_tokens,
            ),
            SampleTimes(
                stats.queue_time_s,
                self.first_token_s - self.created_s if self.first_token_s else None,
                self.finished_s - self.created_s if ended else None,
                self.decode_throughput if ended else None,
            ),
            stats.weight_version,
            stats.num_retractions,
            self._new_logprobs() if self.wants_logprobs and tells_all else None,
            bytes(self.hidden_states) if ended and self.wants_hidden_states else None,
            stats.speculation if ended else None,
            self.pooled,
            progress,
            self.versions,
            self.input_logprobs.mean() if ended and self.wants_mean_logprob else None,
            self.hidden_size,
        )
        self._num_taken_texts, self._num_taken_ids = len(self._texts), num_ids
        self._num_unread_characters = 0
        return update

    def _new_logprobs(self) -> SampleLogprobs:
        self._start_prompt_logprobs()
        asked = self.top_num > 0, self.picked_ids, self.call.token_text
        prompt = self.input_logprobs.since(self._num_taken_prompt_logprobs, *asked)
        output = self.output_logprobs.since(self._num_taken_logprobs, *asked)
        self._num_taken_prompt_logprobs = len(self.input_logprobs)
        self._num_taken_logprobs = len(self.output_logprobs)
        return SampleLogprobs(prompt, output)

    @property
    def decode_throughput(self) -> float | None:
        """Tokens per second after the first; None when there is no second one or no measurable time between."""
        elapsed_s = self.last_token_s - self.first_token_s
        return (len(self.output_ids) - 1) / elapsed_s if elapsed_s > 0 else None

    def _start_prompt_logprobs(self) -> None:
        if self.first_logprob_id is not None and not self.input_logprobs:
            self.input_logprobs.add_unknown(self.first_logprob_id)


@dataclass(slots=True, eq=False, kw_only=True)
class CallState:
    """The samples of one call, and which of them have something new for the one waiter.

    names: rids that stand for all samples of the call, or of a prompt. error: ends the whole call.
    timeout_s, queue_timeout_s: limits on its whole time and on its waiting; 0 = none.
    is_list: its answer is a list. tenant: whose limits count. owner: whose it is. turn: whose turn it takes, see `Caller`.
    token_text: text of a token for logprob lists; None = not requested. given_bytes: of the media that its client gave. wants_progress: updates say
    how far prompts are.
    """

    stream: bool
    is_list: bool
    token_text: TokenText | None
    wants_progress: bool = False
    tenant: Tenant = field(default_factory=lambda: Tenant(TenantLimits(name="")))
    owner: str = ANONYMOUS.owner
    turn: str = ""
    timeout_s: float = 0.0
    queue_timeout_s: float = 0.0
    samples: list[ReqState] = field(default_factory=list)
    names: dict[str, list[ReqState]] = field(default_factory=dict)
    created_s: float = 0.0
    abandoned: bool = False
    given_bytes: int = 0
    error: HeadraceError | None = None
    _names_of: dict[ReqState, list[str]] = field(default_factory=dict)
    _num_live: dict[str, int] = field(default_factory=dict)
    _news: dict[int, ReqState] = field(default_factory=dict)
    _waiter: "asyncio.Future[None] | None" = None

    @property
    def unfinished(self) -> list[ReqState]:
        return [state for state in self.samples if state.finish is None]

    def add_prompt(self, rid: str, num_samples: int, now_s: float, routed_replica: int | None) -> None:
        """Add the samples of a prompt. Several are called `rid`/0, `rid`/1, ..., and `rid` stands for all of them.

        rid: as the client says it; `tenant` is set before. routed_replica: the only one that may take them.
        """
        scope = self.tenant.scope
        own = []
        for number in range(num_samples):
            own_rid = f"{rid}/{number}" if num_samples > 1 else rid
            sample = ReqState(scope + own_rid, rid, len(self.samples) + number, number == 0, self, now_s)
            sample.routed_replica = routed_replica
            own.append(sample)
        self.samples += own
        if num_samples > 1:
            self.name(scope + rid, own)

    def name(self, rid: str, samples: list[ReqState]) -> None:
        self.names[rid] = samples
        self._num_live[rid] = len(samples)
        for sample in samples:
            self._names_of.setdefault(sample, []).append(rid)

    def forget_names(self, sample: ReqState) -> list[str]:
        """A sample has left the table of rids; the names that no live sample has any more."""
        names = self._names_of.pop(sample, [])
        for rid in names:
            self._num_live[rid] -= 1
        ended = [rid for rid in names if not self._num_live[rid]]
        for rid in ended:
            del self.names[rid]
        return ended

    def let_go(self) -> None:
        """The client has left. What its samples hold goes with the last of them, and does not wait for a collection of cycles."""
        self.samples = []
        self._news.clear()
        self._waiter = None

    def notify(self, state: ReqState) -> None:
        """`state` has something new. A waiter that does not stream is woken only at the end."""
        if not self.abandoned and (self.stream or state.finish is not None):
            self._news[state.index] = state
            self._wake()

    def fail(self, error: HeadraceError) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_news(self, timeout_s: float | None) -> ReqState | None:
        """A sample with something new, first come first served; None after `timeout_s` seconds. Raises `error` if set."""
        if not self._news and self.error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if timeout_s is None:
                await self._waiter
            else:
                # A timer is cheaper than wait_for, which makes a task of every wait.
                timer = loop.call_later(timeout_s, self._wake)
                try:
                    await self._waiter
                finally:
                    timer.cancel()
        if self.error is not None:
            raise self.error
        if not self._news:
            return None
        return self._news.pop(next(iter(self._news)))


def engine_request(
    sample: ReqState,
    content: PromptContent,
    task: EngineTask,
    *,
    namespace: str,
    priority: int | None,
    group: str = "",
    room: Room | None = None,
) -> TokenizedGenerateReqInput:
    """The scheduler's request for a sample: its task, and for whom and until when.

    namespace: what the call asks for, within that of its tenant and of its adapter. group, room: see
    `TokenizedGenerateReqInput`."""
    call, adapter = sample.call, sample.adapter
    tenant = call.tenant
    lora_id, lora_name = (adapter.lora_id, adapter.name) if adapter is not None else (0, "")
    return TokenizedGenerateReqInput(
        rid=sample.rid,
        content=content,
        task=task,
        namespace=of_adapter(tenant.namespace(namespace), lora_id, lora_name),
        priority=priority or 0,
        group=group,
        created_s=sample.created_s,
        deadline_s=sample.created_s + call.timeout_s if call.timeout_s > 0 else 0.0,
        queue_deadline_s=sample.created_s + call.queue_timeout_s if call.queue_timeout_s > 0 else 0.0,
        tenant=call.turn,
        weight=tenant.limits.weight,
        lora_id=lora_id,
        room=room,
    )
