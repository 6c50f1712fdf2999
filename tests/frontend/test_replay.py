"""What is held, what is sent again and who is given up, when a scheduler or the detokenizer dies. Real front end, fake engine."""

import asyncio
import json
import time

import pytest
import pytest_asyncio
from frontend_fakes import FakeEngine, Frontend, turns

from headrace.errors import CapacityError, ExecutionError, LateError
from headrace.frontend import engine_link
from headrace.messages.channel import LocalQueue, Ports
from headrace.messages.control import AbortReq, ConfigureLoggingReq, ResetReq, SourceGone
from headrace.messages.outputs import BatchStrOut, FinishReason, StrOut, TokenIDOut
from headrace.messages.packing import pack_int32, unpack_int32
from headrace.messages.sockets import SocketChannels
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render

END = FinishReason("length", length=4)


class Lives:
    """A front end whose scheduler can die: each life has an inbox of its own."""

    def __init__(self, frontend: Frontend):
        self.frontend = frontend
        self.manager = frontend.manager
        self.engine = frontend.engine
        self.manager.start()

    def die(self):
        self.engine.pump()
        self.manager.parts.down("scheduler", 0)

    def rise(self) -> FakeEngine:
        channels = self.frontend.channels
        channels._queues["to_scheduler"] = LocalQueue()
        engine = FakeEngine(channels, self.frontend.tokenizer)
        engine.source = self.manager.link.new_source()
        self.engine = self.frontend.engine = engine
        self.manager.parts.up("scheduler", 0, engine.source, channels.sender("to_scheduler"))
        return engine

    async def has(self, *rids: str):
        await self.engine.until(lambda: set(rids) <= set(self.engine.requests))

    async def settle(self):
        """Let the watcher look once more."""
        await asyncio.sleep(2 * engine_link.WATCH_INTERVAL_S)
        self.engine.pump()

    async def say(self, rid: str, text: str, finish: FinishReason | None = None):
        """An output of this life."""
        self.engine.emit(rid, text, finish)
        await turns()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_link, "WATCH_INTERVAL_S", 0.001)


@pytest_asyncio.fixture
async def lives(make_frontend):
    return Lives(make_frontend())


GREEDY = {"temperature": 0.0, "max_new_tokens": 4}


async def test_a_sample_goes_on_after_what_was_delivered(lives):
    call = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    await lives.say("a", "wx")
    lives.die()
    assert not await lives.manager.health()

    lives.rise()
    await lives.has("a")
    again = lives.engine.requests["a"]
    assert unpack_int32(again.output_ids) == list(b"wx")
    assert again.attempt == 1
    assert await lives.manager.health()
    # The first output of a new life names what was delivered; the fake's options do not, so its ids are only the new ones.
    lives.engine.num_tokens["a"] = 2
    row = lives.engine.row("a", "yz", END)
    out = StrOut("yz", TokenIDOut("a", row.ids, 4, END))
    lives.engine.outbox.send(BatchStrOut((out,), lives.engine.source))

    last = (await call)[-1]
    assert (last["text"], last["meta_info"]["completion_tokens"]) == ("wxyz", 4)
    assert (await lives.manager.counters())["num_replayed"] == 1


async def test_what_the_dead_one_still_says_is_dropped(lives):
    call = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    await lives.say("a", "wx")
    lives.die()
    lives.engine.outbox.send(BatchStrOut((StrOut("LATE", TokenIDOut("a", pack_int32(list(b"LATE")), 6, END)),), 0))
    await turns()

    assert not call.done()
    assert [chunk["text"] for chunk in call.answers] == ["wx"]
    lives.manager.abort_request("a")
    assert (await call)[-1]["text"] == "wx"


async def test_new_calls_wait_while_nobody_can_take_them(lives):
    lives.die()
    call = lives.frontend.start("p", rid="a", sampling_params=GREEDY)
    await turns()
    assert not call.done()

    lives.rise()
    await lives.has("a")
    assert lives.engine.requests["a"].attempt == 0
    await lives.say("a", "wxyz", END)
    assert (await call)[0]["text"] == "wxyz"
    assert (await lives.manager.counters())["num_replayed"] == 0


async def test_a_held_sample_can_be_aborted_and_its_client_may_leave(lives):
    lives.die()
    aborted = lives.frontend.start("p", rid="a", sampling_params=GREEDY)
    left = lives.frontend.start("p", rid="b", sampling_params=GREEDY)
    await turns()

    lives.manager.abort_request("a")
    left.cancel()

    assert (await aborted)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    await turns()
    assert lives.frontend.is_clean


async def test_a_held_sample_ends_when_its_time_is_up(make_frontend):
    now = [100.0]
    lives = Lives(make_frontend(clock=lambda: now[0], request_timeout_s=5.0))
    lives.die()
    call = lives.frontend.start("p", sampling_params=GREEDY)
    await turns()
    now[0] += 6.0

    with pytest.raises(LateError):
        await asyncio.wait_for(call, 20)


async def test_a_held_sample_is_refused_when_it_has_waited_too_long_and_one_that_answered_is_not(make_frontend):
    now = [100.0]
    lives = Lives(make_frontend(clock=lambda: now[0], queue_timeout_s=5.0))
    answered = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    await lives.say("a", "wx")
    lives.die()
    call = lives.frontend.start("p", rid="b", sampling_params=GREEDY)
    await turns()
    now[0] += 6.0

    with pytest.raises(CapacityError, match="waited longer"):
        await asyncio.wait_for(call, 20)
    lives.rise()
    await lives.has("a")
    assert lives.engine.requests["a"].queue_deadline_s == 0.0
    assert not answered.done()
    lives.manager.abort_request("a")
    await lives.settle()
    await answered
    metrics = render(lives.manager.metrics).decode()
    assert 'rejected_requests_total{model_name="fake",reason="queue_timeout"} 1.0' in metrics


async def test_the_story_tells_of_the_death_and_a_dump_is_left(make_frontend, tmp_path):
    lives = Lives(make_frontend(crash_dump_dir=str(tmp_path)))
    call = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    await lives.say("a", "wx")
    states = [(await lives.manager.records.latest(1))[0]["state"]]
    lives.die()
    states.append((await lives.manager.records.latest(1))[0]["state"])
    lives.rise()
    await lives.has("a")
    lives.manager.abort_request("a")
    await lives.settle()
    await call

    assert states == ["running", "waiting"]
    [told] = await lives.manager.records.timelines("a")
    events = [(event["event"], event.get("completion_tokens")) for event in told["events"]]
    assert [e for e in events if e[0] in ("lost", "replayed")] == [("lost", 2), ("replayed", 2)]
    assert (told["num_replays"], told["state"]) == (1, "finished")
    [dump] = tmp_path.iterdir()
    assert [request["rid"] for request in json.loads(dump.read_text())["requests"]] == ["a"]


async def test_a_new_life_logs_as_it_was_told(lives):
    lives.manager.settings.configure_logging("debug")
    lives.die()
    lives.rise()

    assert lives.engine.inbox.recv_nowait() == ConfigureLoggingReq("debug")


async def test_one_that_was_aborted_before_the_death_is_not_sent_again(lives):
    lives.engine.aborts_end = False
    call = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    lives.manager.abort_request("a")
    lives.die()

    assert (await call)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    lives.rise()
    await turns()
    lives.engine.pump()
    assert not lives.engine.requests


async def test_prompt_logprobs_that_were_delivered_are_not_asked_for_again(lives):
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": GREEDY}
    calls = [lives.frontend.start("prompt", rid=rid, stream=True, **fields) for rid in ("heard", "unheard")]
    await lives.has("heard", "unheard")
    await lives.say("heard", "w")
    lives.die()
    lives.rise()
    await lives.has("heard", "unheard")

    assert lives.engine.requests["heard"].task.logprobs.prompt_start > len("prompt")
    assert lives.engine.requests["unheard"].task.logprobs.prompt_start == 1
    lives.manager.abort_request(abort_all=True)
    lives.engine.pump()
    assert all([(await call)[-1]["meta_info"]["finish_reason"]["type"] == "abort" for call in calls])


async def test_when_the_detokenizer_dies_every_sample_begins_again_under_another_source(lives):
    call = lives.frontend.start("p", rid="a", stream=True, sampling_params=GREEDY)
    await lives.has("a")
    await lives.say("a", "wx")
    lives.manager.parts.down("detokenizer", None)
    assert not await lives.manager.health()

    told = [lives.engine.inbox.recv_nowait() for _ in range(2)]
    assert isinstance(told[0], ResetReq)
    assert told[1] is None, "nothing is sent before somebody can turn it into text"
    gone = lives.frontend.channels.receiver("to_detokenizer").recv_nowait()
    assert gone == SourceGone(0)

    lives.manager.parts.up("detokenizer")
    again = lives.engine.inbox.recv_nowait()
    assert unpack_int32(again.output_ids) == list(b"wx")
    out = StrOut("yz", TokenIDOut("a", pack_int32(list(b"yz")), 4, END))
    lives.engine.outbox.send(BatchStrOut((out,), told[0].source))
    assert (await call)[-1]["text"] == "wxyz"


def test_what_was_sent_to_a_dead_one_is_not_for_its_next_life(tmp_path):
    """Both die, and the detokenizer's death is noticed first: over real sockets, whose addresses the next life binds again."""
    channels = SocketChannels(Ports.in_directory(tmp_path))
    first = channels.receiver("to_scheduler")
    link = engine_link.EngineLink(
        [channels.sender("to_scheduler")], {}, lambda *end: None, Metrics("m"), time.monotonic
    )
    link.send(AbortReq(("a",)))
    assert first.recv(5.0) == AbortReq(("a",))
    first.close()
    time.sleep(0.2)  # the connection is seen to have ended

    link.detokenizer_down()
    link.send(AbortReq(("b",)))
    link.scheduler_down(0)
    second = channels.receiver("to_scheduler")
    assert second.recv(0.5) is None
    link.scheduler_up(0, link.new_source(), channels.sender("to_scheduler"))
    link.send(AbortReq(("c",)))

    assert second.recv(5.0) == AbortReq(("c",))
    channels.close()


async def test_control_calls_do_not_wait_for_a_dead_scheduler(lives):
    waiting = asyncio.create_task(lives.manager.control.internal_state())
    await turns()
    lives.die()

    with pytest.raises(CapacityError):
        await waiting
    with pytest.raises(CapacityError):
        await lives.manager.control.flush_cache()


async def test_a_request_that_kills_when_it_is_alone_is_given_up(lives):
    call = lives.frontend.start("p", rid="poison", sampling_params=GREEDY)
    await lives.has("poison")
    lives.die()
    lives.rise()
    await lives.has("poison")
    lives.die()

    with pytest.raises(ExecutionError, match="cancelled"):
        await call
    assert (await lives.manager.counters())["num_given_up"] == 1


async def test_among_others_only_the_one_that_kills_is_given_up(lives):
    calls = {rid: lives.frontend.start("p", rid=rid, sampling_params=GREEDY) for rid in ("a", "poison", "b")}
    num_deaths = 0
    await lives.has(*calls)
    while not calls["poison"].done():
        assert num_deaths < 4
        lives.die()
        num_deaths += 1
        lives.rise()
        await lives.settle()
        while "poison" not in lives.engine.requests and not calls["poison"].done():
            # One suspect at a time, until it has ended.
            (rid,) = lives.engine.num_tokens
            await lives.say(rid, "wxyz", END)
            await lives.settle()

    assert num_deaths == 3
    for rid in set(lives.engine.num_tokens):
        await lives.say(rid, "wxyz", END)
    with pytest.raises(ExecutionError, match="cancelled"):
        await calls["poison"]
    for rid in ("a", "b"):
        if not calls[rid].done():
            await lives.has(rid)
            if rid in lives.engine.num_tokens:
                await lives.say(rid, "wxyz", END)
        assert (await asyncio.wait_for(calls[rid], 20))[0]["text"] == "wxyz"


async def test_newcomers_go_on_while_a_suspect_is_on_probation(lives):
    calls = [lives.frontend.start("p", rid=rid, sampling_params=GREEDY) for rid in ("a", "b")]
    await lives.has("a", "b")
    for _ in range(2):
        lives.die()
        lives.rise()
    await turns()
    calls.append(lives.frontend.start("p", rid="new", sampling_params=GREEDY))
    await lives.has("new")

    assert set(lives.engine.requests) == {"a", "new"}
    for rid in ("a", "new"):
        await lives.say(rid, "wxyz", END)
    await lives.settle()
    await lives.has("b")
    await lives.say("b", "wxyz", END)
    assert [(await call)[0]["text"] for call in calls] == ["wxyz"] * 3
