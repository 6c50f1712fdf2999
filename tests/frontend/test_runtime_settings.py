"""What may change at run time: its bounds, that every process hears of it, and that a process started again is told."""

import json
import math
import stat

import msgspec
import pytest
from frontend_fakes import READY, turns

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ConfigError, ExecutionError, RequestError
from headrace.frontend import runtime_settings
from headrace.messages.channel import LocalChannels
from headrace.messages.control import ConfigureLoggingReq, FreezeGCReq, SetLimitsReq
from headrace.messages.operations import LimitChanges


@pytest.fixture
def frozen(monkeypatch):
    """Counts freezes instead of doing them: this process has more tests to run."""
    calls = []
    monkeypatch.setattr(runtime_settings, "freeze", lambda: calls.append(1) or len(calls))
    return calls


def heard(receiver):
    """The settings among what has arrived."""
    messages = []
    while (message := receiver.recv_nowait()) is not None:
        messages.append(message)
    return [m for m in messages if isinstance(m, ConfigureLoggingReq | FreezeGCReq | SetLimitsReq)]


async def test_limits_change_in_the_scheduler_and_in_the_queue(make_frontend):
    frontend = make_frontend(max_queued_requests=100)
    now = frontend.manager.settings.change_limits(LimitChanges(max_running_requests=2, max_queued_requests=1))

    assert (now.max_running_requests, now.max_queued_requests) == (2, 1)
    [message] = heard(frontend.engine.inbox)
    assert message == SetLimitsReq(2, READY.max_running_requests + 1, READY.chunked_prefill_size, 1.0, math.inf)
    assert await frontend.manager.settings.changed_options() == {"max_running_requests": 2, "max_queued_requests": 1}
    tasks = [frontend.start("p", rid=f"r{i}") for i in range(3)]
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 3)
    with pytest.raises(CapacityError, match="queue is full"):
        await frontend.start("p")
    with pytest.raises(RequestError, match="has 4 samples"):
        await frontend.start("p", sampling_params={"n": 4})
    frontend.manager.abort_request(abort_all=True)
    frontend.engine.pump()
    for task in tasks:
        await task


@pytest.mark.parametrize("size,becomes", [(64, 64), (-1, 2048), (10**6, 2048)])
async def test_a_chunk_is_never_larger_than_a_step(make_frontend, size, becomes):
    now = make_frontend().manager.settings.change_limits(LimitChanges(chunked_prefill_size=size))
    assert now.chunked_prefill_size == becomes


async def test_the_time_of_a_step_is_bounded_anew_and_not_at_all(make_frontend):
    frontend = make_frontend(ready=msgspec.structs.replace(READY, max_step_ms=200))
    settings = frontend.manager.settings

    assert settings.change_limits(LimitChanges(max_step_ms=40)).max_step_ms == 40
    assert await settings.changed_options() == {"max_step_ms": 40}
    assert settings.change_limits(LimitChanges(max_step_ms=-1)).max_step_ms == -1
    assert settings.change_limits(LimitChanges(max_step_ms=200)).max_step_ms == 200
    assert await settings.changed_options() == {}

    assert [message.max_step_s for message in heard(frontend.engine.inbox)] == [0.04, math.inf, 0.2]


@pytest.mark.parametrize(
    "changes,param",
    [
        (LimitChanges(), "server_args"),
        (LimitChanges(max_running_requests=READY.max_running_requests + 1), "max_running_requests"),
        (LimitChanges(chunked_prefill_size=0, max_queued_requests=5), "chunked_prefill_size"),
        (LimitChanges(max_step_ms=0), "max_step_ms"),
        (LimitChanges(max_step_ms=100), "max_step_ms"),  # it was started without a bound
    ],
)
async def test_what_cannot_be_changes_nothing(make_frontend, changes, param):
    frontend = make_frontend()
    with pytest.raises(RequestError) as caught:
        frontend.manager.settings.change_limits(changes)
    assert caught.value.param == param
    assert await frontend.manager.settings.changed_options() == {}
    assert heard(frontend.engine.inbox) == []


async def test_a_scheduler_and_a_detokenizer_that_are_started_again_are_told_what_differs(make_frontend, frozen):
    frontend = make_frontend()
    manager = frontend.manager
    manager.start()
    to_detokenizer = frontend.channels.receiver("to_detokenizer")
    new_scheduler = LocalChannels()
    manager.parts.down("scheduler", 0)
    manager.parts.up("scheduler", 0, 1, new_scheduler.sender("to_scheduler"))
    assert heard(new_scheduler.receiver("to_scheduler")) == []

    manager.settings.configure_logging(level="warning")
    manager.settings.freeze_gc()
    manager.settings.change_limits(LimitChanges(schedule_conservativeness=0.5))
    assert len(frozen) == 1
    assert heard(to_detokenizer) == [ConfigureLoggingReq("warning"), FreezeGCReq()]
    manager.parts.down("scheduler", 0)
    newer = LocalChannels()
    manager.parts.up("scheduler", 0, 2, newer.sender("to_scheduler"))
    manager.parts.down("detokenizer", None)
    manager.parts.up("detokenizer")
    await turns()

    limits = SetLimitsReq(8, 8 + 2048, READY.chunked_prefill_size, 0.5, math.inf)
    assert heard(newer.receiver("to_scheduler")) == [ConfigureLoggingReq("warning"), FreezeGCReq(), limits]
    assert heard(to_detokenizer) == [ConfigureLoggingReq("warning"), FreezeGCReq()]


@pytest.fixture(autouse=True)
def log_level_comes_back():
    yield
    runtime_settings.set_level("info")


async def test_an_engine_that_is_gone_takes_no_orders(make_frontend, frozen):
    frontend = make_frontend()
    frontend.manager.fail_all("gone")
    with pytest.raises(ExecutionError):
        frontend.manager.settings.freeze_gc()
    with pytest.raises(ExecutionError):
        frontend.manager.settings.change_limits(LimitChanges(max_queued_requests=1))
    assert frozen == []


@pytest.mark.parametrize("prompts", [False, True])
async def test_requests_are_dumped_when_asked_with_prompts_only_if_told(make_frontend, tmp_path, prompts):
    folder = tmp_path / "dumps"
    frontend = make_frontend(dump_requests_dir=str(folder), crash_dump_prompts=prompts)
    await frontend.call("secret", rid="done")
    task = frontend.start("secret too", rid="live")
    await frontend.engine.until(lambda: "live" in frontend.engine.requests)

    first, count = await frontend.manager.records.dump()
    await frontend.manager.records.dump()

    assert count == 2
    assert len(list(folder.iterdir())) == 2
    path = folder / first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    requests = json.loads(text)["requests"]
    assert [(r["rid"], r["state"]) for r in requests] == [("done", "finished"), ("live", "waiting")]
    assert ("secret" in text) == prompts
    frontend.manager.abort_request("live")
    frontend.engine.pump()
    await task


async def test_without_a_folder_nothing_is_dumped_and_one_that_cannot_be_written_is_said(make_frontend, tmp_path):
    with pytest.raises(RequestError, match="--dump-requests-dir"):
        await make_frontend().manager.records.dump()
    (tmp_path / "file").write_text("")
    frontend = make_frontend(dump_requests_dir=str(tmp_path / "file" / "below"))
    with pytest.raises(ExecutionError, match="could not be written") as caught:
        await frontend.manager.records.dump()
    assert str(tmp_path) not in caught.value.message


def test_prompts_in_dumps_need_one_of_the_folders():
    with pytest.raises(ConfigError, match="--dump-requests-dir"):
        ServerArgs(crash_dump_prompts=True)
    assert ServerArgs(crash_dump_prompts=True, dump_requests_dir="d").crash_dump_prompts
