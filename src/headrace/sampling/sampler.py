"""The sampler: one id for each row of logits.

Owns the table of sampling state by sequence (row `seq` of the worker's tables) and the order of operations: custom logit processor -> NaN check ->
bias, penalties and masks -> the mask of the grammar -> greedy, or typical-p, temperature, top-k, top-p, min-p and a seeded draw -> logprobs (of the
model's own logits). Does not own the draw (`draw`), the edits (`penalties`), the grammars' masks (`grammar_rows`) or which positions are sampled
(the plan). One instance, used by one thread at a time.

A row's token is a function of its logits, its parameters, its own tokens and (seed, position), never of other rows.
`sample` does not change the logits that it gets.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.errors import ExecutionError
from headrace.kernels import ops
from headrace.log import get_logger
from headrace.messages.outputs import LogprobBlock
from headrace.messages.requests import LogprobSpec, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.draw import DrawTable, Int32Array, TokenMasks, greedy_ids
from headrace.sampling.grammar_rows import NO_MASKS, GrammarRows
from headrace.sampling.logit_processors import LogitContext, LogitProcessor, run_processor
from headrace.sampling.logprobs import token_logprobs
from headrace.sampling.penalties import DevicePenalties, LogitEdits, TokenHistory, edits_logits, edits_only_by_penalties

logger = get_logger(__name__)

BAD_LOGITS = "the model produced NaN or no finite logits"
NOTHING_LEFT = "logit_bias, penalties, bad_words, allowed_token_ids, min_new_tokens and the grammar leave no token that could be sampled"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids: int64[R] on the sampler's device, -1 in rows that have an error or sit the step out. errors, logprobs: by row.

    late: the rows that sit it out, because the mask of their grammar is not ready.
    """

    token_ids: torch.Tensor
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, LogprobBlock] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """State of one sequence. edits and history None, processor "" = not needed."""

    is_greedy: bool
    logprobs: LogprobSpec | None
    edits: LogitEdits | None
    processor: str
    history: TokenHistory | None
    constrained: bool

    @property
    def is_edited(self) -> bool:
        return self.history is not None or self.logprobs is not None

    @property
    def is_plain(self) -> bool:
        """Whether the logits are used unchanged and only a token is needed."""
        return not self.is_edited and not self.constrained


class Sampler:
    """Samples the rows of a step; see the module docstring. edited: sequences whose logits are edited, or read for logprobs, on the host.

    grammars: the constrained sequences; before the layers of a step run, its `begin` is called with what `sample`, or its `ready` and `pick_allowed`,
    will be called with. penalties: if given, applies the penalties of sequences without other edits.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seqs: int,
        device: torch.device | str,
        processors: Mapping[str, LogitProcessor],
        penalties: DevicePenalties | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._processors = dict(processors)
        self._table: list[_Sequence | None] = [None] * max_seqs
        self._draws = DrawTable(max_seqs)
        self._penalties = penalties
        self.grammars = GrammarRows(vocab_size)
        self.edited: set[int] = set()

    def add(self, seq: int, new: NewSequence) -> None:
        """Put `new`, with the outputs that it already has (after a retraction), in row `seq`, replacing the old content."""
        task = new.task
        assert isinstance(task, SampleTask), "it samples"
        params = task.params
        history = None
        if self._penalties is not None:
            self._penalties.discard(seq)
        if self._penalties is not None and edits_only_by_penalties(task, new):
            self._penalties.set(seq, params, new.num_prompt_tokens)
        elif edits_logits(params) or task.custom_logit_processor:
            history = TokenHistory(new.token_ids, new.num_prompt_tokens)
        self._draws.set(seq, params)
        self._table[seq] = _Sequence(
            is_greedy=params.is_greedy,
            logprobs=task.logprobs,
            edits=(
                LogitEdits(params, new, history, self.vocab_size)
                if history is not None and edits_logits(params)
                else None
            ),
            processor=task.custom_logit_processor,
            history=history,
            constrained=new.grammar is not None,
        )
        self.grammars.add(seq, new)
        if self._state(seq).is_edited:
            self.edited.add(seq)
        else:
            self.edited.discard(seq)

    def depends_on_ids(self, seq: int) -> bool:
        """Whether what the sequence samples depends on its tokens before, beside the logits, or `sample` is to be told of each."""
        return not self._state(seq).is_plain or self._penalises([seq])

    def all_greedy(self, seqs: Int32Array, constrained: Sequence[int] = ()) -> bool:
        """Whether each of these sequences takes the most likely token of the unedited logits, except for those that a grammar constrains."""
        return self._draws.all_greedy(_without(constrained, seqs)) and not self._penalises(seqs)

    def pick(
        self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array, constrained: Sequence[int] = ()
    ) -> torch.Tensor:
        """Like `sample`, for sequences that are not `edited`, without waiting for the device: int64[R] on it, -1 where `sample` reports an error.
        May edit `logits`. constrained: rows that are left to `pick_allowed`; they get any id, or -1."""
        if self._penalties is not None and self._penalises(seqs):
            self._penalties.apply(logits, seqs, positions)
        if self._draws.all_greedy(_without(constrained, seqs)):
            return greedy_ids(logits)
        return self._draws.draw(logits, seqs, positions, _without(constrained, np.arange(len(seqs), dtype=np.int32)))

    def guess(self, logits: torch.Tensor, seqs: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """What these sequences would draw from logits float32[R, V] of another model: with the same filters and the same random numbers, without
        edits, grammars and errors. int64[R] on the device."""
        return self._draws.draw(logits, seqs, positions, range(len(seqs))).clamp(min=0)

    def pick_allowed(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, seqs: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """The ids of constrained rows, like `pick`: int64[n] on the device, -1 where the model allows none of the mask's tokens.

        logits: float32[R, V], as `pick` left them. rows: int64[n] in ascending order, words: int32[n, V / 32 rounded up], both on the device. seqs,
        positions: of these rows. The tokens are to be given to `grammars.acceptors`.
        """
        wanted = logits if len(rows) == len(logits) else logits.index_select(0, rows)
        return self._draws.draw(wanted, seqs, positions, range(len(rows)), (words, torch.arange(len(rows))))

    def takes_largest(self, seqs: Iterable[int]) -> bool:
        """Whether each of these sequences takes its most likely token, and nothing but its id and its logit is needed. Penalties that are applied
        on the device do not count."""
        return all(state.is_plain and state.is_greedy for state in map(self._state, seqs))

    def take_largest(self, token_ids: torch.Tensor, largest: Iterable[float]) -> SamplerOutput:
        """What `sample` gives for rows whose sequences `takes_largest`.

        token_ids: int64[R], the most likely token of each row, -1 if its logits have a NaN; becomes the output's. largest: its logit, by row.
        """
        bad = [
            row
            for row, (i, peak) in enumerate(zip(token_ids.tolist(), largest, strict=True))
            if i < 0 or not math.isfinite(peak)
        ]
        if bad:
            token_ids[bad] = -1
        return SamplerOutput(token_ids, dict.fromkeys(bad, BAD_LOGITS))

    def sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[int],
        positions: Sequence[int],
        num_outputs: Sequence[int],
        rids: Sequence[str],
    ) -> SamplerOutput:
        """Sample row r of `logits` for sequence seqs[r].

        logits: float32[R, V]. positions: index that the sampled token will have in its sequence. num_outputs: outputs before it.
        A row that cannot be sampled has an entry in `errors` and does not affect the others. `grammars.begin` has been called with the same rows.
        Going back to an earlier position (a step that is run again) discards what was sampled from there on.
        """
        assert logits.dtype == torch.float32, logits.dtype
        assert logits.shape == (len(seqs), self.vocab_size), (logits.shape, len(seqs), self.vocab_size)
        if not len(seqs):
            return SamplerOutput(torch.empty(0, dtype=torch.int64, device=self._device))
        states = [self._state(seq) for seq in seqs]
        source = logits
        if self._penalties is not None and self._penalises(seqs):
            source = logits.clone()
            self._penalties.apply(source, seqs, positions)
        if self._device.type == "cpu" and self.takes_largest(seqs):
            # The result of `_pick` without its tensor operations.
            token_ids = ops.argmax(source)
            logit = source.numpy().item
            return self.take_largest(token_ids, [logit(row, i) for row, i in enumerate(token_ids.tolist())])
        masks = self.grammars.ready(seqs, positions) if any(state.constrained for state in states) else NO_MASKS
        errors = dict(masks.errors)
        left_out = {*masks.late, *masks.errors}
        as_is = [row for row, state in enumerate(states) if state.history is None and row not in left_out]
        token_ids = self._pick(source, seqs, as_is, positions, errors, BAD_LOGITS, masks.tokens)
        if edited := [row for row, state in enumerate(states) if state.history is not None and row not in left_out]:
            # On the CPU with numpy: one thread copies faster than several can be synchronised. A maximum is NaN where the row has one.
            is_cpu = self._device.type == "cpu"
            copies = torch.from_numpy(logits.numpy()[edited]) if is_cpu else logits[edited]
            maxima = torch.from_numpy(copies.numpy().max(axis=1)) if is_cpu else copies.amax(dim=1)
            passed: list[int] = []
            for i, (row, healthy) in enumerate(zip(edited, maxima.isfinite().tolist(), strict=True)):
                # A grammar whose output is complete ends it, whatever the minimum.
                count = sys.maxsize if row in masks.only_end else num_outputs[row]
                error = self._edit(copies[i], healthy, states[row], positions[row], count, rids[row])
                if error:
                    errors[row] = error
                else:
                    passed.append(i)
            tokens = None if masks.tokens is None else masks.tokens.of(edited)
            failed: dict[int, str] = {}
            own_seqs, own_positions = [seqs[row] for row in edited], [positions[row] for row in edited]
            token_ids[edited] = self._pick(copies, own_seqs, passed, own_positions, failed, NOTHING_LEFT, tokens)
            errors.update((edited[i], message) for i, message in failed.items())
        logprobs = self._take(token_ids, logits, seqs, states, {*errors, *masks.late})
        return SamplerOutput(token_ids, errors, logprobs, masks.late)

    def _take(
        self,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        seqs: Sequence[int],
        states: Sequence[_Sequence],
        without: Set[int],
    ) -> dict[int, LogprobBlock]:
        """Tell the rows' states which tokens were sampled, except for the rows `without` one. Returns the logprobs that they want."""
        logprobs: dict[int, LogprobBlock] = {}
        if all(state.is_plain for state in states):
            return logprobs
        host_ids = token_ids.tolist()
        for row, state in enumerate(states):
            if row in without:
                continue
            if state.history is not None:
                state.history.append(host_ids[row])
                if state.edits is not None:
                    state.edits.append(host_ids[row])
            if state.constrained:
                self.grammars.accept(seqs[row], host_ids[row])
            if state.logprobs is not None:
                logprobs[row] = token_logprobs(logits[row], host_ids[row], state.logprobs)
        return logprobs

    def _penalises(self, seqs: Sequence[int] | Int32Array) -> bool:
        return self._penalties is not None and self._penalties.any(seqs)

    def _state(self, seq: int) -> _Sequence:
        state = self._table[seq]
        assert state is not None, f"sequence {seq} was never added"
        return state

    def _pick(
        self,
        logits: torch.Tensor,
        seqs: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        errors: dict[int, str],
        message: str,
        masks: TokenMasks | None,
    ) -> torch.Tensor:
        """int64[R]: ids in `rows`, -1 in the others and in those without a finite maximum, which get `message`."""
        token_ids = self._draws.draw(logits, seqs, positions, rows, masks)
        if len(rows) < len(seqs) or int(token_ids.min()) < 0:
            host_ids = token_ids.tolist()
            errors.update((row, message) for row in rows if host_ids[row] < 0)
        return token_ids

    def _edit(
        self, row: torch.Tensor, healthy: bool, state: _Sequence, position: int, num_outputs: int, rid: str
    ) -> str:
        """Run the processor and the edits on row float32[V], in place. Returns "", or the message with which the sample ends.

        healthy: the model's logits have a finite maximum and no NaN.
        """
        try:
            self._edit_row(row, healthy, state, position, num_outputs, rid)
        except ExecutionError as error:
            return error.message
        except Exception:  # an error ends only this sample
            logger.exception("editing the logits of %s failed", rid)
            if state.processor:
                return f"the custom logit processor {state.processor!r} failed"
            return "the sampling parameters could not be applied to the logits"
        return ""

    def _edit_row(
        self, row: torch.Tensor, healthy: bool, state: _Sequence, position: int, num_outputs: int, rid: str
    ) -> None:
        history = state.history
        assert history is not None
        if position < history.num_tokens:
            history.truncate(position)
            if state.edits is not None:
                state.edits.rewind()
        if position > history.num_tokens:  # the step was in flight when the previous token failed
            raise ExecutionError(
                f"token {position} cannot be sampled: only {history.num_tokens} tokens before it are known"
            )
        if state.processor:
            processor = self._processors.get(state.processor)
            if processor is None:
                raise ExecutionError(f"there is no custom logit processor {state.processor!r}")
            result = run_processor(
                state.processor, processor, LogitContext(rid, history.prompt, history.outputs), row.clone()
            )
            row.copy_(result)
            if not bool(row.amax().isfinite()):
                raise ExecutionError(f"the custom logit processor {state.processor!r} returned NaN or no finite logits")
        elif not healthy:
            raise ExecutionError(BAD_LOGITS)
        if state.edits is not None:
            state.edits.apply(row, num_outputs)


def _without(rows: Sequence[int], values: Int32Array) -> Int32Array:
    """`values` but for those at `rows`."""
    return np.delete(values, rows) if rows else values
