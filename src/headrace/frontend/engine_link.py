"""The way to the schedulers, and the loop that receives the engine's messages.

Owns which replica has which sample, and the samples that are held while no scheduler can take them. After a death a sample is sent again
with the outputs that have arrived here, and the new scheduler continues after them, as after a retraction. Outputs are functions of the
prompt, the seed and the position, so the text continues as if nothing had happened. Late outputs of a dead scheduler are recognised by
their `source` and dropped. `processes` notices deaths and starts processes; `balancers` chooses among replicas.

A request itself may be what kills a scheduler. Samples that were in flight at SUSPECT_DEATHS deaths, without PROBATION_TOKENS new tokens
between them, are suspects: they are sent one at a time, each until it has made that much progress, while all others continue. The suspect
that is on probation when the next death comes, or that was alone in flight, is cancelled.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from headrace.errors import ExecutionError
from headrace.frontend.balancers import Balancer, RoundRobin
from headrace.frontend.communicator import NO_WEIGHTS, Communicator, Replica, no_live_replica, no_weights
from headrace.frontend.request_state import ReqState
from headrace.log import get_logger
from headrace.messages.channel import Message, Receiver, Sender, TypeBasedDispatcher
from headrace.messages.control import AbortReq, FaultReq, ResetReq, SourceGone
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason
from headrace.messages.packing import pack_int32
from headrace.messages.requests import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from headrace.metrics.catalog import Metrics
from headrace.metrics.watchdog import Watchdog

logger = get_logger(__name__)

SUSPECT_DEATHS = 2
PROBATION_TOKENS = 64
WATCH_INTERVAL_S = 0.05
NOWHERE = -1
"""Replica index of a sample that no replica has."""
NO_MORE = -2
"""Replica index of a sample whose chosen replica will not come back."""

DIED_REPEATEDLY = "the engine died repeatedly while it worked on this request; the request has been cancelled"
NOT_SENT = "the request could not be sent to the engine"
LEFT_FOR_GOOD = "the replica that the request names has died and cannot be restarted; leave out routed_dp_rank"
TOO_LATE = "the request took longer than the server allows"


class EngineLink:
    """Sends samples to the schedulers and control messages to all of them; a `Sender`.

    samples: the table of live samples. end: ends a sample, as an output with this finish reason would. to_detokenizer: for messages that a
    source is gone. on_dismissed: ends the process of a replica, which is then restarted. replies: to requests of any kind.
    """

    def __init__(
        self,
        schedulers: Sequence[Sender],
        samples: Mapping[str, ReqState],
        end: Callable[[ReqState, FinishReason], None],
        metrics: Metrics,
        clock: Callable[[], float],
        to_detokenizer: Sender | None = None,
        balancer: Balancer = RoundRobin(),
    ) -> None:
        self.replies = Communicator()
        self.gone: set[int] = set()
        self.num_replayed = 0
        self.num_given_up = 0
        self.on_dismissed: Callable[[int], None] = lambda index: None
        self._replicas = [Replica(index, sender, source=index) for index, sender in enumerate(schedulers)]
        self._left_for_good: set[int] = set()
        self._sources = itertools.count(len(schedulers))
        self._samples = samples
        self._end = end
        self._metrics = metrics
        self._clock = clock
        self._to_detokenizer = to_detokenizer
        self._balancer = balancer
        self._detokenizer_is_up = True
        self._crashes: list[FaultReq] = []
        self._probation: ReqState | None = None
        self._watcher: asyncio.Task[None] | None = None

    # -- sending to the schedulers

    @property
    def is_serving(self) -> bool:
        return self._detokenizer_is_up and bool(self.replicas_up())

    def replicas_up(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.is_lost]

    def replicas_to_ask(self) -> list[int]:
        """Indices of those that serve. If none does, of all: a call that names one waits until it is back."""
        return [replica.index for replica in self.replicas_up() or self._replicas]

    @property
    def num_restarting(self) -> int:
        return sum(replica.is_lost and replica.index not in self._left_for_good for replica in self._replicas)

    @property
    def has_gone(self) -> bool:
        """Whether a scheduler will not come back before there are weights that it can load."""
        return bool(self._left_for_good)

    @property
    def awaits_weights(self) -> bool:
        """Whether that is true of all."""
        return len(self._left_for_good) == len(self._replicas)

    def has_begun(self) -> bool:
        """Whether a running request that somebody waits for, or another sample of its prompt, has outputs."""
        waiting = [s for s in self._samples.values() if s.finish is None and not s.call.abandoned]
        calls = {id(sample.call): sample.call for sample in waiting}.values()
        begun = {other.shown_id for call in calls for other in call.samples if other.output_ids or other.finish}
        return any(sample.shown_id in begun for sample in waiting)

    def dismiss(self, replica: Replica) -> None:
        """Kill a replica that differs from the others. Like any dead replica it is restarted."""
        if not replica.is_lost:
            self.on_dismissed(replica.index)

    @property
    def num_held(self) -> int:
        return len(self._held())

    def submit(self, samples: Sequence[ReqState]) -> None:
        """Send samples (`request` is set), one message per replica; samples that cannot be sent now are held."""
        messages: dict[int, list[TokenizedGenerateReqInput]] = {}
        num_sent = 0
        try:
            self._assign(samples, messages)
            for index in list(messages):
                requests = messages[index]
                sender = self._replicas[index].sender
                sender.send(requests[0] if len(requests) == 1 else BatchTokenizedGenerateReqInput(tuple(requests)))
                num_sent += len(messages.pop(index))
        finally:
            # No scheduler has it, so it must be ended here.
            for sample in samples if messages else ():
                if sample.replica in messages:
                    self._end(sample, FinishReason("abort", message=NOT_SENT, status_code=500))
        if num_sent < len(samples) or self._probation is not None:
            self._watch()

    def _assign(self, samples: Sequence[ReqState], messages: dict[int, list[TokenizedGenerateReqInput]]) -> None:
        """Choose a replica for each sample and fill `messages`. Samples that cannot be sent now are left out."""
        replicas_of_groups: dict[str, int] = {}
        for sample in samples:
            assert sample.request is not None, sample.rid
            group = sample.request.group
            index = replicas_of_groups[group] if group in replicas_of_groups else self._choose(sample)
            if index == NO_MORE:
                message, status = (NO_WEIGHTS, 503) if self.awaits_weights else (LEFT_FOR_GOOD, 500)
                self._end(sample, FinishReason("abort", message=message, status_code=status))
                continue
            if index == NOWHERE or not self._may_go(sample):
                continue
            if group:
                # Samples of one prompt share its KV.
                replicas_of_groups[group] = index
            request = self._next_attempt(sample)
            sample.replica = index
            if sample.turn is not None:
                sample.turn.replica = index
            self._balancer.sent(index, sample.request)
            messages.setdefault(index, []).append(request)

    def send(self, message: Message) -> None:
        """Send a control message to all live replicas. An abort also ends held samples."""
        if isinstance(message, AbortReq) and self._is_watching:
            for sample in self._held():
                if message.abort_all or sample.rid in message.rids:
                    self._end(sample, FinishReason("abort", message=message.message))
        if isinstance(message, FaultReq) and message.kind == "crash":
            # Test hook: a request that kills is to kill every scheduler that gets it.
            self._crashes.append(message)
        for replica in self.replicas_up():
            replica.sender.send(message)

    def close(self) -> None:
        """Stop watching held samples. Does not close the senders."""
        if self._watcher is not None:
            self._watcher.cancel()

    # -- deaths and restarts

    def new_source(self) -> int:
        """A new `source` number for an incarnation. From any thread."""
        return next(self._sources)

    def scheduler_down(self, index: int) -> Replica:
        """A replica has died: others take its samples, or they are held until it is up again. Returns the dead one."""
        replica = self._replicas[index]
        if replica.is_lost:
            return replica
        replica.is_lost = True
        # Its successor binds the same address and must not get messages that it has not read.
        replica.sender.close()
        self._forget_source(replica.source)
        self._balancer.forget(index)
        self._take_back({index})
        self._release()
        return replica

    def scheduler_gone(self, index: int) -> None:
        """A dead replica will not come back, unless other weights are loaded. Samples that only it may serve end."""
        self._left_for_good.add(index)
        self._release()

    def scheduler_up(self, index: int, source: int, sender: Sender) -> None:
        self._replicas[index] = Replica(index, sender, source)
        self._left_for_good.discard(index)
        for crash in self._crashes:
            sender.send(crash)
        self._release()

    def detokenizer_down(self) -> None:
        """The detokenizer has died, and the text state of every sample with it: all samples are sent again when it is back."""
        self._detokenizer_is_up = False
        for replica in self.replicas_up():
            self._forget_source(replica.source)
            replica.source = self.new_source()
            replica.sender.send(ResetReq(replica.source))
        self._take_back(set(range(len(self._replicas))))
        self._release()

    def detokenizer_up(self) -> None:
        self._detokenizer_is_up = True
        for source in sorted(self.gone):
            # The new one may still receive outputs of these that the old one had not read.
            self._forget_source(source)
        self._release()

    def _forget_source(self, source: int) -> None:
        self.gone.add(source)
        if self._to_detokenizer is not None:
            self._to_detokenizer.send(SourceGone(source))

    def _take_back(self, indices: set[int]) -> None:
        """Hold the samples in flight at `indices` again, except those without a client and those that are cancelled."""
        lost = [sample for sample in self._samples.values() if sample.replica in indices and sample.finish is None]
        guilty = self._probation if self._probation in lost else lost[0] if len(lost) == 1 else None
        if self._probation in lost:
            self._probation = None
        for sample in lost:
            leave_replica(sample, self._balancer)
            sample.replica, sample.runs = NOWHERE, False
            sample.note("lost", self._clock())
            sample.num_deaths = 1 if _has_passed(sample) else sample.num_deaths + 1
            sample.num_outputs_at_death = len(sample.output_ids)
            if sample.abort_asked or sample.call.abandoned:
                self._end(sample, FinishReason("abort", message="aborted"))
            elif sample is guilty and sample.num_deaths >= SUSPECT_DEATHS:
                self.num_given_up += 1
                logger.error(
                    "gave up rid %s: it was in flight when the engine died, %d times in a row",
                    sample.rid,
                    sample.num_deaths,
                )
                self._end(sample, FinishReason("abort", message=DIED_REPEATEDLY, status_code=500))

    def _release(self) -> None:
        held = self._held()
        if held and (self.is_serving or self.awaits_weights):
            self.submit(held)
        elif held:
            self._watch()

    def _held(self) -> list[ReqState]:
        return [
            sample
            for sample in self._samples.values()
            if sample.replica == NOWHERE and sample.request is not None and sample.finish is None
        ]

    def _choose(self, sample: ReqState) -> int:
        if self.awaits_weights:
            return NO_MORE
        if not self.is_serving:
            return NOWHERE
        assert sample.request is not None, sample.rid
        if (named := sample.routed_replica) is not None:
            if named in self._left_for_good:
                return NO_MORE
            return NOWHERE if self._replicas[named].is_lost else named
        if sample.turn is not None and (home := sample.turn.home) is not None and not self._replicas[home].is_lost:
            return home
        return self._balancer.choose(sample.request, [replica.index for replica in self.replicas_up()])

    def _may_go(self, sample: ReqState) -> bool:
        """False for a suspect while another one is on probation."""
        if sample.num_deaths < SUSPECT_DEATHS:
            return True
        if self._probation is not None:
            return False
        self._probation = sample
        return True

    def _next_attempt(self, sample: ReqState) -> TokenizedGenerateReqInput:
        request, attempt = sample.request, sample.num_sends
        assert request is not None, sample.rid
        sample.num_sends += 1
        if not attempt:
            return request
        self.num_replayed += 1
        self._metrics.replayed_requests.inc()
        sample.note("replayed", self._clock())
        task = request.task
        if sample.output_ids:
            # The prompt's logprobs came with the first output.
            task = task.with_prompt_logprobs_from(sample.num_prompt_tokens + 1)
        return msgspec.structs.replace(
            request,
            task=task,
            output_ids=pack_int32(sample.output_ids),
            attempt=attempt,
            # The queue deadline does not apply to a request that has already had output.
            queue_deadline_s=0.0 if sample.output_ids else request.queue_deadline_s,
        )

    # -- while samples are held

    @property
    def _is_watching(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    def _watch(self) -> None:
        if not self._is_watching:
            self._watcher = asyncio.get_running_loop().create_task(self._watch_held())

    async def _watch_held(self) -> None:
        """Check the deadlines of held samples, and the end of a probation; nothing else does."""
        while (held := self._held()) or self._probation is not None:
            self._end_late(held)
            suspect = self._probation
            if suspect is not None and (suspect.finish is not None or _has_passed(suspect)):
                suspect.num_deaths = 0
                self._probation = None
                self._release()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _end_late(self, held: Iterable[ReqState]) -> None:
        now_s = self._clock()
        for sample in held:
            assert sample.request is not None, sample.rid
            if 0 < sample.request.deadline_s <= now_s:
                self._end(sample, FinishReason("abort", message=TOO_LATE, status_code=408))
            elif 0 < sample.request.queue_deadline_s <= now_s and not sample.output_ids:
                self._end(sample, FinishReason("abort", message=WAITED_TOO_LONG, status_code=503))


def leave_replica(sample: ReqState, balancer: Balancer) -> None:
    """No replica has the sample any more."""
    if sample.replica != NOWHERE:
        assert sample.request is not None, sample.rid
        balancer.left(sample.replica, sample.request)
        sample.replica = NOWHERE


def _has_passed(sample: ReqState) -> bool:
    """Whether it has made so much progress since the last death that it cannot have caused it."""
    return len(sample.output_ids) >= sample.num_outputs_at_death + PROBATION_TOKENS


class EngineLoop:
    """Receives the engine's messages, in the event loop that first uses it; `is_here` may be called from any thread.

    handlers: by kind of message. asyncio_loop: None before `start`. failure: why the engine has failed; None while it works. on_broken: set by
    the owner; called in the event loop when a handler has failed and no more messages are received.
    """

    def __init__(self, receiver: Receiver, link: EngineLink, watchdog: Watchdog) -> None:
        self.handlers = TypeBasedDispatcher()
        self.failure: str | None = None
        self.on_broken: Callable[[], None] = lambda: None
        self.receiver = receiver
        self._link = link
        self.watchdog = watchdog
        self._thread = -1
        self.asyncio_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start receiving messages in the running event loop. Later calls do nothing."""
        if self.asyncio_loop is None:
            self.asyncio_loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self.receiver.listen(self._handle)
            self.watchdog.start()

    def close(self) -> None:
        """Stop receiving and close the receiver: in the loop. Idempotent."""
        self.receiver.close()
        self.watchdog.stop()

    def check(self) -> None:
        """Raises ExecutionError when the engine has failed, CapacityError when it awaits weights."""
        if self.failure is not None:
            raise ExecutionError(self.failure)
        if self._link.awaits_weights:
            raise no_weights()

    def check_serving(self) -> None:
        """Check that the engine can be asked, and make sure that its replies are received.

        Raises as `check`, and CapacityError while it is being restarted.
        """
        self.check()
        if not self._link.is_serving:
            raise no_live_replica()
        self.start()

    def is_here(self, method: Callable[..., None], *args: object) -> bool:
        """Whether this is the loop's thread (or there is none yet). If not, `method` is scheduled to be called there."""
        loop = self.asyncio_loop
        if loop is None or threading.get_ident() == self._thread:
            return True
        if not loop.is_closed():
            loop.call_soon_threadsafe(method, *args)
        return False

    def _handle(self, message: Message) -> None:
        self.watchdog.begin()
        try:
            self.handlers(message)
        except Exception:
            logger.exception("receiving engine messages failed")
            self.receiver.close()
            self.on_broken()
        self.watchdog.end()
