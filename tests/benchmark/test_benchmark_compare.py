"""The comparison with peers: ratios, agreement, and a class run against scripted servers."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
from fake_openai_server import FakeServer, serving
from rich.console import Console

from bench.compare import __main__ as compare
from bench.compare import greedy, peers
from bench.compare.peers import ComparedServer, ServerCommand
from bench.compare.ratios import COMPARED_PRESETS, LATENCIES, RATE, Measured, draw, latency_table, rate_table, ratios
from bench.servers import free_port
from headrace.benchmark.agreement import NUM_TOKENS, PROMPTS, Agreement, Greedy
from headrace.benchmark.serving import LoadOptions
from headrace.benchmark.workloads import PRESETS
from headrace.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


class WordTokenizer:
    """One id per character."""

    chat_template: ClassVar[dict[str, str]] = {}

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def measured(precision, preset, server, median, is_ours=False, errors=0, figure=RATE):
    return Measured(precision, preset, server, is_ours, figure, median, median * 0.9, median * 1.1, errors)


RATES = [
    measured("16", "A", "Headrace default", 60.0, is_ours=True),
    measured("16", "A", "slow", 30.0),
    measured("16", "A", "fast", 40.0),
    measured("8", "A", "Headrace int8", 90.0, is_ours=True),
    measured("8", "A", "fast", 100.0),
    measured("8", "D", "Headrace int8", 1000.0, is_ours=True),
    measured("8", "D", "fast", 0.0, errors=2),
]
LATENT = [
    measured("8", "B8", "Headrace int8", 90.0, is_ours=True),
    measured("8", "B8", "fast", 80.0),
    measured("8", "B8", "slow", 10.0),
    measured("8", "B8", "Headrace int8", 0.03, is_ours=True, figure="ITL p50"),
    measured("8", "B8", "fast", 0.04, figure="ITL p50"),
    measured("8", "B8", "slow", 0.01, figure="ITL p50"),
    measured("8", "B8", "Headrace int8", 0.3, is_ours=True, figure="TTFT p99"),
    measured("8", "B8", "fast", 0.4, figure="TTFT p99"),
]
EXACTNESS = {
    "Headrace default": Agreement(25, 23, 32, 30.0, 0.0021),
    "fast": Agreement(25, 11, 32, 19.0, None),
}


def test_a_ratio_is_ours_over_the_best_peer_of_its_class_and_preset():
    first, second, third = ratios(RATES)

    assert (first.peer, first.ratio, first.is_reached) == ("fast", 1.5, True)
    assert (second.peer, second.ratio, second.is_reached) == ("fast", 0.9, False)
    assert (third.peer, third.ratio, third.is_reached) == (None, None, False)


def test_a_latency_is_compared_with_that_of_the_peer_with_the_best_rate_and_has_to_stay_below():
    rate, between, first_token = ratios(LATENT)

    assert (rate.peer, between.peer, first_token.peer) == ("fast", "fast", "fast")
    assert between.ratio == pytest.approx(0.75)
    assert not between.is_reached  # at most 0.6
    assert first_token.ratio == pytest.approx(0.75)
    assert first_token.is_reached  # at most 1.0


def test_a_server_with_errors_neither_wins_nor_loses():
    broken_peer = [
        measured("16", "A", "Headrace int8", 10.0, is_ours=True),
        measured("16", "A", "broken", 99.0, errors=1),
        measured("16", "A", "sound", 5.0),
    ]
    assert [each.peer for each in ratios(broken_peer)] == ["sound"]

    broken_ours = [
        measured("16", "A", "Headrace int8", 99.0, is_ours=True, errors=1),
        measured("16", "A", "sound", 5.0),
    ]
    assert [each.ratio for each in ratios(broken_ours)] == [None]


def test_every_class_and_preset_has_a_goal():
    for precision in peers.PRECISIONS:
        goals = [
            each.target
            for each in ratios([measured(precision, name, "o", 1.0, is_ours=True) for name in COMPARED_PRESETS])
        ]
        assert len(goals) == len(COMPARED_PRESETS)


def in_eighty_columns(*tables):
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    return text


def test_the_table_shows_ratio_and_goal_beside_the_exactness_of_both_in_eighty_columns():
    widest = [
        measured("8", "Cspaced", "Headrace int8-fast", 98765.0, is_ours=True),
        measured("8", "Cspaced", "llama.cpp q8_0", 12345.0),
    ]
    text = in_eighty_columns(rate_table(ratios(RATES + widest), EXACTNESS))

    assert all(word in text for word in ("default", "int8", "1.50", "0.90", "1.30", "fast", "none"))
    assert "23/25 .002" in text
    assert "11/25   -" in text


def test_latencies_have_a_table_of_their_own_in_milliseconds():
    text = in_eighty_columns(latency_table(ratios(LATENT)))

    assert all(word in text for word in ("ITL p50", "TTFT p99", "30", "40", "0.75", "0.60"))
    assert "tok/s" not in text


def test_the_plot_has_a_bar_for_every_server_and_our_ratio(tmp_path):
    draw(tmp_path / "deep" / "plot.svg", RATES + LATENT, ratios(RATES + LATENT), "a machine")

    text = (tmp_path / "deep" / "plot.svg").read_text()
    assert all(
        word in text for word in ("16-bit weights", "8-bit weights", "Headrace default", "slow", "×1.50", "a machine")
    )


async def continued(ask, fake):
    async with serving(fake), aiohttp.ClientSession() as session:
        return await greedy.continue_all(ask, session, fake.url, [[7, 8, 9, 10]])


async def test_tokens_and_logprobs_are_asked_for_beyond_the_end_of_the_sequence():
    fake = FakeServer()
    got = await continued(greedy.by_generate, fake)

    assert got == Greedy([[ord("w")] * NUM_TOKENS], [[-0.5] * NUM_TOKENS])
    assert fake.generate_bodies[0]["sampling_params"]["ignore_eos"]


async def test_llama_cpp_goes_on_behind_the_end_of_a_sequence():
    fake = FakeServer()
    got = await continued(greedy.by_llama_cpp, fake)

    assert got == Greedy([list(range(4, 4 + NUM_TOKENS))], [[-0.5] * 3])
    assert [len(body["prompt"]) for body in fake.generate_bodies] == list(range(4, 4 + NUM_TOKENS, 4))
    assert not any("ignore_eos" in body for body in fake.generate_bodies)


async def test_a_server_that_cannot_continue_is_one_clear_error():
    fake = FakeServer()
    async with serving(fake), aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match="answered 404"):
            await greedy.by_generate(session, f"{fake.url}/nowhere", [1])


class RunningServer:
    """A fake server as ComparedServer shows one. share: cores it takes when idle."""

    def __init__(self, fake, name, share=0.0):
        self.url, self.name, self.share = fake.url, name, share
        self.command = ServerCommand(name, [], greedy.by_generate, ask_precision=lambda: {"kv_cache_dtype": "u8"})

    def cpu_share(self):
        return self.share

    def memory_mib(self):
        return 12.4


async def run_class(*, peer_share=0.0):
    ours, peer = FakeServer(tokens_per_chunk=2), FakeServer(word="x", fail=set(range(3, 40)))
    load = LoadOptions(presets="A,B8,D", repeat=2, num_requests=1, warm_up=1)
    reference = Greedy([[ord("w")] * NUM_TOKENS] * len(PROMPTS), [[-0.25] * NUM_TOKENS] * len(PROMPTS))
    async with serving(ours), serving(peer):
        mine, other = RunningServer(ours, "Headrace int8"), RunningServer(peer, "peer", peer_share)
        turns = [compare.Turns(["A", "D"], [mine, other]), compare.Turns(["B8"], [mine])]
        return await compare.run_class("8", turns, WordTokenizer(), reference, load, Console(quiet=True)), load


async def test_a_class_is_checked_then_measured_in_turns_and_reported(tmp_path):
    done, load = await run_class()

    assert done.agreements["Headrace int8"] == Agreement(25, 25, 32, 32.0, 0.25)
    assert done.agreements["peer"] == Agreement(25, 0, 32, 0.0, None)
    assert done.servers["Headrace int8"]["memory_mib"] == 12
    assert done.servers["peer"]["kv_cache_dtype"] == "u8"
    found = {(each.preset, each.server, each.figure): each for each in done.measured}
    rated = {(preset, server, RATE) for preset in "AD" for server in ("Headrace int8", "peer")}
    late = {("B8", "Headrace int8", figure) for figure in (RATE, *LATENCIES)}
    assert set(found) == rated | late
    ours = found["B8", "Headrace int8", "TTFT p50"]
    assert ours.is_ours
    assert 0 < ours.lowest <= ours.median <= ours.highest
    assert found["D", "peer", RATE].errors > 0

    load = LoadOptions(presets="A,B8,D", output=tmp_path / "out.json", plot=tmp_path / "out.svg")
    console = Console(width=80, record=True, file=io.StringIO())
    compare.report([done], load, console)
    said = console.export_text()
    assert all(word in said for word in ("cores", "25 of 25", "32.0 of 32", "0.2500", "u8", PRESETS["D"].description))
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["kind"] == "compare"
    assert content["classes"][0]["servers"] == ["Headrace int8", "peer"]
    assert content["classes"][0]["agreement"][1]["identical"] == 0
    rates = [(each["preset"], each["target"]) for each in content["ratios"] if each["figure"] == RATE]
    assert rates == [("A", 1.8), ("D", 2.0), ("B8", 2.2)]
    assert (tmp_path / "out.svg").stat().st_size > 1000


async def test_a_server_that_computes_while_idle_is_refused():
    with pytest.raises(ConfigError, match=r"peer takes 0\.40 cores while idle"):
        await run_class(peer_share=0.4)


@pytest.mark.parametrize("command_for", [peers.headrace_command, *peers.PEERS.values()])
def test_every_peer_has_a_command_for_every_class(command_for):
    commands = [command_for(precision, 4321) for precision in peers.PRECISIONS]

    assert all("4321" in command.arguments for command in commands)
    assert len({command.name for command in commands}) == 3
    assert len({tuple(command.arguments) for command in commands}) == 3


def options(*arguments):
    return compare.parse(arguments)


def test_our_servers_are_chosen_by_their_weights():
    chosen = options("--ours", "int8-fast,int4,none")

    assert [chosen.ours_of(precision) for precision in peers.PRECISIONS] == [["none"], ["int8-fast"], ["int4"]]

    with pytest.raises(ConfigError, match="--ours names nothing of the class of 4 bits"):
        options("--ours", "int8", "--classes", "8,4")


def test_presets_with_one_request_at_a_time_have_peers_of_their_own():
    assert options("--presets", "B8,A,D8k").presets_and_peers() == [
        (["A", "D8k"], ("llama.cpp", "openvino")), (["B8"], ("openvino",))
    ]  # fmt: skip
    assert options("--presets", "C", "--stream-peers", "llama.cpp").all_peers == ["llama.cpp"]


def test_our_server_has_no_option_but_its_weights():
    sixteen_bits = peers.headrace_command("16", 4321).arguments
    assert sixteen_bits[1:] == ["serve", "smollm2", "--port", "4321", "--quantization", "none"]
    assert peers.headrace_command("8", 4321).arguments[1:] == [*sixteen_bits[1:-1], "int8"]


def test_a_server_that_is_not_installed_or_ends_is_one_clear_error(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ConfigError, match="run bench/compare/setup first"):
        ComparedServer(ServerCommand("gone", ["true"], greedy.by_generate, needs=(tmp_path / "missing",)), 1, log)
    ends = ServerCommand("ends", [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"], greedy.by_generate)
    with (
        ComparedServer(ends, free_port(), log) as server,
        pytest.raises(ConfigError, match="ends ended with status 3:\nno memory"),
    ):
        server.wait_until_ready()


_WAITS = """
import asyncio, sys
from pathlib import Path
from bench.servers import ServerProcess, leave_on_sigterm
from headrace.benchmark.serving import run_client
leave_on_sigterm()
with ServerProcess("sleeps", ["sleep", "600"], 1, Path(sys.argv[1])) as server:
    async def wait():
        print(server.process.pid, flush=True)
        await asyncio.sleep(600)
    run_client(wait())
"""


def test_a_comparison_that_is_stopped_ends_its_servers(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        server = int(process.stdout.readline())
        os.kill(server, 0)  # it runs

        process.terminate()

        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.parametrize("text", ["", "16,32"])
def test_unknown_classes_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        options("--classes", text)
    assert "--classes: takes any of 16, 8, 4" in capsys.readouterr().err
