"""The interface between the scheduler and a worker: the plan of a step, its result, and the worker's protocol.

The worker keeps a table of sequences (`seq` = row). A sequence's known tokens live in the worker's token buffer: prompt tokens are
written when it is added, and each sampled token is written at its position by the step that samples it. A plan therefore names
positions, not tokens, and the next step can be planned before the last one's tokens are known to the host (overlap).
Plain dataclasses with numpy arrays: both sides are in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.messages.control import ExpertCountsReply, ExpertCountsReq, FaultReq
from headrace.messages.grammar import CompiledGrammar
from headrace.messages.media import MediaItem
from headrace.messages.operations import StartProfileBody
from headrace.messages.outputs import LogprobBlock
from headrace.messages.requests import EngineTask, PromptContent
from headrace.messages.weights import Adapters, WeightExecutor

Int32Array = npt.NDArray[np.int32]

MOST_VERIFIED = 64
"""Most logits of a step's rows of running requests, where some of them have drafts. Prompts that end in the step add one each."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters (or, after a retraction, re-enters) row `seq` of the worker's tables.

    token_ids: int32[num_tokens], the prompt and the outputs so far. prefix_slots: int32[m], KV slots of the cached prefix, m < num_tokens.
    task: that of the request, whose prompt logprobs begin with the first that is still missing. end_token_ids: impossible before `min_new_tokens`
    outputs. content: the prompt, as in the request. lora_id: its adapter, 0 = none.
    grammar: what its outputs must match, those so far included. namespace: of those with which it shares cached prefixes.
    """

    seq: int
    rid: str
    token_ids: Int32Array
    num_prompt_tokens: int
    prefix_slots: Int32Array
    task: EngineTask
    end_token_ids: tuple[int, ...]
    content: PromptContent
    lora_id: int = 0
    grammar: CompiledGrammar | None = None
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """What a step does with the media encoder, before its rows.

    epoch: with another one than before, all outputs and the batch of the one before are dropped first. begin: items that are encoded together from
    now on, as one batch; the last one is done. num_slices: how many slices of the batch's work the step computes. drop: keys of outputs that are
    needed no more.
    """

    epoch: int = 0
    begin: tuple[MediaItem, ...] = ()
    num_slices: int = 0
    drop: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelWorkerBatch:
    """The plan of one step, in host integers. Row r computes positions starts[r] .. starts[r]+counts[r]-1 of sequence seqs[r].

    num_logits: int32[num_rows]. 0: the row only fills the KV cache. 1: the last position's logits are sampled, and the token is
    written at position starts[r]+counts[r]. k + 1: the row's last k tokens are drafts of the worker (`StepResult.drafts`); positions are sampled
    from the one before them on, as long as each token is the draft that stands there, and one more.
    out_slots: int32[sum(counts)], the KV slots to write, row after row; numbered over all parts of the KV cache.
    new: sequences to add before the step runs. A row `seq` may be reused by `new` once its old sequence is in no later step.
    part_starts: with a KV cache in parts, rows part_starts[p] .. part_starts[p+1]-1 have their KV in part p; empty if there is only one.
    left: rows whose sequences are in no later step, except that `new` may reuse them: what they hold may be large.
    faults: test hook, see FaultReq. encode: work for the encoder of a model that has one; such a plan may have no rows.
    """

    step: int
    new: tuple[NewSequence, ...]
    seqs: Int32Array
    starts: Int32Array
    counts: Int32Array
    num_logits: Int32Array
    out_slots: Int32Array
    left: tuple[int, ...] = ()
    part_starts: tuple[int, ...] = ()
    faults: tuple[FaultReq, ...] = ()
    encode: EncodeWork | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.out_slots)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Arrays and maps are by row of the plan.

    ids: int32[num_ids], the sampled tokens of all rows. id_starts: int32[num_rows + 1]; the ids of row r are ids[id_starts[r] : id_starts[r + 1]],
    none if the row does not sample or has an error. They are the tokens at positions starts[r]+counts[r]-num_logits[r]+1 and following. A row
    that was to sample, but has neither ids nor an error, sat the step out (its grammar's mask was not ready): its last position is to be
    computed again.
    drafts: row -> how many tokens the worker guesses to follow its ids. They stand in the token buffer until the sequence is in another step.
    errors: row -> message; only that sample ends, with a 500.
    logprobs: row -> block of its ids. prompt_logprobs: row -> block of the prompt tokens whose logits this
    chunk computed: chunk positions p with prompt_start <= p + 1 < num_prompt_tokens give the entry of token p + 1.
    hidden_states: row -> float32[counts[r], hidden_size] bytes (last layer, after the final norm).
    pooled: row -> float32[n] bytes, the result of a row with a `PoolTask` whose prompt this step has completed.
    forward_s: seconds the step took on the worker. masks_s: seconds that were spent on masks of grammars since the last one's result.
    encoded: keys of the items whose outputs are complete now. encode_errors: key -> message, of items that could not be encoded. encode_s: seconds
    of `forward_s` that the encoder took.
    """

    step: int
    ids: Int32Array
    id_starts: Int32Array
    errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, LogprobBlock] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobBlock] = field(default_factory=dict)
    hidden_states: Mapping[int, bytes] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    drafts: Mapping[int, int] = field(default_factory=dict)
    forward_s: float = 0.0
    masks_s: float = 0.0
    encoded: tuple[bytes, ...] = ()
    encode_errors: Mapping[bytes, str] = field(default_factory=dict)
    encode_s: float = 0.0


def one_id_a_row(token_ids: Sequence[int]) -> tuple[Int32Array, Int32Array]:
    """`StepResult.ids` and `id_starts` for rows with one id or none. token_ids: by row, -1 = none."""
    if -1 not in token_ids:
        return np.array(token_ids, np.int32), _one_each(len(token_ids))
    has_id = [token_id >= 0 for token_id in token_ids]
    ids = [token_id for token_id in token_ids if token_id >= 0]
    return np.array(ids, np.int32), np.array([0, *accumulate(has_id)], np.int32)


def ragged(ids_of_rows: Sequence[Sequence[int]]) -> tuple[Int32Array, Int32Array]:
    """`StepResult.ids` and `id_starts` for rows with any number of ids."""
    starts = [0, *accumulate(map(len, ids_of_rows))]
    if starts[-1] == len(ids_of_rows) and all(map(len, ids_of_rows)):
        return np.array([ids[0] for ids in ids_of_rows], np.int32), _one_each(len(ids_of_rows))
    return np.array([token_id for ids in ids_of_rows for token_id in ids], np.int32), np.array(starts, np.int32)


@lru_cache(maxsize=512)
def _one_each(num_rows: int) -> Int32Array:
    """0, 1, ..., num_rows. Kept, because calling numpy costs most steps 20 us: the caches hold weights."""
    id_starts = np.arange(num_rows + 1, dtype=np.int32)
    id_starts.setflags(write=False)
    return id_starts


SUMMED_BYTES = 4096
Sums = npt.NDArray[np.uint64]


def sums_of(data: memoryview) -> Sums:
    """Of the 64-bit words of each whole SUMMED_BYTES: uint64[len(data) // SUMMED_BYTES]."""
    whole = len(data) // SUMMED_BYTES * SUMMED_BYTES
    sums: Sums = np.add.reduce(np.frombuffer(data[:whole], np.uint64).reshape(-1, SUMMED_BYTES // 8), axis=1)
    return sums


class PageTransfer(Protocol):
    """Copies pages of KV out of the pool and into it, beside the steps; of any thread, one call at a time. page_bytes: of a page, all layers.

    The caller holds the pages: no step writes one that is read, or uses one that is written. What a page's bytes mean depends on `fingerprint`.
    """

    @property
    def page_bytes(self) -> int: ...

    def fingerprint(self) -> str:
        """Of all that KV depends on beside tokens and adapters: every byte of the weights as they are now, the layout, the arithmetic."""

    def facts(self) -> dict[str, str]:
        """By name, what two servers must have in common to go on with each other's KV: the weights, the layout, the arithmetic.

        Where their layouts differ, `disaggregation.sink.Layout` reads them: `page`, `unit`, `ranks`. `checkpoint`: of the weights, of any ranks.
        `draft`: what the KV of a draft model depends on, which servers need not have in common; `draft_page`: its layers, and its bytes of a page.
        """

    def adapter(self, lora_id: int) -> str:
        """Of an adapter: hash of every byte of its files; empty if it is not loaded."""

    def host_memory(self, num_bytes: int) -> memoryview:
        """Memory that pages may be copied from and to without a detour: pinned, where the pool is a GPU's."""

    def read(self, pages: Sequence[int]) -> memoryview:
        """The bytes of pages, one after the other."""

    def read_into(self, pages: Sequence[int], into: memoryview) -> Sums:
        """The same into memory of that length, which another process reads. Returns their sums (`sums_of`)."""

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """Fill pages with these bytes."""


class Worker(Protocol):
    """The model as the scheduler sees it. Steps run in the order of `submit`; results come in that order.

    weights: prepares changes of the weights, which are installed with no step in flight. loras: the adapters that sequences may use.
    pages: None where KV cannot be copied: `pages_refusal` says why.
    profile, count_experts: called by the thread that submits; they act between two steps and cover those submitted until then.
    """

    pages: PageTransfer | None
    pages_refusal: str

    @property
    def weights(self) -> WeightExecutor: ...

    @property
    def loras(self) -> Adapters: ...

    def profile(self, request: StartProfileBody | None) -> str:
        """Start a profile, or stop it (None). Returns a line for the operator. Raises RequestError."""

    def count_experts(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start, stop or return the counts. Raises RequestError."""

    def submit(self, batch: ModelWorkerBatch) -> None:
        """Start (or run) a step. With overlap it returns before the step has run."""

    def ends_within(self, wait_s: float) -> bool:
        """Wait so long at most for the oldest step. Whether `collect` would return at once, or that cannot be said."""

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it. Raises ExecutionError when the whole step failed (its rows have no results)."""

    def idle(self, left: tuple[int, ...]) -> None:
        """No step is in flight, and none has been for a while: give back what is not needed until the next. left: as in a plan; may be empty."""

    def close(self) -> None:
        """Release threads and memory."""
