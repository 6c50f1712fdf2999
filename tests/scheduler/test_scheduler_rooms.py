"""Prompts that one scheduler computes and another goes on with, without a network: whatever comes late, never or not at all, each request ends once
and as it should, and no page is left. The worker's KV remembers the history of each slot, so KV of another prompt is found at once."""

import msgspec
import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.disaggregation.sink import Incoming, PageSink
from headrace.disaggregation.source import Outgoing, PageSource
from headrace.messages.control import AbortReq
from headrace.messages.outputs import TokenIDOut
from headrace.messages.requests import LogprobSpec, Room
from headrace.messages.weights import UpdateFromDisk, WeightOpReq
from headrace.scheduler import rooms

PAGE = 4
EOS_EVERY = 11


class NoAdapters:
    """What is asked of a `PageTransfer` here; `Link` copies pages."""

    def adapter(self, lora_id: int) -> str:
        return ""


class Source(PageSource):
    def __init__(self, link: "Link") -> None:
        self.link, self.transfer = link, NoAdapters()
        self.progress = self.num_pages = self.num_bytes = 0

    def open(self, outgoing: Outgoing) -> None:
        self.link.outgoing[outgoing.room] = outgoing

    def asked_again(self, past) -> set[int]:
        opened = {room for room, one in self.link.outgoing.items() if one.is_wanted}
        asked = {one.room for one in self.link.incoming if one.again} - opened
        for one in self.link.incoming:
            if one.room in asked and one.room not in past:
                self.link.fail(one)
        return asked & set(past)

    def tell(self) -> None:
        pass

    def withdraw(self, given) -> None:
        for one in given:
            one.is_wanted = False

    def weights_changed(self) -> None:
        self.link.lose()

    close = tell


class Sink(PageSink):
    def __init__(self, link: "Link") -> None:
        self.link, self.transfer = link, NoAdapters()
        self.num_pages = self.num_bytes = 0

    def ask(self, incoming: Incoming) -> None:
        self.link.incoming.append(incoming)

    def withdraw(self, given) -> None:
        for one in given:
            one.is_wanted = False
            if not one.is_done and one.room in self.link.outgoing:
                self.link.outgoing[one.room].is_over = True

    def weights_changed(self) -> None:
        self.link.lose()

    def close(self) -> None:
        pass


class Link:
    """Two schedulers and what is between them. carry: takes a page of each room to the other side. lose: the connection is lost."""

    def __init__(self, prefill_pages: int = 40, decode_pages: int = 40, **options) -> None:
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: list[Incoming] = []
        options = {"page_size": PAGE, "eos_every": EOS_EVERY, **options}
        self.prefill = Rig(num_pages=prefill_pages, transfer=lambda worker: Source(self), **options)
        self.new_decode = lambda: Rig(num_pages=decode_pages, transfer=lambda worker: Sink(self), **options)
        self.decode = self.new_decode()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.on_decode: set[int] = set()

    def add(self, number: int, prompt: list[int], num_new: int, sides: str = "pd", **fields) -> None:
        rid = f"r{number}"
        self.asked[rid] = prompt, num_new
        if "d" in sides:
            self.on_decode.add(number)
        for side in sides:
            rig = self.prefill if side == "p" else self.decode
            rig.add(rid, prompt, num_new, room=Room("h", 1, number, number), **fields)

    def carry(self) -> None:
        for one in self.incoming:
            out = self.outgoing.get(one.room)
            if not one.is_wanted or one.is_done or out is None:
                continue
            if out.key != one.key:
                one.failure, one.is_wrong, one.is_done = "another prompt", True, True
                continue
            if one.again and not out.is_wanted:
                continue
            out.is_asked, out.is_over = True, False
            place = one.num_known + one.num_arrived
            if not out.is_wanted or (out.failure and place >= len(out.pages)):
                self.fail(one)
            elif place < len(out.pages) and one.num_arrived < len(one.pages):
                given = self.prefill.worker.kv.reshape(-1, PAGE)[out.pages[place]]
                self.decode.worker.kv.reshape(-1, PAGE)[one.pages[one.num_arrived]] = given
                one.num_arrived += 1
                one.num_news += 1
            elif out.output:
                assert one.num_arrived == len(one.pages)
                one.output, one.is_done, out.is_over = msgspec.msgpack.decode(out.output, type=TokenIDOut), True, True
        self.incoming = [one for one in self.incoming if one.is_wanted and not one.is_done]

    def fail(self, one: Incoming) -> None:
        one.failure, one.is_done = "lost", True
        if one.room in self.outgoing:
            self.outgoing[one.room].is_over = True

    def lose(self) -> None:
        for one in self.incoming:
            self.fail(one)
        self.incoming = []

    def die(self) -> None:
        """The decode side's scheduler dies, another takes its place, and what has not ended is sent again with what was heard of it."""
        self.lose()
        old, self.decode = self.decode, self.new_decode()
        self.decode.now, self.decode.ids, self.decode.finish = old.now, old.ids, old.finish
        for number in sorted(self.on_decode):
            rid = f"r{number}"
            if rid not in old.finish:
                heard = np.array(old.ids.get(rid, []), np.int32).tobytes()
                room = Room("h", 1, number, number)
                self.decode.add(rid, *self.asked[rid], room=room, output_ids=heard, attempt=1)

    def run(self, turns: int = 4000) -> None:
        for _ in range(turns):
            self.prefill.turn()
            self.carry()
            self.decode.turn()
            if not self.prefill.busy and not self.decode.busy:
                return
        raise AssertionError("still busy")

    def check(self) -> None:
        """All have ended as on one server, and nothing is held after the time in which a room may still be asked for."""
        for rid, (prompt, num_new) in self.asked.items():
            want = expected_outputs(prompt, num_new, EOS_EVERY)
            for rig, outputs in ((self.prefill, want[:1]), (self.decode, want)):
                if (finish := rig.finish.get(rid)) is not None and finish.type != "abort":
                    assert rig.ids[rid] == outputs, rid
        for rig in (self.prefill, self.decode):
            rig.turn()
            rig.now += rooms.UNASKED_S + 1
            rig.turn()
            rig.turn()
            assert not rig.state.rooms.is_busy
            rig.check_idle()


def prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2, count).tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 31])
def test_decode_computes_no_token_of_a_prompt(count: int, overlap: bool):
    link = Link(overlap=overlap)
    link.add(7, prompt(count, count), 6)
    link.run()
    assert link.decode.finish["r7"].type != "abort"
    assert link.decode.state.counters.computed_prefill_tokens == 0
    assert link.decode.worker.num_computed < 6, "one token for each output but the first and the last"
    link.check()


def test_pages_come_while_others_are_computed_and_logprobs_with_the_first_token():
    link = Link(chunk=8)
    link.add(1, prompt(40, 1), 4, logprobs=LogprobSpec(1, 0))
    arrived = []
    for _ in range(5):
        link.prefill.turn()
        link.decode.turn()
        link.carry()
        link.carry()
        arrived.append(sum(one.num_arrived for one in link.incoming))
    assert 0 < arrived[2] < arrived[3] < 10, "before the prompt is done"
    link.run()
    alone = Rig(page_size=PAGE, eos_every=EOS_EVERY)
    alone.add("r1", prompt(40, 1), 4, logprobs=LogprobSpec(1, 0))
    alone.drain()
    got, want = (
        b"".join(row.prompt_logprobs.values for row in rig.rows["r1"] if row.prompt_logprobs)
        for rig in (link.decode, alone)
    )
    assert got == want
    link.check()


def test_what_the_decode_side_has_is_not_sent():
    link = Link()
    link.add(1, prompt(30, 1), 2)
    link.run()
    link.add(2, [*prompt(30, 1), 1, 0, 1], 2)
    link.prefill.turn()
    link.decode.turn()
    link.decode.turn()
    [one] = link.incoming
    assert (one.num_known, len(one.pages)) == (7, 2)
    link.run()
    link.check()


def test_a_prefill_side_that_does_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    link = Link()
    link.add(1, prompt(20, 1), 4, sides="d")
    begin = link.decode.now
    link.decode.drain()
    assert link.decode.now - begin < rooms.SILENCE_S + 0.5
    assert link.decode.finish["r1"].type != "abort"
    assert link.decode.state.rooms.stats().failed == 1
    link.check()


def test_one_that_works_for_ever_is_waited_for_only_so_long():
    link = Link()
    link.add(1, prompt(20, 1), 4, sides="d")
    begin = link.decode.now
    while link.decode.busy:
        link.decode.turn()
        for one in link.incoming:
            one.num_news += 1
    assert rooms.PATIENCE_S < link.decode.now - begin < rooms.PATIENCE_S + 1
    link.check()


def test_a_wrong_room_ends_the_request_and_one_in_use_is_refused():
    link = Link()
    link.add(1, prompt(20, 1), 4, sides="p")
    link.prefill.drain()
    link.add(1, prompt(20, 2), 4, sides="d")
    link.prefill.add("other", prompt(20, 2), 4, room=Room("h", 1, 1, 1))
    del link.prefill.finish["r1"], link.prefill.ids["r1"]  # it may use its room again
    link.prefill.add("r1", prompt(20, 1), 4, room=Room("h", 1, 1, 1))
    link.asked.clear()
    link.run()
    assert "another prompt" in link.decode.finish["r1"].message
    assert link.decode.finish["r1"].param == "bootstrap_room"
    assert "in use by another request" in link.prefill.finish["other"].message
    link.check()


@pytest.mark.parametrize("count", [3, 18])
def test_a_prefill_side_that_was_started_again_holds_no_pages(count: int):
    """Its decode server has lost it, and has computed the prompt."""
    link = Link()
    link.add(1, prompt(count, 1), 5, sides="p", attempt=1)
    for _ in range(10):
        link.prefill.turn()
    assert link.prefill.finish["r1"].type == "length"
    assert link.prefill.state.kv.leased_tokens(0) == 0, "not only after the time in which a room may be asked for"
    link.add(1, prompt(count, 1), 5, sides="d")
    link.run()
    link.check()


def test_new_weights_end_what_is_under_way():
    """Requests that wait for KV of the old weights are computed with the new ones."""
    link = Link()
    link.add(1, prompt(20, 1), 4, sides="d")
    link.decode.turn()
    link.decode.turn()
    assert link.incoming
    link.decode.inbox.send(WeightOpReq(1, UpdateFromDisk("1", "v1")))
    link.decode.turn()
    link.decode.worker.weights.finish()
    link.decode.drain()
    assert link.decode.ids["r1"] == expected_outputs(prompt(20, 1), 4, EOS_EVERY, version=1)
    link.asked.clear()
    link.check()


@pytest.mark.parametrize("turns", [2, 4, 7, 30])
def test_a_scheduler_that_died_gets_the_whole_pages_again(turns: int):
    link = Link()
    for number, count in enumerate((31, 9, 20)):
        link.add(number, prompt(count, number), 12)
    for _ in range(turns):
        link.prefill.turn()
        for _ in range(8):
            link.carry()
        link.decode.turn()
    link.die()
    link.run()
    heard = sum(map(len, link.decode.ids.values()))
    assert link.decode.state.counters.computed_prefill_tokens <= 3 * (PAGE - 1) + heard
    link.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_each_request_ends_once_and_no_page_is_left(data: st.DataObject):
    draw = data.draw
    link = Link(draw(st.integers(12, 40)), draw(st.integers(12, 40)), overlap=draw(st.booleans()), max_running=4)
    late: list[tuple[int, str]] = []
    for number in range(draw(st.integers(1, 6))):
        ids = prompt(draw(st.integers(1, 40)), draw(st.integers(0, 3)))
        side = draw(st.sampled_from(["pd", "dp", "p", "d"]))
        link.add(number, ids, draw(st.integers(1, 8)), side[0])
        late += [(number, other) for other in side[1:]]
        for _ in range(draw(st.integers(0, 4))):
            match draw(
                st.sampled_from(["prefill", "decode", "carry", "carry", "lose", "die", "abort", "short", "late"])
            ):
                case "prefill":
                    link.prefill.turn()
                case "decode":
                    link.decode.turn()
                case "carry":
                    link.carry()
                case "lose":
                    link.lose()
                case "die":
                    link.die()
                case "abort":
                    rig = draw(st.sampled_from([link.prefill, link.decode]))
                    rig.inbox.send(AbortReq((f"r{draw(st.integers(0, number))}",)))
                case "short":
                    draw(st.sampled_from([link.prefill, link.decode])).kv.on_short()
                case "late" if late:
                    other, side = late.pop(0)
                    link.add(other, *link.asked[f"r{other}"], side)
    for other, side in late:
        link.add(other, *link.asked[f"r{other}"], side)
    link.run()
    link.check()
