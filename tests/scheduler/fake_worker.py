"""A worker without a model, and a scheduler around it.

The fake keeps what a real worker keeps: a token buffer, a slot table, and a "KV cache" that remembers which token (and which
history) was written to each slot. A step checks that every position it attends to still holds the KV of exactly that prefix, so a page
given to two owners, freed too early or shared wrongly is found at once. The next token is a hash of the whole history.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np

from headrace.cache.base import CacheObserver, ChunkCache, PageAllocator
from headrace.cache.radix_cache import RadixCache
from headrace.cache.tier import DiskTier
from headrace.disaggregation.sink import PageSink
from headrace.disaggregation.source import PageSource
from headrace.errors import ExecutionError, ModelError
from headrace.messages.grammar import CompiledGrammar, GrammarSpec, GrammarStats
from headrace.messages.media import MediaItem, MediaSpan
from headrace.messages.operations import OperationReply
from headrace.messages.outputs import BatchTokenIDOut, LogprobBlock, SamplesMoved
from headrace.messages.requests import LogprobSpec, PoolTask, PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.messages.step import EncodeWork, ModelWorkerBatch, StepResult
from headrace.messages.weights import Prepared, ReleaseMemory, ResumeMemory, UpdateFromDisk, WorkerOperation
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.faults import InjectedFaults
from headrace.scheduler.kv_manager import KVManager, KvPart
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.state import SchedulerConfig

VOCAB = 2
EOS = 1


def history_hash(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 7) % 2_147_483_647


def first_history(version: int, lora_id: int) -> int:
    """Every history begins with the weights that made it."""
    return version + 100_003 * lora_id


def mixed(history: int, version: int, oldest: int) -> int:
    """What weights make of a history whose KV depends on older ones."""
    return history + 100_019 * version + 100_043 * oldest


def next_token(history: int, eos_every: int) -> int:
    """EOS about once in `eos_every` tokens, else token 0."""
    return EOS if (history // 7) % eos_every == 0 else 0


def expected_outputs(
    prompt: list[int], max_new_tokens: int, eos_every: int, ignore_eos: bool = False, version: int = 0, lora_id: int = 0
) -> list[int]:
    history = first_history(version, lora_id)
    for token in prompt:
        history = history_hash(history, token)
    made: list[int] = []
    while len(made) < max_new_tokens:
        made.append(next_token(history, eos_every))
        if made[-1] == EOS and not ignore_eos:
            break
        history = history_hash(history, made[-1])
    return made


class FakeWeights:
    """A WeightExecutor. The model's weights are a number, which is part of every history, so that KV of other weights is found at once.

    Jobs wait for `finish`. bad: they fail.
    """

    def __init__(self, worker: "FakeWorker") -> None:
        self.holds_steps = False
        self.worker = worker
        self.jobs: list[FakeJob] = []

    def start(self, operation: WorkerOperation) -> "FakeJob":
        assert not (self.holds_steps and self.worker.queue), "an operation meets a step"
        assert all(job.is_done or job.abandoned for job in self.jobs), "two operations at once"
        self.jobs.append(FakeJob(self.worker, operation))
        return self.jobs[-1]

    def finish(self, bad: bool = False) -> None:
        for job in self.jobs:
            if not job.is_done:
                job.is_done, job.bad = True, bad


class FakeJob:
    def __init__(self, worker: "FakeWorker", operation: WorkerOperation) -> None:
        self.worker, self.operation = worker, operation
        self.is_done = self.bad = self.abandoned = False

    def abandon(self) -> None:
        self.abandoned = True

    def result(self) -> Prepared:
        assert self.is_done
        assert not self.abandoned, "a result that nobody wants is taken"
        if self.bad:
            raise ExecutionError("a bad update")
        if isinstance(self.operation, UpdateFromDisk):
            return Prepared("updated", self.install, changes_weights=True)
        if isinstance(self.operation, ReleaseMemory | ResumeMemory):
            return Prepared("done", self.check_quiet)
        return Prepared("done")

    def check_quiet(self) -> None:
        assert not self.worker.queue, "memory changes under a step"

    def install(self) -> None:
        assert not self.abandoned, "an update that was given up takes effect"
        assert not self.worker.queue, "the weights change under a step"
        self.worker.version = int(self.operation.model_path)


class FakeLoras(set[int]):
    """The ids of the adapters in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bad_paths: set[str] = set()

    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
        if path in self.bad_paths:
            raise ModelError("no good")
        self.add(lora_id)
        return ""

    def unload(self, lora_id: int) -> None:
        self.discard(lora_id)


class FakeGrammars:
    """Grammars that are compiled when a test says so. started, asked: what was asked for, in order, and for whom."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, bool]] = []
        self.started: list[tuple[GrammarSpec, Future[CompiledGrammar]]] = []
        self.closed = False

    def compile(
        self, spec: GrammarSpec, tenant: str = "", weight: float = 1.0, is_private: bool = False
    ) -> Future[CompiledGrammar]:
        self.asked.append((tenant, weight, is_private))
        self.started.append((spec, Future()))
        return self.started[-1][1]

    def stats(self) -> GrammarStats:
        return GrammarStats(num_compiled=sum(future.done() for _, future in self.started))

    def finish(self, text: str, result: object) -> None:
        """End the compilation of every grammar of this text. result: the grammar, or an error."""
        for spec, future in self.started:
            if spec.text == text and not future.done():
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def close(self) -> None:
        self.closed = True


class FakeEncoder:
    """Does `EncodeWork` as a worker does, and checks that it can be done. num_slices: of a batch. bad: keys that cannot be encoded.
    whole_images: a step that ends within an image is wrong.

    ready: keys of the outputs that there are. most_rows: the largest number of rows that it has ever held. most_slices: in a step.
    """

    def __init__(self, num_slices: int = 1, whole_images: bool = False) -> None:
        self.num_slices = num_slices
        self.whole_images = whole_images
        self.ready: dict[bytes, int] = {}
        self.bad: set[bytes] = set()
        self.batch: tuple[MediaItem, ...] = ()
        self.slices_left = 0
        self.epoch = 0
        self.most_rows = self.most_slices = self.num_encoded = 0

    def work(self, work: EncodeWork | None) -> tuple[tuple[bytes, ...], dict[bytes, str]]:
        if work is None:
            return (), {}
        if work.epoch != self.epoch:
            self.epoch, self.batch, self.slices_left = work.epoch, (), 0
            self.ready.clear()
        for key in work.drop:
            del self.ready[key]
        if work.begin:
            assert not self.batch, "a batch begins before the last one is done"
            assert not {item.key for item in work.begin} & self.ready.keys(), "encoded twice"
            self.batch, self.slices_left = work.begin, self.num_slices
        if not work.num_slices or not self.batch:
            return (), {}
        self.most_slices = max(self.most_slices, work.num_slices)
        self.slices_left -= work.num_slices
        assert self.slices_left >= 0
        if self.slices_left:
            return (), {}
        done = {item.key: item.num_tokens for item in self.batch if item.key not in self.bad}
        failed = {item.key: "no image" for item in self.batch if item.key in self.bad}
        self.batch = ()
        self.ready |= done
        self.num_encoded += len(done)
        self.most_rows = max(self.most_rows, sum(self.ready.values()))
        return tuple(done), failed

    def check(self, content: PromptContent, start: int, count: int) -> None:
        """There are outputs for all of these tokens."""
        for span in content.spans:
            if span.start < start + count and span.end > start:
                assert content.media[span.item].key in self.ready, "computes tokens of an image that is not encoded"
                assert not self.whole_images or span.end <= start + count, "cuts an image"


class FakeWorker:
    """Implements the Worker protocol; runs a step when its result is collected, like a device that is slower than the host.

    ids_a_row: how many tokens a row that samples gives; several only without overlap. seconds: what a step takes. in_stages: a step that was
    submitted has begun, so what it computes must be known. num_parts: of the KV cache; a row has all its slots in one, where the plan says.
    mixes: the KV of older weights may be read: what is sampled depends on the weights and on the oldest KV that it was computed from.
    sits_out: whether the row of a sequence sits a step out, given the number of the step and the row. guesses: how many tokens it guesses
    after what a row samples, given the same, and how many of them are right.
    """

    seconds: Callable[[ModelWorkerBatch], float] = staticmethod(lambda batch: 0.0)
    encode_s: Callable[[ModelWorkerBatch], float] = staticmethod(lambda batch: 0.0)
    sits_out: Callable[[int, int], bool] = staticmethod(lambda step, row: False)
    guesses: Callable[[int, int], tuple[int, int]] = staticmethod(lambda step, row: (0, 0))

    def __init__(
        self,
        num_slots: int,
        max_seqs: int,
        eos_every: int = 9,
        ids_a_row: int = 1,
        in_stages: bool = False,
        num_parts: int = 1,
    ) -> None:
        self.num_parts = num_parts
        self.in_stages = in_stages
        self.ids_a_row = ids_a_row
        self.kv = np.full(num_slots, -1, np.int64)  # slot -> hash of the history up to and including the token
        self.oldest = np.zeros(num_slots, np.int64)  # slot -> the oldest weights that its KV depends on
        self.mixes = False
        self.tokens: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {}
        self.specs: dict[int, tuple[LogprobSpec | None, int]] = {}
        self.queue: deque[ModelWorkerBatch] = deque()
        self.eos_every = eos_every
        self.max_seqs = max_seqs
        self.fail_steps: set[int] = set()
        self.nan_rids: set[str] = set()
        self.rids: dict[int, str] = {}
        self.lora_ids: dict[int, int] = {}
        self.pools: dict[int, bool] = {}
        self.loras = FakeLoras()
        self.late: set[int] = set()  # sequences that sat out the last step that was to sample them
        self.drafts: dict[int, list[int]] = {}
        self.num_verified = self.num_hits = 0
        self.broken: set[int] = set()  # rows of a failed step: what a step already planned makes of them is thrown away
        self.num_computed = 0
        self.num_prefill_rows = 0
        self.closed = False
        self.rested: list[int] = []  # rows that were left when it was told to rest
        self.num_rests = 0
        self.version = 0
        self.weights = FakeWeights(self)
        self.encoder = FakeEncoder()
        self.contents: dict[int, PromptContent] = {}

    def submit(self, batch: ModelWorkerBatch) -> None:
        if self.in_stages:
            new = {one.seq for one in batch.new}
            for other in self.queue:
                sampled = set(other.seqs[other.num_logits > 0].tolist())
                assert not sampled & (set(batch.seqs.tolist()) - new), "computes what a step in flight samples"
        self.queue.append(batch)

    def check_parts(self, batch: ModelWorkerBatch) -> None:
        """The rows of each part lie together, and have slots of the part only."""
        assert len(batch.part_starts) == (0 if self.num_parts == 1 else self.num_parts + 1)
        ends = np.cumsum([0, *batch.counts.tolist()])
        for row, seq in enumerate(batch.seqs.tolist()):
            slots = np.array(self.slots[seq] + batch.out_slots[ends[row] : ends[row + 1]].tolist())
            part = bisect_right(batch.part_starts, row) - 1 if batch.part_starts else 0
            assert set((slots * self.num_parts // len(self.kv)).tolist()) == {part}, "a row in another part"

    def idle(self, left: tuple[int, ...]) -> None:
        assert not self.queue, "it rests with a step in flight"
        self.rested += left
        self.num_rests += 1

    def close(self) -> None:
        self.closed = True

    def ends_within(self, wait_s: float) -> bool:
        return True

    def collect(self) -> StepResult:
        batch = self.queue.popleft()
        for new in batch.new:
            assert 0 <= new.seq < self.max_seqs
            self.tokens[new.seq] = [int(t) for t in new.token_ids]
            self.slots[new.seq] = [int(s) for s in new.prefix_slots]
            self.pools[new.seq] = isinstance(new.task, PoolTask)
            logprobs_of = None if new.task.is_plain or self.pools[new.seq] else new.task.logprobs
            self.specs[new.seq] = (logprobs_of, new.num_prompt_tokens)
            self.rids[new.seq] = new.rid
            self.lora_ids[new.seq] = new.lora_id
            self.contents[new.seq] = new.content
            # What the cache compares is what the model sees: images in place of their placeholders.
            num_prompt = new.num_prompt_tokens
            seen = np.frombuffer(new.content.cache_key(new.token_ids[:num_prompt].tobytes()), np.int32).tolist()
            self.tokens[new.seq][:num_prompt] = seen
            self.broken.discard(new.seq)
            self.late.discard(new.seq)
            self.drafts[new.seq] = []
        assert len(set(batch.seqs.tolist())) == len(batch.seqs), "a sequence stands twice in a step"
        assert len(set(batch.out_slots.tolist())) == len(batch.out_slots), "a slot is written twice in a step"
        self.check_parts(batch)
        if batch.step in self.fail_steps:
            self.broken.update(batch.seqs.tolist())
            raise ExecutionError("injected")
        encoded, encode_errors = self.encoder.work(batch.encode)
        made: list[list[int]] = [[] for _ in batch.seqs]
        errors: dict[int, str] = {}
        prompt_logprobs: dict[int, LogprobBlock] = {}
        logprobs: dict[int, LogprobBlock] = {}
        drafts: dict[int, int] = {}
        pooled: dict[int, bytes] = {}
        at = 0
        for row, seq in enumerate(batch.seqs.tolist()):
            start, count = int(batch.starts[row]), int(batch.counts[row])
            if seq in self.broken:
                at += count
                made[row] = [0] * int(batch.num_logits[row])
                continue
            tokens, slots = self.tokens[seq], self.slots[seq]
            if start == len(tokens) and seq in self.late:
                at += count  # planned before the step that it sat out was collected
                continue
            if seq in self.late:
                assert start == len(tokens) - 1, "what sat out computes its last token again"
                self.late.discard(seq)
                del slots[start:]
            num_drafts = max(0, int(batch.num_logits[row]) - 1)
            known = len(tokens)
            tokens = tokens + self.drafts[seq][:num_drafts]
            assert len(slots) == start, f"positions {len(slots)} != {start}: computed twice or skipped"
            assert start + count <= len(tokens), "computes a token that is not known"
            self.encoder.check(self.contents[seq], start, count)
            lora_id = self.lora_ids[seq]
            assert lora_id == 0 or lora_id in self.loras, "its adapter has gone"
            history = first_history(0 if self.mixes else self.version, lora_id)
            oldest = min([self.version, *self.oldest[slots].tolist()])
            for position in range(start):
                history = history_hash(history, tokens[position])
                assert self.kv[slots[position]] == history, "the KV of an earlier position is not this sequence's"
            written = []
            for position in range(start, start + count):
                history = history_hash(history, tokens[position])
                slot = int(batch.out_slots[at])
                self.kv[slot], self.oldest[slot] = history, oldest
                slots.append(slot)
                written.append(history)
                at += 1
            self.num_computed += count
            spec, num_prompt = self.specs[seq]
            if spec is not None:
                wanted = [p for p in range(start, start + count) if spec.prompt_start <= p + 1 < num_prompt]
                if wanted:
                    prompt_logprobs[row] = block([tokens[p + 1] for p in wanted], [written[p - start] for p in wanted])
            if self.pools[seq] and start + count == num_prompt:
                pooled[row] = f"pooled {self.rids[seq]}".encode()
            if batch.num_logits[row]:
                assert start + count == len(tokens), "samples before the last known token"
                history = written[known - 1 - start]
                tokens = self.tokens[seq]
                guess, self.drafts[seq] = self.drafts[seq][:num_drafts], []
                if self.sits_out(batch.step, row):
                    self.late.add(seq)
                    continue
                if self.rids[seq] in self.nan_rids:
                    errors[row] = "the model produced NaN"
                    tokens.append(0)  # a step already planned may read this position; its result is thrown away
                    continue
                histories = []
                while len(made[row]) < self.ids_a_row or made[row] == guess[: len(made[row])] != guess:
                    made[row].append(self.sampled(history, oldest))
                    histories.append(history)
                    history = history_hash(history, made[row][-1])
                if guess and made[row] == guess:
                    made[row].append(self.sampled(history, oldest))
                    histories.append(history)
                    history = history_hash(history, made[row][-1])
                tokens += made[row]
                if guess:
                    self.num_verified += 1
                    self.num_hits += len(made[row]) - 1
                    del slots[len(tokens) - 1 :]
                drafts[row] = self._guess(seq, history, oldest, *self.guesses(batch.step, row))
                if spec is not None:
                    logprobs[row] = block(made[row], histories)
        ids = np.array([token for row in made for token in row], np.int32)
        id_starts = np.cumsum([0, *map(len, made)], dtype=np.int32)
        drafts = {row: count for row, count in drafts.items() if count}
        return StepResult(
            batch.step,
            ids,
            id_starts,
            errors,
            logprobs,
            prompt_logprobs,
            pooled=pooled,
            drafts=drafts,
            forward_s=self.seconds(batch),
            encoded=encoded,
            encode_errors=encode_errors,
            encode_s=self.encode_s(batch),
        )

    def sampled(self, history: int, oldest: int) -> int:
        return next_token(mixed(history, self.version, oldest) if self.mixes else history, self.eos_every)

    def _guess(self, seq: int, history: int, oldest: int, count: int, num_right: int) -> int:
        for index in range(count):
            right = self.sampled(history, oldest)
            self.drafts[seq].append(right if index < num_right else 1 - right)
            history = history_hash(history, self.drafts[seq][-1])
        return count


def block(ids: list[int], values: list[int]) -> LogprobBlock:
    return LogprobBlock(np.array(ids, np.int32).tobytes(), np.array(values, np.float32).tobytes())


class Mailbox:
    """Both ends of a channel, in one list."""

    dropped_frames = 0

    def __init__(self) -> None:
        self.messages: deque[object] = deque()

    def send(self, message: object) -> None:
        self.messages.append(message)

    def recv_nowait(self) -> object | None:
        return self.messages.popleft() if self.messages else None

    def recv(self, timeout_s: float) -> object | None:
        return self.recv_nowait()


class Told(Mailbox):
    """What the scheduler tells the tokenizer manager. runs: which samples run, as it has told; these messages are not kept. prompts: by rid, how many
    tokens of the prompt were computed each time that it told."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, bool] = {}
        self.prompts: dict[str, list[int]] = {}

    def send(self, message: object) -> None:
        if isinstance(message, SamplesMoved):
            for part in message.prompts:
                self.prompts.setdefault(part.rid, []).append(part.processed_tokens)
            self.runs |= dict.fromkeys(message.running, True) | dict.fromkeys(message.waiting, False)
        else:
            super().send(message)


class Rig:
    """A scheduler on a fake worker with everything it says collected by rid. num_pages: of each of num_parts parts of the KV cache."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 1,
        radix: bool = True,
        max_running: int = 8,
        chunk: int = 8,
        step_tokens: int = 16,
        overlap: bool = True,
        policy: str = "fcfs",
        eos_every: int = 9,
        max_queued: int = 1000,
        preemption: int = 0,
        ids_a_row: int = 1,
        max_step_s: float = math.inf,
        default_step_s: float = 0.0,
        num_stages: int = 1,
        num_parts: int = 1,
        observer: CacheObserver | None = None,
        whole_prompts: bool = False,
        encoder_rows: int = 0,
        encoder_slices: int = 1,
        whole_images: bool = False,
        tier: Callable[["FakeWorker"], DiskTier] | None = None,
        kv_on_update: str = "flush",
        pin_share: float = 0.25,
        writes_back: bool = False,
        transfer: Callable[["FakeWorker"], PageSource | PageSink] | None = None,
    ) -> None:
        self.inbox, self.out, self.back = Mailbox(), Mailbox(), Told()
        self.now = 0.0
        num_slots = num_parts * num_pages * page_size
        self.worker = FakeWorker(
            num_slots, max_running + 2, eos_every, ids_a_row, in_stages=num_stages > 1, num_parts=num_parts
        )
        self.kv = KVManager(
            [
                KvPart(
                    PageAllocator(num_pages, page_size, first=part * num_pages),
                    RadixCache(page_size, observer) if radix else ChunkCache(),
                )
                for part in range(num_parts)
            ],
            max_running + 2,
        )
        config = SchedulerConfig(
            policy=policy,
            chunk_tokens=chunk,
            step_tokens=step_tokens,
            max_step_s=max_step_s,
            default_step_s=default_step_s,
            max_running=max_running,
            max_queued=max_queued,
            max_steps_in_flight=max(2 if overlap else 1, num_stages),
            num_stages=num_stages,
            eos_token_ids=frozenset([EOS]),
            vocab_size=VOCAB,
            stream_interval=1,
            preemption_threshold=preemption,
            whole_prompts=whole_prompts,
            encoder_rows=encoder_rows,
            encoder_slices=encoder_slices,
            whole_images=whole_images,
            kv_on_update=kv_on_update,
            pin_share=pin_share,
            writes_back=writes_back,
        )
        self.worker.mixes = kv_on_update == "keep"
        self.worker.encoder.num_slices = encoder_slices
        self.worker.encoder.whole_images = whole_images
        self.grammars = FakeGrammars()
        faults = InjectedFaults()
        self.scheduler = Scheduler(
            config,
            self.kv,
            faults.worker(self.worker),
            faults.receiver(self.inbox, self.out),
            self.out,
            self.back,
            self.no_checker,
            clock=lambda: self.now,
            grammars=self.grammars,
            on_admission=faults.on_admission,
            tier=None if tier is None else tier(self.worker),
            transfer=None if transfer is None else transfer(self.worker),
        )
        self.ids: dict[str, list[int]] = {}
        self.finish: dict[str, object] = {}
        self.rows: dict[str, list[object]] = {}
        self.num_logprobs: dict[str, int] = {}

    @staticmethod
    def no_checker(request: TokenizedGenerateReqInput) -> None:
        raise AssertionError("no stop strings here")

    @property
    def state(self):
        return self.scheduler.state

    def add(
        self,
        rid: str,
        prompt: list[int],
        max_new_tokens: int = 16,
        media: tuple[MediaItem, ...] = (),
        spans: tuple[MediaSpan, ...] = (),
        **fields: object,
    ) -> None:
        sampling = {
            name: fields.pop(name)
            for name in ("ignore_eos", "stop_token_ids", "min_new_tokens", "grammar")
            if name in fields
        }
        task = {name: fields.pop(name) for name in ("stream", "logprobs", "return_hidden_states") if name in fields}
        self.inbox.send(
            TokenizedGenerateReqInput(
                rid,
                PromptContent(np.array(prompt, np.int32).tobytes(), media=media, spans=spans),
                SampleTask(ResolvedSamplingParams(max_new_tokens=max_new_tokens, seed=0, **sampling), **task),
                **fields,
            )
        )

    def reply(self, operation, message_id: int):
        """What the scheduler answered to an operation."""
        found = [one for one in self.back.messages if isinstance(one, OperationReply) and one.id == message_id]
        return msgspec.msgpack.decode(found[-1].reply, type=operation.reply)

    def turn(self) -> None:
        """One turn of the loop; then the accounting must hold and every output is taken in."""
        self.now += 0.01
        self.scheduler.run_once()
        pool = self.kv.state()
        assert pool.consistent, pool
        while (message := self.out.recv_nowait()) is not None:
            assert isinstance(message, BatchTokenIDOut)
            for row in message.rows:
                assert row.rid not in self.finish, f"{row.rid} spoke after its end"
                self.rows.setdefault(row.rid, []).append(row)
                self.ids.setdefault(row.rid, []).extend(np.frombuffer(row.ids, np.int32).tolist())
                assert len(self.ids[row.rid]) == row.num_output_tokens
                if row.logprobs is not None:
                    self.num_logprobs[row.rid] = self.num_logprobs.get(row.rid, 0) + len(row.logprobs.values) // 4
                if row.finish is not None:
                    self.finish[row.rid] = row.finish
        live = self.state.by_rid
        self.back.runs = {rid: runs for rid, runs in self.back.runs.items() if rid in live}
        told = {rid for rid, runs in self.back.runs.items() if runs}
        assert told == {req.rid for req in self.state.running if live.get(req.rid) is req}

    @property
    def busy(self) -> bool:
        return bool(
            self.state.running
            or self.state.waiting
            or self.state.not_ready
            or self.state.in_flight
            or self.inbox.messages
        )

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.busy:
                return
            self.turn()
        raise AssertionError(f"not idle after {limit} turns: {self.state.running} {self.state.waiting}")

    def check_idle(self) -> None:
        pool = self.kv.state()
        assert pool.free_tokens + pool.evictable_tokens + self.state.pins.num_tokens == pool.total_tokens
        assert pool.request_slots_free == pool.request_slots_total
        assert self.state.counters.memory_repairs == 0
        assert len(self.state.groups) == 0
        self.kv.flush()
        assert self.kv.state().free_tokens == pool.total_tokens
