"""The client against a real HTTP server that is scripted."""

import asyncio
import io
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import ClassVar

import aiohttp
import pytest
from fake_openai_server import FakeServer, serving
from rich.console import Console

from headrace.benchmark.figures import NO_LIMITS, Limits, summarise
from headrace.benchmark.results import document, plot, print_results, rate_text, write_json
from headrace.benchmark.serving import (
    LoadOptions,
    arrival_times,
    compare_greedy,
    measure,
    run_client,
    run_closed_loop,
    run_open_loop,
    with_beside,
)
from headrace.benchmark.targets import OpenAITarget
from headrace.benchmark.workloads import PRESETS, Answer, Workload
from headrace.errors import ConfigError


def decode(ids):
    return " ".join(map(str, ids))


class WordTokenizer:
    """One id per character: enough to cut prompts."""

    chat_template: ClassVar[dict[str, str]] = {}

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


async def connect(session, server, **options):
    return await OpenAITarget.connect(session, server.url, decode, **options)


async def complete_one(server, max_new_tokens=4, **options):
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server, **options)
        return await target.complete([7, 8, 9], Answer(max_new_tokens))


def workload(num_requests, max_new_tokens=3, name="B8", gap_s=0.0):
    prompts = [[index, index + 1] for index in range(num_requests)]
    preset = replace(PRESETS[name], answer=Answer(max_new_tokens), start_gap_s=gap_s)
    return Workload(preset, prompts, [])


async def test_tokens_are_counted_by_the_servers_usage():
    record = await complete_one(FakeServer(tokens_per_chunk=2))

    assert record.error is None
    assert (record.output_tokens, record.token_source) == (4, "usage")
    assert (record.prompt_tokens, record.cached_tokens) == (3, 2)
    assert len(record.chunk_s) == 2
    assert record.text == "wwww"


async def test_without_usage_chunks_are_counted_and_that_is_said():
    record = await complete_one(FakeServer(sends_usage=False, tokens_per_chunk=2))

    assert (record.output_tokens, record.token_source) == (2, "chunks")
    assert record.prompt_tokens == 3


async def test_times_are_in_order():
    record = await complete_one(FakeServer())

    assert record.start_s < record.chunk_s[0] <= record.chunk_s[-1] <= record.end_s
    assert len(record.gaps_s) == 3


async def test_a_server_that_takes_no_ids_gets_text():
    server = FakeServer(ids_accepted=False)
    record = await complete_one(server)

    assert record.error is None
    assert server.bodies[-1]["prompt"] == "7 8 9"


async def test_chats_count_content_and_reasoning():
    server = FakeServer(tokens_per_chunk=2)
    record = await complete_one(server, prompt_form="chat")

    assert record.error is None
    assert (record.text, len(record.chunk_s)) == ("wwww", 2)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "7 8 9"}]


async def test_requests_are_greedy_of_exact_length_and_take_extra_fields():
    server = FakeServer()
    await complete_one(server, extra_body={"cache_prompt": False})

    body = server.bodies[-1]
    assert body["prompt"] == [7, 8, 9]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 4)
    assert body["stream_options"] == {"include_usage": True}
    assert body["cache_prompt"] is False
    assert body["model"] == "fake"


async def test_a_task_may_end_its_answer_and_asks_for_its_schema():
    server = FakeServer()
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        await target.complete([7], PRESETS["G"].answer)
    body = server.bodies[-1]
    assert "ignore_eos" not in body
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["people"]


def test_it_is_the_same_on_the_loop_of_the_command():
    record = run_client(complete_one(FakeServer(tokens_per_chunk=2)))

    assert record.error is None
    assert record.start_s < record.chunk_s[0] <= record.chunk_s[1] <= record.end_s


@pytest.mark.parametrize(
    "reply, error",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: ", "connection:"),
        (b"what", "connection:"),
        (b"", "connection:"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", None),  # the end of the connection is the end of the body
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnone", "HTTP 404: none"),
    ],
)
async def test_what_a_server_sends_that_is_no_whole_reply(reply: bytes, error: str | None):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        record = await OpenAITarget(session, f"http://127.0.0.1:{port}", "m", "ids", decode, {}).complete(
            [1], Answer(1)
        )

    assert (record.error or "").startswith(error or "")
    assert bool(record.error) == bool(error)


async def test_failures_are_counted_by_kind_and_do_not_stop_the_run():
    server = FakeServer(fail={2}, cut={4})  # request 0 is the one of connect
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        done = await run_closed_loop(target, workload(6), concurrency=1)

    errors = [record.error for record in done.records]
    assert errors[1].startswith("HTTP 500")
    assert "broken on purpose" in errors[1]
    assert errors[3] == "the stream ended early"
    assert [error for index, error in enumerate(errors) if index not in (1, 3)] == [None] * 4


async def test_a_server_that_is_gone_is_an_error_of_each_request():
    server = FakeServer()
    async with aiohttp.ClientSession() as session:
        async with serving(server):
            target = await connect(session, server)
        record = await target.complete([1], Answer(1))

    assert record.error.startswith("connection:")


async def test_an_unreachable_server_is_one_clear_error():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match="is the server running"):
            await OpenAITarget.connect(session, "http://127.0.0.1:9", decode)


async def test_the_closed_loop_keeps_its_concurrency_and_the_order_of_prompts():
    server = FakeServer(together=asyncio.Barrier(4))
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        ticks = []
        done = await run_closed_loop(target, workload(20), concurrency=4, on_done=lambda: ticks.append(1))

    assert server.most_open == 4
    assert len(done.records) == len(ticks) == 20
    assert done.duration_s >= max(record.end_s for record in done.records) - min(r.start_s for r in done.records)


async def test_the_first_requests_of_a_spaced_preset_start_one_after_the_other(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    server = FakeServer()
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        monkeypatch.setattr("headrace.benchmark.serving.asyncio.sleep", sleep)
        await run_closed_loop(target, workload(6, gap_s=0.02), concurrency=3)
        monkeypatch.undo()

    assert [wait for wait in waits if wait] == [0.02, 0.04]


async def test_long_prompts_are_sent_one_after_the_other_beside_the_workload():
    server = FakeServer(together=asyncio.Barrier(2))
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        long = replace(workload(3), beside=[[9] * 5] * 3)
        done = await with_beside(target, long, run_closed_loop(target, long, concurrency=1))
    got = summarise(done.records, done.duration_s, NO_LIMITS, done.beside)

    assert server.most_open == 2
    assert [len(body["prompt"]) for body in server.bodies[1:]].count(5) == len(done.beside) == 3
    assert (got.num_requests, got.prompt_tokens, got.ttft_s.count, got.beside_ttft_s.count) == (3, 6, 3, 3)


async def test_the_open_loop_sends_everything():
    server = FakeServer()
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        done = await run_open_loop(target, workload(10), rate=10_000.0, seed=1)

    assert [record.error for record in done.records] == [None] * 10


def test_arrivals_are_a_poisson_process():
    times = arrival_times(20_000, rate=5.0, seed=3)

    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(1 / 5.0, rel=0.05)
    assert times == arrival_times(20_000, rate=5.0, seed=3)


async def test_two_servers_take_turns_within_each_repetition():
    order = []
    first, second = FakeServer(), FakeServer()
    async with serving(first), serving(second), aiohttp.ClientSession() as session:
        targets = [await connect(session, server) for server in (first, second)]
        for target in targets:
            original = target.flush

            async def flush(target=target, original=original):
                order.append(target.name)
                return await original()

            target.flush = flush
        options = LoadOptions(presets="A,D", repeat=2, num_requests=1, warm_up=1)
        results = await measure(targets, WordTokenizer(), options, Console(quiet=True))

    assert order == [first.url, second.url] * 4
    assert {(result.preset, result.target) for result in results} == {
        (preset, server.url) for preset in "AD" for server in (first, second)
    }
    assert all(len(result.repetitions) == 2 and result.flushed for result in results)


async def test_repetitions_send_fresh_prompts_and_priming_is_not_measured():
    server = FakeServer()
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        options = LoadOptions(presets="C", repeat=2, num_requests=2, warm_up=0)
        [result] = await measure([target], WordTokenizer(), options, Console(quiet=True))

    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    assert len(prompts) == 2 * (1 + 2)
    assert len(set(prompts)) == len(prompts)
    assert [summary.num_requests for summary in result.repetitions] == [2, 2]


async def test_greedy_agreement_counts_equal_texts():
    same, other = FakeServer(), FakeServer(word="x")
    async with serving(same), serving(other), aiohttp.ClientSession() as session:
        reference, target = [await connect(session, server) for server in (same, other)]
        agreed = await compare_greedy(reference, reference)
        differed = await compare_greedy(reference, target)

    assert agreed.num_equal == agreed.num_prompts == 5
    assert differed.num_equal == 0
    assert differed.common_characters == [0] * 5


async def test_the_document_tells_all_and_keeps_secrets(tmp_path):
    server = FakeServer()
    async with serving(server), aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as session:
        target = await connect(session, server)
        options = LoadOptions(presets="A,D", repeat=2, num_requests=2, warm_up=0)
        results = await measure([target], WordTokenizer(), options, Console(quiet=True))
        said = {target.name: await target.describe()}
    content = document("serving", said, results, options.described(), Limits())
    write_json(tmp_path / "deep" / "out.json", content)

    read = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert {"command", "commit", "dirty", "machine", "date", "targets", "options", "results"} <= read.keys()
    assert read["targets"][server.url] == {"model": "fake", "prompt_form": "ids", "dtype": "bfloat16"}
    assert read["results"][0]["median"]["output_tokens"] == 2 * 256
    assert len(read["results"][0]["repetitions"]) == 2
    assert server.headers[-1]["Authorization"] == "Bearer k"
    assert "secret" not in json.dumps(read)


@pytest.mark.parametrize("ending", ["svg", "png"])
async def test_a_plot_is_drawn(tmp_path, ending):
    server = FakeServer(fail={1, 2})  # the first preset has nothing to draw
    async with serving(server), aiohttp.ClientSession() as session:
        target = await connect(session, server)
        options = LoadOptions(presets="A,B8,D", repeat=1, num_requests=2, warm_up=0)
        results = await measure([target], WordTokenizer(), options, Console(quiet=True))
    content = document("serving", {target.name: {}}, results, options.described(), Limits())

    await asyncio.to_thread(plot, tmp_path / f"plot.{ending}", content)

    assert (tmp_path / f"plot.{ending}").stat().st_size > 1000
    with pytest.raises(ConfigError, match="plot"):
        plot(tmp_path / "plot.nonsense", content)


async def tables(width, *servers):
    """What is printed of two presets on these servers, on a console so wide."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for server in servers:
            await stack.enter_async_context(serving(server))
        targets = [await connect(session, server) for server in servers]
        options = LoadOptions(presets="A,Ccold", repeat=1, num_requests=2, warm_up=0, limits=Limits(e2e_s=60.0))
        results = await measure(targets, WordTokenizer(), options, Console(quiet=True))
    console = Console(width=width, record=True, file=io.StringIO())
    print_results(console, results)
    return console.export_text()


async def test_the_tables_show_every_preset_and_its_errors():
    text = await tables(200, FakeServer(fail={1}))

    assert "broken on purpose" in text
    assert all(word in text for word in ("TTFT", "End to end", "output", "goodput", "usage"))


async def test_no_column_is_lost_on_eighty_columns():
    first, second = FakeServer(), FakeServer()
    text = await tables(80, first, second)

    assert "…" not in text
    for word in ("preset", "requests", "spread", "goodput", "errors", "counted", "usage", "p99", first.url, second.url):
        assert word in text
    assert text.count("Ccold") == 2 * 5  # a line for each server in the rates and in the four latencies


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (99.5, "99.50"),
        (215.2, "215.2"),
        (1234.5, "1234"),
        (99_999.4, "99999"),
        (99_999.6, "100k"),
        (879_394.0, "879k"),
        (9_999_400.0, "9999k"),
    ],
)
def test_no_rate_is_wider_than_six_characters(value, text):
    assert rate_text(value) == text


@pytest.mark.parametrize(
    "options", [{"presets": "Q"}, {"repeat": 0}, {"rate": 0.0}, {"rate": 1.0, "concurrency": 2}, {"num_requests": 0}]
)
def test_senseless_options_are_refused(options):
    with pytest.raises(ConfigError):
        LoadOptions(**options)


def test_without_matplotlib_only_a_plot_is_refused_and_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    LoadOptions(output=tmp_path / "out.json")
    with pytest.raises(ConfigError, match=r"needs matplotlib: pip install matplotlib"):
        LoadOptions(plot=tmp_path / "out.svg")
