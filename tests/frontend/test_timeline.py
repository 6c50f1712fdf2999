"""What happened to a request is told afterwards, without its text; also in spans and in crash dumps."""

import json
import stat

import pytest
from frontend_fakes import turns

from headrace.errors import ConfigError, ExecutionError, NotFoundError, RequestError
from headrace.frontend.tenants import Caller, Tenant, TenantLimits
from headrace.messages.outputs import FinishReason, PromptPart, SampleEvent, SamplesMoved, SampleStats
from headrace.metrics import spans
from headrace.metrics.spans import OpenTelemetrySpans, Spans, build_span, parse_traceparent
from headrace.metrics.timeline import Timeline

STOP = FinishReason("stop", matched=256)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def finished_timeline(traceparent=TRACEPARENT, finish=STOP):
    stats = SampleStats(4, 2, 1, 0.5, (SampleEvent("admitted", 10.5, 2), SampleEvent("chunk", 10.5, 2)))
    return Timeline(
        "r/0",
        "r",
        "team",
        10.0,
        1_700_000_000.0,
        traceparent,
        "secret",
        True,
        10.25,
        11.0,
        12.0,
        4,
        3,
        stats,
        finish,
        True,
    )


async def run(frontend, rid, **stats):
    task = frontend.start("secret", rid=rid)
    await frontend.engine.until(lambda: rid in frontend.engine.requests)
    frontend.engine.emit(rid, "ab")
    frontend.engine.emit(rid, "c", STOP, **stats)
    await task


async def test_the_story_of_a_request_is_in_order_and_holds_no_text(make_frontend):
    frontend = make_frontend()
    events = (SampleEvent("admitted", 0.0, 2), SampleEvent("chunk", 0.0, 4), SampleEvent("retracted", 0.0, 1))
    await run(frontend, "r", stats=SampleStats(6, 2, 1, 0.5, events))

    [told] = await frontend.manager.records.timelines("r")

    assert (told["state"], told["finish_reason"], told["matched"]) == ("finished", "stop", 256)
    assert (told["prompt_tokens"], told["cached_tokens"], told["completion_tokens"]) == (6, 2, 3)
    assert (told["num_retractions"], told["queue_time_s"]) == (1, 0.5)
    assert {event["event"] for event in told["events"]} == {
        "received", "tokenized", "admitted", "chunk", "retracted", "first_token", "finished"
    }  # fmt: skip
    assert told["events"][-1]["event"] == "finished"
    assert [e["at_s"] for e in told["events"]] == sorted(e["at_s"] for e in told["events"])
    assert "secret" not in json.dumps(told)
    assert "abc" not in json.dumps(told)


async def test_live_requests_and_all_samples_of_a_call_are_found_and_old_ones_forgotten(make_frontend):
    frontend = make_frontend(timeline_requests=2)
    task = frontend.start("p", rid="many", sampling_params={"n": 2})
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 2)
    frontend.engine.emit("many/0", "x")
    await turns()

    told = await frontend.manager.records.timelines("many")
    assert [(each["rid"], each["state"]) for each in told] == [("many/0", "running"), ("many/1", "waiting")]
    assert [event["event"] for event in told[0]["events"]] == ["received", "tokenized", "first_token"]

    for j in range(2):
        frontend.engine.emit(f"many/{j}", "y", STOP)
    await task
    await run(frontend, "later")
    assert [each["rid"] for each in await frontend.manager.records.timelines("many")] == ["many/1"]
    with pytest.raises(NotFoundError):
        await frontend.manager.records.timelines("many/0")
    with pytest.raises(NotFoundError):
        await frontend.manager.records.timelines("later", Caller(Tenant(TenantLimits(name="somebody"))))


async def test_the_list_begins_with_live_requests_and_holds_no_text(make_frontend):
    frontend = make_frontend(timeline_requests=2)
    for rid in ("forgotten", "second", "third"):
        await run(frontend, rid)
    tasks = [frontend.start("secret", rid=rid) for rid in ("live", "later")]
    await frontend.engine.until(lambda: "later" in frontend.engine.requests)
    frontend.engine.emit("live", "x")
    await turns()

    told = await frontend.manager.records.latest(10)
    assert [each["rid"] for each in told] == ["later", "live", "third", "second"]
    assert [each["completion_tokens"] for each in told] == [0, 1, 3, 3]
    assert [each["state"] for each in told] == ["waiting", "running", "finished", "finished"]
    assert [(each["key"], each["dp_rank"]) for each in told] == [(None, 0)] * 4
    assert 0 <= told[0]["age_s"] <= told[1]["age_s"]
    assert [each["age_s"] for each in told[2:]] == [each["e2e_s"] for each in told[2:]]
    assert all("events" not in each for each in told)
    assert "secret" not in json.dumps(told)
    assert [each["rid"] for each in await frontend.manager.records.latest(3)] == ["later", "live", "third"]

    for rid in ("live", "later"):
        frontend.engine.emit(rid, "y", STOP)
    for task in tasks:
        await task


async def test_a_request_waits_until_its_scheduler_runs_it_and_again_when_it_is_retracted(make_frontend):
    frontend = make_frontend()
    task = frontend.start("p", rid="r")
    await frontend.engine.until(lambda: "r" in frontend.engine.requests)

    async def state_after(message):
        frontend.engine.outbox.send(message)
        await turns()
        [told] = await frontend.manager.records.latest(1)
        return told["state"]

    assert await state_after(SamplesMoved(("another",))) == "waiting"
    assert await state_after(SamplesMoved(("another", "r"))) == "running"
    assert await state_after(SamplesMoved((), ("r",))) == "waiting"
    frontend.engine.emit("r", "x", STOP)
    await task
    [told] = await frontend.manager.records.latest(1)
    assert told["state"] == "finished"


async def test_it_says_how_much_of_the_prompt_is_computed(make_frontend):
    frontend = make_frontend()
    task = frontend.start("prompt", rid="r")
    await frontend.engine.until(lambda: "r" in frontend.engine.requests)

    async def processed_after(*parts):
        frontend.engine.outbox.send(SamplesMoved(("r",), prompts=parts))
        await turns()
        [told] = await frontend.manager.records.latest(1)
        return told["processed_tokens"]

    assert await processed_after() == 0
    assert await processed_after(PromptPart("gone", 1, 0), PromptPart("r", 2, 0)) == 2
    assert await processed_after(PromptPart("r", 4, 0)) == 4
    frontend.engine.emit("r", "x")
    await turns()
    assert await processed_after(PromptPart("r", 2, 0)) == 6  # computed again after a retraction
    frontend.engine.emit("r", "y", STOP)
    await task
    [told] = await frontend.manager.records.latest(1)
    assert told["processed_tokens"] == told["prompt_tokens"] == 6


@pytest.mark.parametrize("prompts", [False, True])
async def test_a_death_leaves_a_dump_with_prompts_only_if_told_and_a_stop_leaves_none(make_frontend, tmp_path, prompts):
    folder = tmp_path / "dumps"
    frontend = make_frontend(crash_dump_dir=str(folder), crash_dump_prompts=prompts)
    await run(frontend, "done")
    task = frontend.start("secret", rid="live")
    await frontend.engine.until(lambda: "live" in frontend.engine.requests)
    frontend.manager.fail_all("the scheduler died")
    with pytest.raises(ExecutionError):
        await task

    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    dump = json.loads(text)
    assert dump["message"] == "the scheduler died"
    assert [(r["rid"], r["state"]) for r in dump["requests"]] == [("done", "finished"), ("live", "waiting")]
    assert ("secret" in text) == prompts

    other = make_frontend(crash_dump_dir=str(tmp_path / "none"))
    await other.manager.close()
    assert not (tmp_path / "none").exists()


def test_prompts_in_dumps_need_a_folder(make_frontend):
    with pytest.raises(ConfigError, match="--crash-dump-prompts needs"):
        make_frontend(crash_dump_prompts=True)


async def test_logging_changes_while_running(make_frontend, caplog):
    frontend = make_frontend()
    with caplog.at_level("INFO"):
        await run(frontend, "quiet")
        now = frontend.manager.settings.configure_logging(log_requests=True)
        await run(frontend, "told")

    assert now == {"level": "info", "log_requests": True, "log_requests_level": 0}
    lines = [r.getMessage() for r in caplog.records if "finished rid=" in r.getMessage()]
    assert len(lines) == 1
    assert "rid=told" in lines[0]
    assert "retractions=0 replays=0 chunks=0" in lines[0]
    assert "secret" not in lines[0]
    with pytest.raises(RequestError, match="turn both on"):
        frontend.manager.settings.configure_logging(log_requests=False, log_requests_level=1)


async def test_logging_of_requests_is_turned_off_whatever_its_level(make_frontend):
    manager = make_frontend().manager
    manager.settings.configure_logging(log_requests=True, log_requests_level=3)
    off = manager.settings.configure_logging(log_requests=False)
    assert (off["log_requests"], off["log_requests_level"]) == (False, 0)
    on = manager.settings.configure_logging(log_requests=True)
    assert on["log_requests_level"] == 0


@pytest.mark.parametrize(
    "value",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", f"{TRACEPARENT}-x",
     TRACEPARENT.upper(), f"00-{TRACE}-{PARENT}"],
)  # fmt: skip
def test_what_is_no_trace_context_is_ignored(value):
    assert parse_traceparent(value) is None


def test_a_span_continues_the_callers_trace_and_holds_no_text():
    span = build_span(finished_timeline(), "tiny")

    assert span.parent == spans.Parent(int(TRACE, 16), int(PARENT, 16), True)
    assert (span.start_ns, span.end_ns - span.start_ns) == (1_700_000_000 * 10**9, 2 * 10**9)
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["headrace.key_name"] == "team"
    assert span.events[0][0] == "received"
    assert ("first_token", span.start_ns + 10**9, {}) in span.events
    assert "secret" not in repr(span)
    assert parse_traceparent(f"cc-{TRACE}-{PARENT}-00-later") == spans.Parent(int(TRACE, 16), int(PARENT, 16), False)
    failed = build_span(finished_timeline(finish=FinishReason("abort", message="late", status_code=408)), "tiny")
    assert failed.error == "late"


async def test_every_sample_that_ends_becomes_a_span_unless_its_trace_is_not_sampled(make_frontend):
    made = []

    class Exporter:
        def export(self, span):
            made.append(span)

        def close(self):
            pass

    frontend = make_frontend()
    frontend.manager.endings.spans = Spans("tiny", Exporter())
    await run(frontend, "r")
    frontend.manager.endings.spans.add(finished_timeline(f"00-{TRACE}-{PARENT}-00"))

    assert [span.attributes["headrace.rid"] for span in made] == ["r"]


def test_open_telemetry_gets_the_span_as_it_was():
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    sink = Spans("tiny", OpenTelemetrySpans(export.SimpleSpanProcessor(memory)))
    sink.add(finished_timeline())
    sink.add(finished_timeline(traceparent=""))

    child, root = memory.get_finished_spans()
    assert (child.context.trace_id, child.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert root.parent is None
    assert root.context.trace_id != child.context.trace_id
    assert child.end_time - child.start_time == 2 * 10**9
    assert [event.name for event in child.events][-1] == "finished"
    sink.close()


def test_without_the_extra_the_option_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        spans.otlp_exporter("http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ConfigError, match="http"):
        spans.otlp_exporter("127.0.0.1:4317")
