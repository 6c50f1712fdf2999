"""One sample in the scheduler: its tokens, how many are computed, and the resources it owns.

A request's computed tokens catch up with its known tokens. Prefill, a chunk, decode and recomputation after a retraction differ
only in how many tokens a step computes.

    tokens:   [0 ............ num_computed ...... num_scheduled ...... num_tokens ... num_tokens + num_sampling)
               KV written,     a step in flight     not planned          sampled by steps in flight: their position is
               committed       computes these       yet                  known, their value is not

Tokens that the worker has guessed (`num_drafts`) come after the known ones. A step that computes them samples from each of their positions what
would have been sampled without them; those that were right are known then. Such a request is in one step at a time, since it is not known before
how many will be right.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace.cache.base import Lease, Weights
from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.messages.grammar import CompiledGrammar
from headrace.messages.outputs import (
    CacheMiss,
    FinishReason,
    LogprobBlock,
    PromptPart,
    SampleEvent,
    SampleEventKind,
    SpeculationCounts,
    TokenVersions,
)
from headrace.messages.requests import EngineTask, TokenizedGenerateReqInput
from headrace.messages.step import Int32Array

MAX_EVENTS = 128
"""Most events to record per sample."""

FORCED_INTERVAL = 50
"""Requests that do not stream still report every N tokens, so that their partial text is available when they are aborted."""

EXPECTING = 6
"""After a step with drafts of which one was right, so many steps of a request wait for the one before. Those that are planned earlier cannot have
drafts, and drafts come in runs; waiting costs a twentieth of a step, too much for drafts that are mostly wrong."""


class StopMatch(Protocol):
    """A stop string or pattern that the last pushed token completed."""

    @property
    def matched(self) -> str:
        """The stop string or pattern as in the request."""


class StopChecker(Protocol):
    """Watches the text of one sample for its stop strings. Created by the owner of the tokenizer, see `StopCheckers`."""

    def push(self, token_id: int) -> StopMatch | None:
        """Feed the next output token. Returns the earliest stop that is now complete, or None."""


StopCheckers = Callable[[TokenizedGenerateReqInput], StopChecker]
"""Makes a StopChecker for a request that has stop strings."""


@dataclass(slots=True, eq=False)
class Req:
    """Mutable state of one sample. `asked` is the request as it arrived; the rest belongs to the scheduler.

    seq: row in the worker's tables while admitted, else -1. part: of the KV cache, while admitted. pages: KV pages in order of position.
    kv_weights: the oldest that any of that KV depends on.
    tail_page: one beyond those in the tree that has the KV of the prompt's last tokens, before it is admitted; -1 = none.
    pages[:num_tree_pages] were leased from or given to the cache, except those in `duplicate_pages`, which are ours because another
    request inserted the same tokens first. pages[num_tree_pages:] are ours. token_ids: prompt and committed outputs, int32.
    end_token_ids: any of these ends the request; so does having max_tokens tokens, prompt included.
    report_interval: new tokens that make a chunk due. is_prefill_only: it computes its prompt and makes no token.
    num_sent_tokens: known tokens that the client has, its prompt among them.
    is_plain: tokens are all that comes out of it, no logprobs and no hidden states.
    grammar: what its output must match, once compiled. skips_step: a step did not sample it; it is rewound when no step in flight computes it.
    pooled: float32[n] bytes, the result of a `PoolTask`, once its prompt is computed.
    versions: of its tokens, where they change, that are still to be sent.
    num_drafts: tokens after the known ones that the worker has guessed. num_expecting: steps that wait for the one before, since drafts may come.
    """

    asked: TokenizedGenerateReqInput
    arrived_s: float
    order: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    end_token_ids: frozenset[int]
    max_tokens: int
    report_interval: int
    is_prefill_only: bool
    is_plain: bool
    stop_checker: StopChecker | None = None
    grammar: CompiledGrammar | None = None
    skips_step: bool = False
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0
    num_in_flight: int = 0
    num_drafts: int = 0
    num_expecting: int = 0
    seq: int = -1
    part: int = 0
    kv_weights: Weights = field(default_factory=Weights)
    pages: list[int] = field(default_factory=list)
    num_tree_pages: int = 0
    duplicate_pages: list[int] = field(default_factory=list)
    lease: Lease | None = None
    tail_page: int = -1
    finish: FinishReason | None = None
    keep_kv: bool = True
    # counts reported to the client
    cached_tokens: int = -1
    cache_miss: CacheMiss | None = None
    num_retractions: int = 0
    num_preemptions: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    first_scheduled_s: float = 0.0
    events: list[SampleEvent] = field(default_factory=list)
    # what has been sent
    num_sent_tokens: int = 0
    emitted: bool = False
    pending_logprobs: list[LogprobBlock] = field(default_factory=list)
    prompt_logprobs: list[LogprobBlock] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    pending_hidden: list[bytes] = field(default_factory=list)
    num_hidden_rows: int = 0
    pooled: bytes = b""
    versions: tuple[TokenVersions, ...] = ()
    _version: tuple[Weights, Weights, str, str] | None = None

    @classmethod
    def from_input(
        cls,
        asked: TokenizedGenerateReqInput,
        now_s: float,
        order: int,
        eos_token_ids: frozenset[int],
        stream_interval: int,
    ) -> "Req":
        """A request that has just arrived. Outputs of an earlier incarnation are kept, as after a retraction.

        An incomplete last token is left out here and refused at admission.
        """
        task = asked.task
        prompt = _whole_tokens(asked.content.token_ids)
        req = cls(
            asked=asked,
            arrived_s=now_s,
            order=order,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            end_token_ids=task.end_token_ids(eos_token_ids),
            # A prefill-only request never gets that far.
            max_tokens=len(prompt) + max(1, task.max_new_tokens),
            report_interval=(task.stream_interval or stream_interval) if task.stream else FORCED_INTERVAL,
            is_prefill_only=task.max_new_tokens == 0,
            is_plain=task.is_plain,
        )
        if asked.output_ids:
            req.token_ids += _whole_tokens(asked.output_ids)
            # Delivered outputs came with the hidden states of all tokens before them.
            req.num_hidden_rows = req.num_tokens - 1
        req.num_sent_tokens = req.num_tokens
        return req

    @property
    def rid(self) -> str:
        return self.asked.rid

    @property
    def task(self) -> EngineTask:
        return self.asked.task

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed outputs."""
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it has taken part in a step, here (it may wait again) or in an earlier scheduler."""
        return self.cached_tokens >= 0 or bool(self.asked.output_ids)

    @property
    def num_to_schedule(self) -> int:
        """Number of tokens that a step planned now could compute: known tokens, and those known by the time it runs, but no drafts."""
        num_known = len(self.token_ids) + self.num_sampling
        if self.finish is not None or num_known >= self.max_tokens or self.skips_step:
            return 0
        if self.num_drafts and self.num_in_flight:
            return 0
        return num_known - self.num_scheduled

    @property
    def num_new_tokens_left(self) -> int:
        return self.task.max_new_tokens - self.num_outputs

    @property
    def is_prefilling(self) -> bool:
        """True until its known tokens are computed."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def shares_kv(self) -> bool:
        """Whether other requests may use its KV."""
        return self.asked.content.has_tokens

    def cache_key(self, num_tokens: int | None = None) -> bytes:
        """What the prefix cache compares of the first `num_tokens` known tokens (None = all): TOKEN_BYTES bytes a token."""
        tokens = self.token_ids if num_tokens is None else self.token_ids[:num_tokens]
        return self.asked.content.cache_key(tokens.tobytes())

    @property
    def match_limit(self) -> int:
        """Length of the longest cached prefix that it may use, in tokens."""
        # One token must be computed even on a full hit, or there are no logits to sample.
        limit = self.num_tokens - 1
        if not self.is_plain and self.prompt_logprob_start < self.num_prompt_tokens:
            # The logprob of token i comes from the logits at i - 1.
            limit = min(limit, self.prompt_logprob_start - 1)
        if self.task.reads_all:
            limit = min(limit, self.num_hidden_rows)
        return limit if self.shares_kv else 0

    @property
    def prompt_logprob_start(self) -> int:
        """First prompt token whose logprob is still to be computed; `num_prompt_tokens` if none is."""
        # Token 0 has no logprob: nothing comes before it.
        return min(self.num_prompt_tokens, max(1, self.task.prompt_logprob_start) + self.num_prompt_logprobs)

    def rewind(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is what it has now, and no drafts. No step in flight computes it."""
        self.num_computed = self.num_scheduled = num_tokens
        self.num_drafts = self.num_expecting = 0

    def join_step(self, count: int, at_s: float) -> int:
        """A step is planned, at `at_s`, that computes its next `count` tokens. Returns the number of logits that it needs from the step.

        It samples when the step computes the last of the tokens that are known by the time the step runs, and from each draft after them.
        """
        self.num_in_flight += 1
        self.num_scheduled = num_scheduled = self.num_scheduled + count
        num_beyond = num_scheduled - len(self.token_ids) - self.num_sampling
        self.num_drafts = num_beyond if num_beyond > 0 else 0
        if count - self.num_drafts > 1 or num_scheduled - count < self.num_prompt_tokens:
            self.note("chunk", at_s, count)
        if self.is_prefill_only or num_beyond < 0:
            return 0
        self.num_sampling += 1
        return self.num_drafts + 1

    def leave_step(self, num_computed: int, num_logits: int) -> None:
        """The oldest of the steps that it joined has ended, which was to give `num_logits` logits.

        num_computed: tokens whose KV there is now, drafts included; a request that has ended meanwhile does not count them.
        """
        self.num_in_flight -= 1
        self.num_sampling -= num_logits > 0
        if self.finish is None:
            # After a step that did not sample it, the steps in flight compute tokens that do not exist.
            self.num_computed = min(num_computed, len(self.token_ids))

    def skip_step(self) -> None:
        """A step that it has just left was to sample it and did not. Its last token is computed again, for its logits.

        Neither did the steps planned meanwhile, which were to sample the tokens after it.
        """
        self.skips_step = self.num_in_flight > 0
        if not self.skips_step:
            self.rewind(len(self.token_ids) - 1)

    def label(self, weights: Weights, start: int) -> None:
        """Its tokens from output `start` on, or its pooled result, were computed with these weights."""
        kv = self.kv_weights
        version = weights, kv, weights.name, kv.name
        if version != self._version:
            self._version = version
            self.versions += (TokenVersions(start, weights.name, kv.name, weights.number - kv.number),)

    def note(self, kind: SampleEventKind, at_s: float, num_tokens: int) -> None:
        """Record an event; at most MAX_EVENTS."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(SampleEvent(kind, at_s, num_tokens))

    def prompt_part(self) -> PromptPart:
        return PromptPart(self.asked.rid, min(self.num_computed, self.num_prompt_tokens), max(0, self.cached_tokens))

    def tokens(self) -> Int32Array:
        """Copy of the known tokens, int32[num_tokens]."""
        return np.array(self.token_ids, dtype=np.int32)

    def take_drafts(self, num_right: int, num_computed: int, num_drafts: int) -> None:
        """A step that it has just left has computed `num_computed` drafts, of which `num_right` were right, and has `num_drafts` new ones.

        The KV of drafts that were wrong is overwritten: the next step begins after those that were right.
        """
        num_expecting = max(0, self.num_expecting - 1)
        if num_computed:
            self.speculation = self.speculation.after_step(num_computed, num_right)
            self.rewind(len(self.token_ids) - 1)
            num_expecting = EXPECTING if num_right else num_expecting
        self.num_drafts, self.num_expecting = num_drafts, num_expecting

    @property
    def waits_for_drafts(self) -> bool:
        """Whether its next step is planned when the last one has ended, which has, or may have, guessed tokens for it."""
        return bool(self.num_drafts or self.num_expecting)

    def accept(self, ids: Sequence[int]) -> FinishReason | None:
        """Commit output tokens up to the one that ends the request, if any does; those after it are dropped.

        It ends by a stop string, then a stop token or EOS, then its length.
        Returns the finish reason, or None. Raises whatever the stop checker raises; tokens up to there are committed.
        """
        for token_id in ids:
            self.token_ids.append(token_id)
            if self.stop_checker is not None and (match := self.stop_checker.push(token_id)) is not None:
                return FinishReason("stop", matched=match.matched)
            if token_id in self.end_token_ids:
                return FinishReason("stop", matched=token_id)
            if len(self.token_ids) >= self.max_tokens:
                return FinishReason("length", length=self.num_outputs)
        return None


def _whole_tokens(data: bytes) -> "array[int]":
    """int32[n] of little-endian bytes; the rest of an incomplete last token is left out."""
    return array("i", data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])


class SampleGroups:
    """How many samples of each prompt are live, and what was cached of the prompt before the first of them ran.

    A group is known while it has live samples. Requests without a group are ignored.
    """

    def __init__(self) -> None:
        self._num_live: dict[str, int] = {}
        self._cached_tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._num_live)

    def arrive(self, req: Req) -> None:
        if group := req.asked.group:
            self._num_live[group] = self._num_live.get(group, 0) + 1

    def leave(self, req: Req) -> None:
        group = req.asked.group
        if not group:
            return
        self._num_live[group] -= 1
        if not self._num_live[group]:
            del self._num_live[group]
            self._cached_tokens.pop(group, None)

    def begin(self, req: Req, cached_tokens: int) -> int:
        """A sample takes part in a step for the first time, with `cached_tokens` prompt tokens from the cache.

        Returns how many of them were cached before its group began: later samples hit the KV that the first one has just computed.
        """
        group = req.asked.group
        return self._cached_tokens.setdefault(group, cached_tokens) if group else cached_tokens

    def has_begun(self, req: Req) -> bool:
        """Whether a sample of its group has taken part in a step."""
        return req.asked.group in self._cached_tokens
