"""Whether a model keeps its quality in the quantised KV cache that goes with its weights: measured once, on one short text.

Owns the text, the measure, the limit, and how ranks agree. Does not own which format goes with which weights (`config.resolve`), nor the
file that keeps the result (`execution.weight_files`). Runs once at start, in every rank, after the weights are loaded.

What integers cost depends on the model. Keys with a large constant part (the biases of Qwen2), or with channels that are far larger than
the others (OPT, Phi), set the one scale of their head, and what tells tokens apart is rounded away. So the text is computed with several
caches: in float32, in the dtype of the weights, and in the integers that go with them. The distance of a cache is

    mean |logprob(cache) - logprob(float32)|

over the positions of the text and, at each, over the next tokens as float32 expects them: that has half the standard error of the mean over
the tokens that follow. Integers add their distance less that of the dtype of the weights, which is not zero: activations that are rounded to
integers answer any change of a key with noise, which no cache can help, and which is nearly as large as the error that their rounding brings. Of
a model that makes vectors, the error of a token is the relative distance of its last hidden state.

The second half of the text is computed only where it may change the choice: not if in the first one integers add more than twice the
limit, so that the whole is over it whatever the rest adds, nor if they add less than a quarter of it.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from headrace.attention.base import AttentionBackend, OwnRows
from headrace.config.resolve import with_kv_cache
from headrace.distributed.rank import Rank
from headrace.execution.forward_batch import PAGE, window_rows
from headrace.execution.setup import Setup
from headrace.execution.weight_files import WeightCache
from headrace.garbage import give_back_free_memory
from headrace.log import get_logger
from headrace.models.spec import CausalLM

_logger = get_logger(__name__)

Tokenize = Callable[[str], Sequence[int]]
"""The tokens of a text, as a prompt begins with them; none if the model has no tokenizer."""

MOST_ADDED = 0.02
"""Most that integers may add to the error of a token's logprob, in nats, or of a vector, relative to it."""

NUM_TOKENS = 128
"""Of the text, at most: a prompt of that length for each cache, or of half of it, is what a measurement costs."""

_SURELY_OVER, _SURELY_BELOW = 2.0, 0.25
"""Times `MOST_ADDED`: what the first half of the text adds where the second one is not computed."""

TEXT = """中国的首都是北京,它位于华北平原的北部。城市有两千多万居民,三千年的历史。

The river rises in the hills above the old town and turns north after twelve miles. In 1847 a mill was built there; it ground corn for \
forty years, until the railway came.

Le chat dort sur la chaise, et la pluie tombe depuis ce matin sur le toit de la maison.

def area(points):
    total = 0.0
    for (x1, y1), (x2, y2) in zip(points, points[1:]):
        total += x1 * y2 - x2 * y1
    return abs(total) / 2
"""

_ATTENTION = Path(__file__).parents[1] / "attention"
"""The code that writes and reads KV caches."""

_REFERENCE = "float32"
_LOGIT_ROWS = 32
"""Of each cache at a time: so many that reading the output projection is a small part of it."""
_ERROR_ROWS = 4
"""Of these at a time: so few that what is computed of a large vocabulary stays in the processor's cache."""
_NOT_A_NUMBER = 1000.0
"""Stands for an error that is none, since JSON has no NaN."""


class _Trial(msgspec.Struct, frozen=True):
    """What every rank computes before the leader chooses: the text with a cache of each of these dtypes, integers last; none = nothing."""

    dtypes: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def settle_kv_cache(
    setup: Setup,
    model: CausalLM,
    rank: Rank,
    cache: WeightCache | None,
    tokenize: Tokenize,
    wait_loaded: Callable[[], None] = lambda: None,
) -> Setup:
    """`setup` with the KV precision that the model gets, the same in all ranks, and why.

    model: with its weights. cache: of the packed weights; keeps what was measured. tokenize: called only where something is measured. wait_loaded:
    returns in the leader when every other rank has its weights, too; in a follower, tells the leader so.
    """
    if setup.args.kv_cache_dtype != "auto" or not setup.is_cpu:
        return _as_asked(setup, cache)
    if rank.group is not None and not rank.leads:
        trial = msgspec.json.decode(rank.group.receive(), type=_Trial)
        if trial.dtypes:
            wait_loaded()
            _distances(setup, model, rank, trial)
        config = setup.config
        return replace(setup, config=replace(config, kv_cache_dtype=rank.group.receive().decode()))
    settled = _settled(setup, model, rank, cache, tokenize, wait_loaded)
    if rank.group is not None:
        rank.group.send(settled.config.kv_cache_dtype.encode())
    return settled


def _settled(
    setup: Setup,
    model: CausalLM,
    rank: Rank,
    cache: WeightCache | None,
    tokenize: Tokenize,
    wait_loaded: Callable[[], None],
) -> Setup:
    """The leader's `settle_kv_cache`; the others know what to compute when it returns."""
    config = setup.config
    dtypes = (config.kv_cache_dtype, config.kv_cache_fallback)
    trial, is_random = _Trial(), setup.args.load_format == "dummy"
    distances = _measured(setup, cache, dtypes) if config.kv_cache_fallback else None
    if config.kv_cache_fallback and distances is None and not is_random:
        ids = [token for token in tokenize(TEXT) if token < setup.model_config.vocab_size]
        if len(ids) > 1:
            ids = ids[: min(NUM_TOKENS, config.context_length)]
            trial = _Trial(tuple(dict.fromkeys((_REFERENCE, *reversed(dtypes)))), tuple(ids))
    if rank.group is not None:
        rank.group.send(msgspec.json.encode(trial))
    if not config.kv_cache_fallback:
        return setup
    if trial.dtypes:
        wait_loaded()
        begin = time.perf_counter()
        distances = _distances(setup, model, rank, trial)
        _logger.info("measured what a KV cache in integers costs the model (%.1f s)", time.perf_counter() - begin)
        if cache is not None:
            cache.keep_measured({_name(setup, dtype): distance for dtype, distance in distances.items()})
    if is_random:
        return _with(setup, dtypes[0], f"goes with {config.weight_format} weights; random ones are not measured")
    if distances is None:
        return _with(setup, dtypes[-1], f"without a tokenizer it cannot be measured what {dtypes[0]} costs this model")
    return _by_limit(setup, dtypes, distances)


def _by_limit(setup: Setup, dtypes: tuple[str, str], distances: Mapping[str, float]) -> Setup:
    """With the integers, unless the model loses too much in them; else with the floats."""
    integers, floats = dtypes
    added = round(distances[integers] - distances[floats], 4)
    what = _error_of(setup)
    if added > MOST_ADDED:
        reason = f"{integers} would add {added:.3f} to {what} of this model, more than {MOST_ADDED}"
        return _with(setup, floats, reason, added)
    exact = f"--kv-cache-dtype {floats} is the exact one" if integers == "int8" else f"closer to floats than {floats}"
    cost = f"adds {max(added, 0.0):.3f} to {what} (at most {MOST_ADDED})"
    return _with(setup, integers, f"goes with {setup.config.weight_format} weights and {cost}; {exact}", added)


def _as_asked(setup: Setup, cache: WeightCache | None) -> Setup:
    """What the user chose is honoured; a warning if it is known to cost too much."""
    wanted, floats = setup.config.kv_cache_dtype, setup.config.dtype
    if not setup.is_cpu or cache is None or getattr(torch, wanted).is_floating_point:
        return setup
    distances = _measured(setup, cache, (wanted, floats))
    if distances is None:
        return setup
    added = round(distances[wanted] - distances[floats], 4)
    if added <= MOST_ADDED:
        return replace(setup, config=replace(setup.config, kv_cache_added_error=added))
    reason = f"as asked, although it adds {added:.3f} to {_error_of(setup)} of this model, more than {MOST_ADDED}"
    _logger.warning("--kv-cache-dtype %s: %s; auto would not choose it", wanted, reason)
    return _with(setup, wanted, reason, added)


def _measured(setup: Setup, cache: WeightCache | None, dtypes: tuple[str, str]) -> dict[str, float] | None:
    """The distances of these as they were measured at an earlier start; None unless all are known."""
    known = {dtype: None if cache is None else cache.measured(_name(setup, dtype)) for dtype in dtypes}
    found = {dtype: distance for dtype, distance in known.items() if distance is not None}
    return found if len(found) == len(known) else None


def unmeasured(setup: Setup) -> str:
    """What is to be said when other weights come, if the KV cache is of integers by itself and nothing was measured; else empty."""
    config = setup.config
    is_chosen = setup.args.kv_cache_dtype == "auto" and config.kv_cache_added_error is None
    if not is_chosen or getattr(torch, config.kv_cache_dtype).is_floating_point:
        return ""
    return (
        f"it was not measured what the KV cache in {config.kv_cache_dtype} costs the model, since it began with random weights; "
        f"some models lose quality: --kv-cache-dtype {config.dtype} is the exact one"
    )


def _with(setup: Setup, dtype: str, reason: str, added: float | None = None) -> Setup:
    return replace(setup, config=replace(with_kv_cache(setup.config, dtype, reason), kv_cache_added_error=added))


def _error_of(setup: Setup) -> str:
    return "the error of a token's logprob" if setup.pooling is None else "the relative error of vectors"


def _name(setup: Setup, dtype: str) -> str:
    """Of a distance among what was measured of the same weights: what it depends on beside them, such as the text and the code here and of attention.

    The code of other rooms is part of what identifies the weights.
    """
    told = f"{setup.pooling is None}, {setup.args.json_model_override_args}\0"
    digest = hashlib.sha256(told.encode())
    for file in (Path(__file__), *sorted(_ATTENTION.rglob("*.py"))):
        digest.update(file.read_bytes())
    return f"distance of a KV cache in {dtype}, {setup.config.attention_backend}, {digest.hexdigest()[:16]}"


def _distances(setup: Setup, model: CausalLM, rank: Rank, trial: _Trial) -> dict[str, float]:
    """Of each dtype of the trial from its first; zeros in followers."""
    caches = [cache_in(setup, rank, dtype, len(trial.token_ids)) for dtype in trial.dtypes]
    totals, done, distances = [0.0] * len(caches), 0, dict[str, float]()
    for end in (len(trial.token_ids) // 2, len(trial.token_ids)):
        hidden = [hidden_states(setup, model, rank, cache, trial.token_ids, done, end) for cache in caches]
        errors = _vector_errors(*hidden) if setup.pooling else _logprob_errors(model, rank, *hidden)
        totals, done = [total + error for total, error in zip(totals, errors, strict=True)], end
        finite = (
            min(round(total / done, 4), _NOT_A_NUMBER) if math.isfinite(total) else _NOT_A_NUMBER for total in totals
        )
        distances = dict(zip(trial.dtypes, finite, strict=True))
        if _agreed(rank, rank.leads and _is_clear(distances)):
            break
    give_back_free_memory()
    return distances


def _is_clear(distances: Mapping[str, float]) -> bool:
    """Whether half of the text is enough to choose. distances: of floats and of integers last."""
    *_, floats, integers = distances.values()
    added = integers - floats
    return added < _SURELY_BELOW * MOST_ADDED or added > _SURELY_OVER * MOST_ADDED


def _agreed(rank: Rank, value: bool) -> bool:
    """The leader's value, in every rank."""
    if rank.group is None:
        return value
    if rank.leads:
        rank.group.send(bytes([value]))
        return value
    return rank.group.receive() == b"\1"


def cache_in(setup: Setup, rank: Rank, dtype: str, num_tokens: int) -> AttentionBackend:
    """With a KV cache of this dtype for so many tokens."""
    attention = setup.make_attention()
    shape = replace(setup.kv_shape(rank.stage), dtype=getattr(torch, dtype))
    attention.make_kv_pool(shape, -(-num_tokens // PAGE) * PAGE, PAGE, setup.placement.device)
    return attention


@torch.inference_mode()
def hidden_states(
    setup: Setup,
    model: CausalLM,
    rank: Rank,
    attention: AttentionBackend,
    token_ids: Sequence[int],
    start: int,
    end: int,
) -> torch.Tensor:
    """Hidden states of tokens `start` to `end` of the text after all layers; in other stages than the first, nothing of use. attention: has the KV of
    those before."""
    num, stage = end - start, rank.stage
    rows, own = window_rows(num, start), None
    if setup.args.enable_dp_attention:
        has_it = int(rank.shard.leads)
        own = OwnRows(slice(0, has_it), slice(0, has_it * num))
    attention.prepare(rows)
    if stage.is_first:
        hidden = model.embed(torch.tensor(token_ids[start:end]))
    else:
        assert stage.before is not None, stage
        hidden = stage.before.receive(num)
    hidden = model.forward(hidden, rows.positions, attention, own=own)
    if stage.after is not None:
        stage.after.send(hidden)
    return stage.before.receive(num) if stage.is_first and stage.before is not None else hidden


@torch.inference_mode()
def _logprob_errors(model: CausalLM, rank: Rank, reference: torch.Tensor, *others: torch.Tensor) -> list[float]:
    """Of the reference (0) and each of the others, summed over their hidden states, [n, hidden_size]; zeros in followers."""
    totals = [0.0] * (1 + len(others))
    if not rank.stage.is_first:
        return totals
    for begin in range(0, len(reference), _LOGIT_ROWS):
        rows = torch.cat([hidden[begin : begin + _LOGIT_ROWS] for hidden in (reference, *others)])
        logits = model.logits(rows)  # of all caches in one call, which reads the output projection once
        if not rank.leads:  # it has given its columns
            continue
        want, *found = logits.chunk(len(totals))
        for first in range(0, len(want), _ERROR_ROWS):
            wanted = want[first : first + _ERROR_ROWS].log_softmax(-1)
            for index, one in enumerate(found, 1):
                error = one[first : first + _ERROR_ROWS].log_softmax(-1) - wanted
                totals[index] += float((wanted.exp() * error.abs()).sum())
    return totals


def _vector_errors(reference: torch.Tensor, *others: torch.Tensor) -> list[float]:
    """As `_logprob_errors`, of models without logits."""
    sizes = reference.float().norm(dim=1)
    return [float(((hidden.float() - reference.float()).norm(dim=1) / sizes).sum()) for hidden in (reference, *others)]
