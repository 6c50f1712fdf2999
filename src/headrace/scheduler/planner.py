"""Plans the next step: which requests compute how many tokens, into which pages.

Running requests come first (decode rows, then the rest of their prompts), then as many waiting ones as fit. If not all prompts fit, most of
the step goes to those of which less is left than of the first one, the shortest rest first: they would otherwise wait for all of it. The rest goes
by order, so that nobody is passed over for ever. All this is one mixed step (chunked prefill after Agrawal et al. 2023, "SARATHI", arXiv:2308.16369).
"""

import math
from collections.abc import Collection, Iterator, Sequence, Set
from itertools import islice, takewhile

from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.messages.step import MOST_VERIFIED, NewSequence
from headrace.scheduler import retract
from headrace.scheduler.request import Req
from headrace.scheduler.retract import Preemption, expected_tokens, has_begun
from headrace.scheduler.state import ScheduleBatch, SchedulerState
from headrace.scheduler.step_cost import (
    ALONE_STEP_S,
    LEAD,
    LEAST_AWAITED_S,
    LEAST_LEAD_S,
    LEAST_TOKENS,
    LONGEST_MIXED,
    SHORTER_SHARE,
    SHORTER_SHARE_OF_OTHERS,
    PromptBudget,
)
from headrace.scheduler.waiting import LPM_MAX_QUEUE, by_priority, fcfs, lpm

MIN_SHARED_TOKENS = 64
"""A waiting request waits for a prompt that is being prefilled if sharing its KV saves at least this many more tokens than the cache."""

MOST_WAITED = 2
"""But it does not wait for more than so many times the tokens that it saves: computing them is faster than waiting for a long prompt."""

MOST_COMPARED = 32
"""So many of a key's waiting requests, the next in its queue, are looked at for the shortest."""


def plan(state: SchedulerState, now_s: float) -> ScheduleBatch | None:
    """The next step, or None when there is nothing to do, at least until a step in flight is committed."""
    if state.waiting or state.shares.are_several:
        state.shares.look(state.running, state.waiting, state.num_places, now_s)
        if seconds_until_next(state, now_s) > 0:
            return None
    if state.gate.holds or _waits_for_drafts(state):
        return None
    state.now_s = now_s
    state.encodings.begin_plan()
    batch = ScheduleBatch(state.next_step, state.kv.page_size, now_s)
    making_way = _making_way(state) if state.waiting else None
    victims = making_way.victims if making_way is not None else ()
    num_parts = len(state.kv.parts)
    catching_up, full = _add_decode_rows(state, batch, victims)
    decode_s = _decode_seconds(state, batch)
    if catching_up or making_way is not None or state.waiting:
        prompts = _prompt_budget(state, batch)
        if prompts is None:
            return None
        if making_way is None and len(full) < num_parts:
            catching_up, passed = _shorter_first(state, batch, catching_up, prompts, full)
        else:
            passed = None
        if making_way is not None and making_way.for_tenant:
            _put_first(state, batch, making_way, prompts)
        for req in catching_up:
            if not _add_chunk(state, batch, req, prompts):
                full.add(req.part)
        if making_way is not None and not making_way.for_tenant:
            _put_first(state, batch, making_way, prompts)
        elif making_way is None and len(full) < num_parts and state.waiting and _has_place(state):
            _admit(state, batch, _order(state), prompts, full)
        state.passed = "" if passed is None or passed in _added(batch) else passed.rid
        _note_expected_time(state, batch, prompts)
    batch.encode = state.encodings.take_work(decode_s, state.config.max_step_s)
    if not batch.rows and batch.encode is None:
        return None
    if num_parts > 1:
        batch.sort_by_part(num_parts)
    batch.left = state.kv.take_left()
    state.next_step += 1
    state.ratio.step()
    return batch


def _add_decode_rows(
    state: SchedulerState, batch: ScheduleBatch, victims: Collection[Req]
) -> tuple[list[Req], set[int]]:
    """Add the running requests that need one token, which must not wait behind a prompt; not the `victims`.

    Returns those that have more tokens to compute, and the parts of the KV cache that are full.
    """
    page_size, most_tokens = batch.page_size, state.config.step_tokens
    num_stages = state.config.num_stages
    # Stages work on different steps, so each step gets its share of the rows.
    rows_left = -(-len(state.running) // num_stages)
    # Each running request has room for one token, and waiting ones for half of what is left.
    spare = (most_tokens - batch.num_tokens - len(state.running)) // (2 if state.waiting else 1)
    catching_up: list[Req] = []
    full: set[int] = set()
    for req in [req for req in state.running if req not in victims] if victims else state.running[:]:
        num_wanted = req.num_to_schedule
        if num_wanted > 1 or (num_wanted and req.num_scheduled < req.num_prompt_tokens):
            catching_up.append(req)
        elif num_wanted and req.seq >= 0 and len(batch.out_slots) < most_tokens:  # seq < 0: retracted just now
            if num_stages > 1:
                # What a step in flight samples is not known when the first stage begins the next one.
                if req.num_sampling or not rows_left:
                    continue
                rows_left -= 1
            if req.num_drafts and (added := _add_drafts(state, batch, req, spare)):
                spare -= added - 1
                continue
            num_tokens = req.num_scheduled + 1
            if num_tokens <= len(req.pages) * page_size or _make_room(state, batch, req, num_tokens):
                batch.add(req, 1)
            else:
                full.add(req.part)
    # One that was retracted for a decode row waits now, and may be admitted again in this very step.
    return [req for req in catching_up if req.seq >= 0], full


def _waits_for_drafts(state: SchedulerState) -> bool:
    """Whether the next step waits for those in flight: a request has drafts that only then can be computed, or had some lately. Otherwise others
    would go on without it, and the two would take turns from then on, each step reading all weights for half of the rows."""
    if state.config.num_stages > 1 or not state.in_flight or _most_logits(state) < 2:
        return False
    return any(req.waits_for_drafts for req in state.running)


def seconds_until_next(state: SchedulerState, now_s: float) -> float:
    """How long the next step is not to be planned yet, so that what another tenant sends meanwhile is in it: several are present, and the one in
    flight takes long. It is planned shortly before that one should end, so that the cores do not wait for it."""
    if state.config.num_stages > 1 or not state.in_flight or not state.shares.are_several:
        return 0.0
    last = state.in_flight[-1]
    if last.encode is not None:  # nobody expects how long these take
        expected_s = ALONE_STEP_S
    elif last.num_prompt_tokens or state.last_decode is None:
        expected_s = state.cost.seconds(last.work())
    else:
        expected_s = state.last_decode[1]
    if expected_s < LEAST_AWAITED_S:
        return 0.0
    begun_s = max(last.planned_s, state.collected_s)
    return begun_s + expected_s - max(LEAST_LEAD_S, LEAD * expected_s) - now_s


def _most_logits(state: SchedulerState) -> int:
    """Of the row of a running request."""
    return MOST_VERIFIED // max(1, len(state.running))


def _add_drafts(state: SchedulerState, batch: ScheduleBatch, req: Req, spare: int) -> int:
    """Add a row for the request's next token and those guessed after it, if they are few enough and there are free pages for them.

    spare: tokens that the step has room for beside the one of each request. Returns how many tokens the row has, 0 if it is not added.
    """
    count = min(1 + req.num_drafts, _most_logits(state), req.max_tokens - req.num_tokens, 1 + spare)
    if count < 2 or not state.kv.grow(req, req.num_scheduled + count):
        return 0
    batch.add(req, count)
    return count


def _add_chunk(state: SchedulerState, batch: ScheduleBatch, req: Req, prompts: PromptBudget) -> bool:
    """Add as much as `prompts` allows of a running request that has several tokens to compute. False: its part of the KV cache is full."""
    start = req.num_scheduled
    count = state.encodings.limit(req, start, prompts.allows(start, req.num_to_schedule))
    count = _whole_images(state, batch, req, start, count)
    if count <= 0 or req.seq < 0:  # no budget, or retracted just now
        return True
    num_tokens = start + count
    if num_tokens > len(req.pages) * batch.page_size and not _make_room(state, batch, req, num_tokens):
        return False
    batch.add(req, count)
    prompts.take(start, count, ends=batch.samples_last)
    return True


def _decode_seconds(state: SchedulerState, batch: ScheduleBatch) -> float:
    """Expected time of the decode rows, which are all of `batch`: infinite without any, 0.0 while nothing is known."""
    if not batch.rows:
        return math.inf
    return state.last_decode[1] if state.last_decode is not None else state.cost.seconds(batch.work())


def _prompt_budget(state: SchedulerState, batch: ScheduleBatch) -> PromptBudget | None:
    """What prompts may use beside the decode rows, which are in `batch`. None: no stream waits for them, and what is in flight takes so long that
    they wait, for the sake of those who arrive meanwhile."""
    config = state.config
    tokens = min(config.chunk_tokens, config.step_tokens - batch.num_tokens)
    if config.max_step_s == math.inf:
        return PromptBudget(tokens, state.cost)
    if batch.rows:
        if config.max_step_s != config.default_step_s:
            return PromptBudget.beside(batch.work(), tokens, state.cost, config.max_step_s)
        usual_s = config.max_step_s
        if state.shares.are_several:
            usual_s = min(usual_s, max(state.cost.shared_step_s, 2 * state.cost.seconds(batch.work())))
        return PromptBudget.beside(batch.work(), tokens, state.cost, usual_s, LONGEST_MIXED * usual_s)
    # There are as many steps in flight as stages, and they end one after the other.
    longest_s = state.cost.shared_step_s if state.shares.are_several else ALONE_STEP_S
    usual_s = longest_s / config.num_stages
    left_s = longest_s - sum(other.expected_s for other in state.in_flight)
    if state.in_flight and left_s < usual_s / 2:
        return None
    return PromptBudget.alone(tokens, state.cost, min(usual_s, left_s), config.max_step_s)


def _note_expected_time(state: SchedulerState, batch: ScheduleBatch, prompts: PromptBudget) -> None:
    if prompts.num_taken and state.config.max_step_s < math.inf:
        batch.num_prompt_tokens = prompts.num_taken
        batch.expected_s = state.cost.seconds(batch.work())


def _make_room(state: SchedulerState, batch: ScheduleBatch, req: Req, num_tokens: int) -> bool:
    """Allocate pages for `num_tokens` tokens of a running request, retracting others if nothing else helps."""
    while not state.kv.grow(req, num_tokens):
        # Others of its part still progress and may free pages, so this one skips a step.
        if any(other.num_in_flight for other in state.running if other.part == req.part):
            return False
        if not retract.make_room(state, req):
            return False
    return True


def _making_way(state: SchedulerState) -> Preemption | None:
    """The running requests to leave out of this step because a more important request will take their place."""
    way = retract.choose_victims(state, lambda tenant: next(_own_order(state, tenant)))
    if way is None or _waits_for_prefix(state, way.first) or not state.encodings.is_ready(way.first, 0):
        return None
    # While other prompts use the whole step, it could not start anyway.
    prompts = sum(req.num_to_schedule for req in state.running if req.is_prefilling and req not in way.victims)
    return way if prompts < state.config.chunk_tokens else None


def _put_first(state: SchedulerState, batch: ScheduleBatch, way: Preemption, prompts: PromptBudget) -> None:
    """Retract the victims and admit the request that takes their place, unless a step in flight still uses them."""
    if prompts.is_spent:
        return
    ready = [req for req in way.victims if not req.num_in_flight]
    if way.for_tenant:
        retract.preempt(state, ready)
        _admit(state, batch, _may_begin(state, way.first.asked.tenant), prompts, frozenset())
    elif len(ready) == len(way.victims):
        retract.preempt(state, ready)
        _admit(state, batch, iter((way.first,)), prompts, frozenset())


def _shorter_first(
    state: SchedulerState, batch: ScheduleBatch, catching_up: list[Req], prompts: PromptBudget, full: set[int]
) -> tuple[list[Req], Req | None]:
    """If the step cannot compute all prompts, give a part of it to shorter ones than the first, the shortest rest first. Returns those of
    `catching_up` that are not in the step then, and the first if others passed it: if nothing is left for it, the next step is its own.

    With priorities, none is passed by one that is less important. Places and pages stay a matter of order: a first one that waits is admitted before
    others pass it.
    """
    may_admit = _has_place(state) and not state.config.whole_prompts
    first = catching_up[0] if catching_up else next(_order(state), None) if may_admit else None
    if first is None or first.rid == state.passed or _all_fit(state, catching_up, prompts, may_admit):
        return catching_up, None
    limit = _rest(state, first) - LEAST_TOKENS
    running = [req for req in catching_up[1:] if _rest(state, req) <= limit and not _matters_less(state, req, first)]
    waiting = next(_order_by_rest(state, first, limit), None) if may_admit else None
    if waiting is None and not running:
        return catching_up, None
    tenants = {first.asked.tenant, *(req.asked.tenant for req in running), *(state.waiting.tenants if waiting else ())}
    part = prompts.part_of_shorter(SHORTER_SHARE if len(tenants) == 1 else SHORTER_SHARE_OF_OTHERS, state.next_step)
    if not catching_up:
        by_order = part.rest_of(prompts)
        _admit(state, batch, _order(state), by_order, full, cuts_one=True)
        prompts.take_all_of(by_order)
        if not by_order.num_taken:
            return catching_up, None
    for req in sorted(running, key=lambda req: _rest(state, req)):
        if waiting is not None:
            _admit(state, batch, _order_by_rest(state, first, _rest(state, req)), part, full, cuts_one=True)
        # One that made room for another may have been admitted again.
        if req not in _added(batch) and not _add_chunk(state, batch, req, part):
            full.add(req.part)
    if waiting is not None:
        _admit(state, batch, _order_by_rest(state, first, limit), part, full, cuts_one=True)
    prompts.take_all_of(part)
    added = _added(batch)
    return [req for req in catching_up if req not in added], first if part.num_taken else None


def _added(batch: ScheduleBatch) -> set[Req]:
    return {req for req, *_ in batch.rows}


def _rest(state: SchedulerState, req: Req) -> int:
    """Tokens of its prompt that are to be computed."""
    return req.num_to_schedule if req.seq >= 0 else req.num_tokens - _peek(state, req)


def _all_fit(state: SchedulerState, catching_up: list[Req], prompts: PromptBudget, may_admit: bool) -> bool:
    """Whether the step can compute the rest of all prompts, with those that wait and have a place."""
    num_places = min(_num_places(state), MOST_COMPARED) if may_admit else 0
    admitted = islice(_order(state), num_places) if num_places and state.waiting else ()
    num_wanted = sum(_rest(state, req) for req in (*catching_up, *admitted))
    start = catching_up[0].num_scheduled if catching_up else 0
    return prompts.allows(start, num_wanted) == num_wanted


def _order_by_rest(state: SchedulerState, first: Req, limit: int) -> Iterator[Req]:
    """What waits, has at most `limit` tokens to compute and may pass `first`: of each key, as far as `MOST_COMPARED` looks, the shortest first. Keys
    take turns."""

    def own_order(tenant: str) -> Iterator[Req]:
        compared = [(_rest(state, req), req) for req in islice(_may_begin(state, tenant), MOST_COMPARED)]
        shorter = [pair for pair in compared if pair[0] <= limit and not _matters_less(state, pair[1], first)]
        return (req for _, req in sorted(shorter, key=lambda pair: pair[0]))

    return state.fair_share.order(state.waiting.tenants, own_order) if state.waiting else iter(())


def _matters_less(state: SchedulerState, req: Req, first: Req) -> bool:
    return state.config.policy == "priority" and req.asked.priority < first.asked.priority


def _admit(
    state: SchedulerState,
    batch: ScheduleBatch,
    order: Iterator[Req],
    prompts: PromptBudget,
    full: Set[int],
    *,
    cuts_one: bool = False,
) -> None:
    """Move waiting requests into the batch, in `order`, while the budget, rows and pages last; cuts_one: and no prompt would be cut, except one that
    is all that `prompts` has.

    full: parts of the KV cache that take none.
    """
    kv = state.kv
    whole_prompts = state.config.whole_prompts
    reserved = [0] * len(kv.parts)
    for running in state.running:
        reserved[running.part] += expected_tokens(state, running)
    admitted: list[Req] = []
    while not prompts.is_spent and _has_place(state) and (req := next(order, None)) is not None:
        if (state.gate.draining and not has_begun(state, req)) or _waits_for_prefix(state, req):
            continue
        if not _may_take(state, req):
            continue
        part = _choose_part(state, req, reserved, full)
        if part is None:
            break
        match = kv.match(req, part)
        # A request that is alone may use the whole pool: the estimate must never starve it.
        needed = expected_tokens(state, req, match.num_tokens)
        room = kv.available_tokens(part) - reserved[part]
        num_wanted = req.num_tokens - match.num_tokens
        # What may not be cut, and takes longer than a step should, has one of its own.
        is_whole = whole_prompts and not batch.rows
        count = num_wanted if is_whole else prompts.allows(match.num_tokens, num_wanted)
        count = _whole_images(state, batch, req, match.num_tokens, count)
        is_alone = all(other.part != part for other in state.running)
        fits = needed <= room or is_alone
        may_cut = not whole_prompts and not (cuts_one and prompts.num_taken)
        if not fits or not count or (count < num_wanted and not may_cut):
            kv.unpin(match, part)
            break
        if not state.encodings.is_ready(req, match.num_tokens):
            kv.unpin(match, part)
            continue
        kv.admit(req, match, part)
        grown = kv.grow(req, req.num_scheduled + count)
        while not grown and is_alone and state.pins.give_way(part):
            grown = kv.grow(req, req.num_scheduled + count)
        if not grown:
            req.keep_kv = True
            kv.release(req)
            state.encodings.release(req)
            break
        reserved[part] += needed - count
        admitted.append(req)
        state.running.append(req)
        state.shares.begin(req.asked.tenant)
        _note_first_schedule(state, req, match.num_tokens, state.now_s)
        batch.new.append(_new_sequence(state, req))
        if count < num_wanted:
            state.prompts[req.rid] = req.prompt_part()
        start = req.num_scheduled
        batch.add(req, count)
        prompts.take(start, count, ends=batch.samples_last)
    for req in admitted:  # `order` looks at the queue as it was
        state.waiting.remove(req)


def _choose_part(state: SchedulerState, req: Req, reserved: Sequence[int], full: Set[int]) -> int | None:
    """The part of the KV cache for a waiting request (--enable-dp-attention); None if all are `full`.

    A prefix that is cached in a part need not be computed again there; but if all requests went where the first of them was, one rank would
    compute all attention, and its part would fill up while others are idle. So one cached token weighs as much as one token in use.

    reserved: tokens of each part that its running requests will still need. A part with room for it goes before one without, then one with
    another sample of its prompt; then the one where it finds the most cached tokens beyond those that running requests use and will need; of
    several, the one with the most free pages, where nothing has to be evicted for it.
    """
    kv = state.kv
    if len(kv.parts) == 1:
        return 0 if not full else None
    cached = kv.peek(req)
    group = req.asked.group
    siblings = {other.part for other in state.running if group and other.asked.group == group}

    def worth(part: int) -> tuple[bool, bool, int, int]:
        load = max(0, kv.leased_tokens(part) - state.pins.tokens_in(part)) + reserved[part]
        # At worst nobody else holds the prefix, and it cannot be evicted to make room.
        room = kv.available_tokens(part) - reserved[part] - cached[part]
        fits = not load or expected_tokens(state, req, cached[part]) <= room
        return fits, part in siblings, cached[part] - load, kv.parts[part].allocator.num_free

    return max((part for part in range(len(kv.parts)) if part not in full), key=worth, default=None)


def _whole_images(state: SchedulerState, batch: ScheduleBatch, req: Req, start: int, count: int) -> int:
    """`count` tokens from `start` on, so that they end within no image if none may be cut: fewer, or, of an image that begins here, more than a step
    should have; 0 if the step has no room for these."""
    end = start + count
    if not state.config.whole_images or not count:
        return count
    cut = next((span for span in req.asked.content.spans if span.start < end < span.end), None)
    if cut is None:
        return count
    if cut.start > start:
        return cut.start - start
    return cut.end - start if cut.end - start <= state.config.step_tokens - batch.num_tokens else 0


def _has_place(state: SchedulerState) -> bool:
    return _num_places(state) > 0


def _num_places(state: SchedulerState) -> int:
    return min(state.kv.num_free_seqs, state.config.max_running - len(state.running))


def _order(state: SchedulerState) -> Iterator[Req]:
    """What waits, in the order in which it is admitted."""
    if not state.waiting:
        return iter(())
    return state.fair_share.order(state.waiting.tenants, lambda tenant: _may_begin(state, tenant))


def _may_begin(state: SchedulerState, tenant: str) -> Iterator[Req]:
    """What waits of one tenant, as far as there are places that it may take."""
    return takewhile(lambda req: _may_take(state, req), _own_order(state, tenant))


def _may_take(state: SchedulerState, req: Req) -> bool:
    return state.shares.may_take(req.asked.tenant, _num_places(state))


def _own_order(state: SchedulerState, tenant: str) -> Iterator[Req]:
    """What waits of one tenant."""
    config, lanes = state.config, state.waiting.lanes(tenant)
    match config.policy:
        case "lpm" if len(state.waiting) <= LPM_MAX_QUEUE:
            return lpm(lanes, state.now_s, lambda r: _peek(state, r))
        case "priority":
            return by_priority(lanes, state.now_s, config.priority_ageing_s)
        case _:
            return fcfs(lanes)


def _peek(state: SchedulerState, req: Req) -> int:
    """Tokens of its prompt that are cached."""
    return max(state.kv.peek(req))


def _waits_for_prefix(state: SchedulerState, req: Req) -> bool:
    """Whether a running request is computing a prefix of this one's prompt, which will soon be cached.

    Samples of one prompt (same group) always wait, so that the prompt is prefilled once.
    """
    if not state.kv.shares or req.match_limit == 0:
        return False
    mine: bytes | None = None
    for other in state.running:
        if not other.is_prefilling or other.finish is not None or not other.shares_kv:
            continue
        if other.asked.namespace != req.asked.namespace:
            continue
        mine = mine if mine is not None else req.cache_key()
        theirs = other.cache_key(other.num_prompt_tokens)
        shared = min(_common_tokens(mine, theirs), req.match_limit)
        shared -= shared % state.kv.page_size
        same_group = bool(req.asked.group) and req.asked.group == other.asked.group
        least = (
            1 if same_group else max(MIN_SHARED_TOKENS, (other.num_prompt_tokens - other.num_computed) // MOST_WAITED)
        )
        if shared >= least and shared - _peek(state, req) >= least:
            return True
    return False


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the common prefix, by bisection over memcmp."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    if a[: high * TOKEN_BYTES] == b[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


def _note_first_schedule(state: SchedulerState, req: Req, cached_tokens: int, now_s: float) -> None:
    counters = state.counters
    req.note("admitted", now_s, cached_tokens)
    state.moved[req.rid] = True
    counters.prefix_query_tokens += req.num_tokens
    counters.cached_tokens += cached_tokens
    if req.cached_tokens >= 0:
        return
    req.first_scheduled_s = now_s
    state.fair_share.charge_prompt(req, req.num_tokens - cached_tokens)
    req.cached_tokens = state.groups.begin(req, cached_tokens)
    req.cache_miss = state.kv.explain(req)
    counters.prompt_tokens += req.num_prompt_tokens


def _new_sequence(state: SchedulerState, req: Req) -> NewSequence:
    return NewSequence(
        seq=req.seq,
        rid=req.rid,
        token_ids=req.tokens(),
        num_prompt_tokens=req.num_prompt_tokens,
        prefix_slots=state.kv.prefix_slots(req),
        task=req.task.with_prompt_logprobs_from(req.prompt_logprob_start),
        end_token_ids=tuple(sorted(req.end_token_ids)),
        content=req.asked.content,
        lora_id=req.asked.lora_id,
        grammar=req.grammar,
        namespace=req.asked.namespace,
    )
