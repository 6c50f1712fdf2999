"""Rooms: prompts that a prefill server computes and a decode server goes on with. One class for each side; a server has one of them, or none.

A room has one request on either side, with the same body. On the prefill side it ends with its first token, and its pages are held until they are
sent. On the decode side it waits until they have come, and then waits in the queue like one that was retracted after its first token. It never waits
for a server that has stopped working, nor much longer than its own prefill would take: then it is computed here.

Own the leases and pages of rooms. Do not own connections (`disaggregation`). Run in the scheduler's thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.cache.base import Lease
from headrace.disaggregation import wire
from headrace.disaggregation.sink import Incoming, PageSink
from headrace.disaggregation.source import Outgoing, PageSource
from headrace.errors import RequestError
from headrace.messages import namespaces
from headrace.messages.control import TransferStats
from headrace.messages.outputs import TokenIDOut
from headrace.messages.step import PageTransfer
from headrace.scheduler.kv_manager import KVManager
from headrace.scheduler.request import Req

UNASKED_S = 30.0
"""So long the pages of a prompt that is computed are held for a decode server that has not asked yet."""

PAST_S, MOST_PAST = 60.0, 256
"""So long, and so many, rooms that are over are known, for a decode server whose scheduler has died since: what the cache still has is sent again."""

SILENCE_S = 1.0
"""Beside the time of its own prefill: how long a request waits without a sign that the prefill server works."""

PATIENCE, PATIENCE_S = 4.0, 10.0
"""How long it waits at most: so many times its own prefill, and so many seconds."""


def _key(req: Req, transfer: PageTransfer) -> bytes:
    lora_id = namespaces.read(req.asked.namespace).lora_id
    return wire.prompt_key(
        req.cache_key(req.num_prompt_tokens), transfer.adapter(lora_id) if lora_id is not None else ""
    )


@dataclass(eq=False, slots=True)
class _Sending:
    """A room of the prefill side. lease: on the pages that are offered. tail: the last page if it is not full, which is ours; -1 = none.

    ended_s: when its request ended, 0 = it has not. is_again: it was over before.
    """

    req: Req
    outgoing: Outgoing
    part: int = 0
    lease: Lease | None = None
    tail: int = -1
    ended_s: float = 0.0
    is_again: bool = False


class PrefillRooms:
    """See the module docstring. Iterates over the requests that wait for something here: none does."""

    def __init__(self, source: PageSource, kv: KVManager) -> None:
        self._source = source
        self._kv = kv
        self._rooms: dict[int, _Sending] = {}
        self._past: dict[int, _Sending] = {}
        self._num_rooms = self._num_failed = 0
        on_short, on_flush = kv.on_short, kv.on_flush
        kv.on_short, kv.on_flush = _both(on_short, self._drop_unasked), _both(on_flush, self.give_up)

    def __iter__(self) -> Iterator[Req]:
        return iter(())

    @property
    def is_busy(self) -> bool:
        return bool(self._rooms)

    def check(self, req: Req) -> None:
        """Raises RequestError if its room has another request."""
        room = req.asked.room
        other = None if room is None else self._rooms.get(room.number)
        if room is not None and other is not None and other.req.rid != req.rid:
            raise RequestError(f"bootstrap_room {room.number} is in use by another request", "bootstrap_room")

    def add(self, req: Req, now_s: float) -> bool:
        """It may be asked for from now on, and ends with its first token. False: it need not wait."""
        room = req.asked.room
        if room is None:
            return False
        if (before := self._rooms.get(room.number)) is not None:
            if before.req.rid != req.rid:
                return False  # both came at once (`check`): the decode side hears that its prompt is not the room's
            self._release([self._rooms.pop(room.number)])  # it was sent again
        req.max_tokens = min(req.max_tokens, req.num_prompt_tokens + 1)
        sending = _Sending(req, Outgoing(room.number, req.rid, _key(req, self._source.transfer)))
        if not req.shares_kv:
            sending.outgoing.failure = "the KV of a prompt of embeddings is not sent"
        elif (
            req.asked.attempt
        ):  # Its decode server has lost the connection, computes the prompt itself, and will not ask.
            sending.outgoing.failure = "its prefill server was started again"
        self._past.pop(room.number, None)
        self._rooms[room.number] = sending
        self._source.open(sending.outgoing)
        return False

    def take_ready(self, now_s: float, computed_tokens: int) -> list[tuple[Req, TokenIDOut | None, str]]:
        """Offer what has been computed since the last turn, and let go of what is over. Nobody waits."""
        self._source.progress = computed_tokens
        self._open_again(now_s)
        over: list[_Sending] = []
        for one in self._rooms.values():
            if one.req.finish is None:
                self._offer(one)
            elif not one.ended_s:
                one.ended_s = now_s
            unasked = not one.outgoing.is_asked and one.ended_s and now_s > one.ended_s + UNASKED_S
            is_over = one.outgoing.is_over or not one.outgoing.is_wanted
            if one.req.finish is not None and (is_over or unasked):
                over.append(one)
        if over:
            self._let_go(over)
        return []

    def leave(self, req: Req) -> None:
        """A request has ended, and its pages are about to be released."""
        if (one := self._of(req)) is None or req.finish is None:
            return
        if req.finish.type == "abort" or req.seq < 0:
            one.outgoing.failure = req.finish.message or "its prefill server did not compute it"
        elif not one.outgoing.failure:
            self._offer(one)
            num_tokens, size = req.num_prompt_tokens, self._kv.page_size
            pages = one.outgoing.pages
            if len(pages) < num_tokens // size:
                one.outgoing.failure = "its KV is not kept"
            elif num_tokens % size:
                one.tail = req.pages.pop(num_tokens // size)
                one.outgoing.pages = [*pages, one.tail]
        self._source.tell()

    def ended(self, req: Req, output: TokenIDOut) -> None:
        """The last output of a request that `leave` was told of."""
        if (one := self._of(req)) is not None and not one.outgoing.failure:
            one.outgoing.output = msgspec.msgpack.encode(msgspec.structs.replace(output, options=None))
            self._source.tell()

    def give_up(self) -> None:
        """Let go of all pages: decode servers compute what has not been sent."""
        self._let_go([one for one in self._rooms.values() if one.req.finish is not None])
        for one in self._rooms.values():
            self._release([one])
            one.outgoing.failure = "its prefill server needs the pages"

    def weights_changed(self) -> None:
        self._source.weights_changed()

    def close(self) -> None:
        self._source.close()

    def stats(self) -> TransferStats:
        tokens = self._source.num_pages * self._kv.page_size
        return TransferStats(self._num_rooms, self._num_failed, sent_tokens=tokens, sent_bytes=self._source.num_bytes)

    # -- inside

    def _of(self, req: Req) -> _Sending | None:
        room = req.asked.room
        one = None if room is None else self._rooms.get(room.number)
        return one if one is not None and one.req is req else None

    def _offer(self, one: _Sending) -> None:
        """Offer the whole pages that are computed, which others may use from now on."""
        req, size = one.req, self._kv.page_size
        count = min(req.num_computed, req.num_prompt_tokens) // size
        if count <= len(one.outgoing.pages) or one.outgoing.failure or not req.shares_kv or req.seq < 0:
            return
        self._kv.share(req)
        cache = self._kv.parts[req.part].cache
        match = cache.match(req.cache_key(count * size), req.asked.namespace, count * size)
        if match.num_tokens < count * size:
            cache.release(match.lease)
            return
        cache.release(one.lease)
        one.part, one.lease = req.part, match.lease
        one.outgoing.pages = match.pages
        self._source.tell()

    def _open_again(self, now_s: float) -> None:
        """Offer what the cache still has of the rooms that are asked for again."""
        for number, one in list(self._past.items()):
            if now_s <= one.ended_s + PAST_S and len(self._past) <= MOST_PAST:
                break
            del self._past[number]
        for number in self._source.asked_again(self._past):
            past = self._past.pop(number)
            whole = past.req.num_prompt_tokens // self._kv.page_size * self._kv.page_size
            match = self._kv.parts[past.part].cache.match(past.req.cache_key(whole), past.req.asked.namespace, whole)
            failure = "its decode server computes the rest"
            outgoing = Outgoing(number, past.req.rid, past.outgoing.key, match.pages, failure=failure)
            self._rooms[number] = _Sending(past.req, outgoing, past.part, match.lease, ended_s=now_s, is_again=True)
            self._source.open(outgoing)

    def _drop_unasked(self) -> None:
        self._let_go([one for one in self._rooms.values() if one.req.finish is not None and not one.outgoing.is_asked])

    def _let_go(self, rooms: list[_Sending]) -> None:
        first = [one for one in rooms if not one.is_again]
        self._num_rooms += len(first)
        self._num_failed += sum(not one.outgoing.output or not one.outgoing.is_over for one in first)
        self._release(rooms)
        for one in rooms:
            del self._rooms[one.outgoing.room]
            if one.req.shares_kv and not one.req.asked.content.media:  # whose memory should not be kept
                self._past[one.outgoing.room] = one

    def _release(self, rooms: list[_Sending]) -> None:
        self._source.withdraw([one.outgoing for one in rooms])
        for one in rooms:
            part = self._kv.parts[one.part]
            part.cache.release(one.lease)
            if one.tail >= 0:
                part.give_back([one.tail])
            one.lease, one.tail = None, -1


@dataclass(eq=False, slots=True)
class _Receiving:
    """A request of the decode side and what comes for it; None while there are no pages for it. part, lease: of what the tree had before.

    since_s, news_s: when it came, and when its prefill server gave the last sign (`num_news`).
    """

    req: Req
    since_s: float
    news_s: float
    num_news: int = 0
    incoming: Incoming | None = None
    known_pages: list[int] = field(default_factory=list)
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class _Arrived:
    """A request that has its pages, or some, and waits to be admitted."""

    req: Req
    lease: Lease | None


class DecodeRooms:
    """See the module docstring. Iterates over the requests that wait for pages, in order of arrival.

    prompt_seconds, unknown_token_s: see `TierQueue`. expected_tokens: what the requests that run will still need of the pool.
    """

    def __init__(
        self,
        sink: PageSink,
        kv: KVManager,
        prompt_seconds: Callable[[int, int], float],
        unknown_token_s: float,
        expected_tokens: Callable[[], int],
    ) -> None:
        self._sink = sink
        self._kv = kv
        self._part = kv.parts[0]
        self.prompt_seconds = prompt_seconds
        self._unknown_token_s = unknown_token_s
        self._expected_tokens = expected_tokens
        self._waiting: list[_Receiving] = []
        self._arrived: list[_Arrived] = []
        self._given_up: list[Req] = []
        self._num_rooms = self._num_failed = 0
        kv.on_short = _both(kv.on_short, self.give_up)

    def __iter__(self) -> Iterator[Req]:
        return (req for req in (*(one.req for one in self._waiting), *self._given_up) if req.finish is None)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._arrived or self._given_up)

    def check(self, req: Req) -> None:
        """Nothing is wrong that the prefill side would not say."""

    def add(self, req: Req, now_s: float) -> bool:
        """Wait for the request's KV; one that this side has had before, for that of its whole pages. False: its KV cannot be sent."""
        if req.asked.room is None or not req.shares_kv:
            return False
        self._waiting.append(_Receiving(req, now_s, now_s))
        return True

    def take_ready(self, now_s: float, computed_tokens: int) -> list[tuple[Req, TokenIDOut | None, str]]:
        """Remove the requests that need not wait any longer: with what the prefill server has made of each, or None if it is computed here, or why it
        ends."""
        if not self.is_busy:
            return []
        self._release_arrived()
        ready: list[tuple[Req, TokenIDOut | None, str]] = [(req, None, "") for req in self._given_up]
        self._given_up = []
        for one in list(self._waiting):
            incoming, room = one.incoming, one.req.asked.room
            assert room is not None
            if one.req.finish is not None:
                self._drop(one)
            elif incoming is not None and incoming.output is not None and room.has_token and not _is_again(one.req):
                self._num_rooms += 1
                self._waiting.remove(one)
                ready.append((one.req, incoming.output, ""))
                req = one.req
                self._enter(one, incoming, req.num_prompt_tokens // self._kv.page_size)
                req.tail_page = incoming.pages[-1] if req.num_prompt_tokens % self._kv.page_size else -1
            elif (incoming is not None and incoming.is_done) or self.is_over(one, now_s):
                wrong = incoming.failure if incoming is not None and incoming.is_wrong else ""
                if not _is_again(one.req):
                    has_come = incoming is not None and incoming.output is not None
                    self._num_rooms += has_come
                    self._num_failed += not has_come
                ready.append((one.req, None, wrong))
                if wrong:
                    self._drop(one)
                else:
                    self._keep(one)
            elif incoming is None:
                self._begin(one)
        return [(req, output, wrong) for req, output, wrong in ready if req.finish is None]

    def is_over(self, one: _Receiving, now_s: float) -> bool:
        """Whether a request has waited long enough: computing it here is better."""
        incoming = one.incoming
        if incoming is not None and incoming.num_news != one.num_news:
            one.num_news, one.news_s = incoming.num_news, now_s
        size = self._kv.page_size
        start = 0 if incoming is None else incoming.num_known * size
        count = one.req.num_prompt_tokens - start
        own_s = self.prompt_seconds(start, count) or count * self._unknown_token_s
        return now_s > min(one.news_s + own_s + SILENCE_S, one.since_s + PATIENCE * own_s + PATIENCE_S)

    def leave(self, req: Req) -> None:
        """A request has ended, and its pages are about to be released: none are here."""

    def ended(self, req: Req, output: TokenIDOut) -> None:
        """Nobody else needs it."""

    def give_up(self) -> None:
        """Let go of all pages: requests are computed here."""
        for one in list(self._waiting):
            if one.incoming is not None:
                self._drop(one)
                self._num_failed += 1
                self._given_up.append(one.req)
        for arrived in self._arrived:
            self._part.cache.release(arrived.lease)
            if arrived.req.seq < 0 and arrived.req.tail_page >= 0:
                self._part.give_back([arrived.req.tail_page])
                arrived.req.tail_page = -1
        self._arrived = []

    def weights_changed(self) -> None:
        self._sink.weights_changed()

    def close(self) -> None:
        self._sink.close()

    def stats(self) -> TransferStats:
        tokens = self._sink.num_pages * self._kv.page_size
        return TransferStats(
            self._num_rooms, self._num_failed, received_tokens=tokens, received_bytes=self._sink.num_bytes
        )

    # -- inside

    def _begin(self, one: _Receiving) -> None:
        """Take pages for a prompt, and ask for what the tree does not have; later, if there is no room now."""
        req, room, size, kv = one.req, one.req.asked.room, self._kv.page_size, self._kv
        assert room is not None
        num_whole = req.num_prompt_tokens // size * size
        match = self._part.cache.match(req.cache_key(num_whole), req.asked.namespace, num_whole)
        missing = kv.pages_for(req.num_prompt_tokens) - len(match.pages)
        reserved = kv.pages_for(self._expected_tokens())
        pages = self._part.grow(missing, kv.weights) if missing + reserved <= self._part.num_available_pages else None
        if pages is None:
            self._part.cache.release(match.lease)
            return
        one.lease, one.known_pages = match.lease, match.pages
        one.incoming = Incoming(
            room.host,
            room.port,
            room.number,
            req.rid,
            _key(req, self._sink.transfer),
            room.first,
            room.replica,
            len(match.pages),
            pages,
            room.is_computed or _is_again(req),
            req.num_prompt_tokens,
        )
        self._sink.ask(one.incoming)

    def _drop(self, one: _Receiving) -> None:
        """Let go of the pages of a request that waits, and of the request."""
        self._waiting.remove(one)
        if one.incoming is not None:
            self._sink.withdraw([one.incoming])
            self._part.give_back(one.incoming.pages)
            self._part.cache.release(one.lease)

    def _keep(self, one: _Receiving) -> None:
        """Let go of a request whose prompt is computed here, but for the whole pages that have come."""
        incoming, size = one.incoming, self._kv.page_size
        if incoming is None or not incoming.num_arrived:
            self._drop(one)
            return
        self._waiting.remove(one)
        self._sink.withdraw([incoming])
        num_whole = min(one.req.num_prompt_tokens // size, incoming.num_known + incoming.num_arrived)
        self._part.give_back(incoming.pages[num_whole - incoming.num_known :])
        self._enter(one, incoming, num_whole)

    def _enter(self, one: _Receiving, incoming: Incoming, num_whole: int) -> None:
        """Enter the first pages of a request in the tree, and hold them until it is admitted."""
        req, size, part, num_known = one.req, self._kv.page_size, self._part, incoming.num_known
        pages, lease = incoming.pages, one.lease
        if new := pages[: num_whole - num_known]:
            done = part.cache.insert(req.cache_key(num_whole * size), [*one.known_pages, *new], req.asked.namespace)
            num_twice = max(0, done.num_existing // size - num_known)
            part.give_back(new[:num_twice])
            part.num_owned_pages -= len(new) - num_twice
            part.cache.release(lease)
            lease = done.lease
        self._arrived.append(_Arrived(req, lease))

    def _release_arrived(self) -> None:
        """Let go of what requests have taken up, and of what those that have ended did not."""
        kept: list[_Arrived] = []
        for one in self._arrived:
            if one.req.finish is None and one.req.seq < 0:
                kept.append(one)
                continue
            self._part.cache.release(one.lease)
            if one.req.tail_page >= 0:
                self._part.give_back([one.req.tail_page])
                one.req.tail_page = -1
        self._arrived = kept


Rooms = PrefillRooms | DecodeRooms


def _is_again(req: Req) -> bool:
    return bool(req.asked.attempt or req.num_outputs)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
