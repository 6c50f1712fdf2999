"""The comparison with peers: ratios, agreement, and a class run against scripted servers."""

import io
import json
import sys
from pathlib import Path

import pytest
from fake_openai_server import FakeServer, serving
from rich.console import Console

from headrace.benchmark.serving import LoadOptions
from headrace.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "compare"))

import compare
import peer_headrace
import peer_llama_cpp
import peer_openvino
from peer_process import ServerCommand, ServerProcess, free_port
from ratios import Rate, draw, ratio_table, ratios


class WordTokenizer:
    """One id per character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def rate(precision, preset, server, median, is_ours=False, errors=0):
    return Rate(precision, preset, server, is_ours, median, median * 0.9, median * 1.1, errors)


RATES = [
    rate("16", "A", "Headrace bf16", 60.0, is_ours=True),
    rate("16", "A", "slow", 30.0),
    rate("16", "A", "fast", 40.0),
    rate("8", "A", "Headrace int8", 90.0, is_ours=True),
    rate("8", "A", "fast", 100.0),
    rate("8", "D", "Headrace int8", 1000.0, is_ours=True),
    rate("8", "D", "fast", 0.0, errors=2),
]


def test_a_ratio_is_ours_over_the_best_peer_of_its_class_and_preset():
    first, second, third = ratios(RATES)

    assert (first.peer, first.ratio, first.is_reached) == ("fast", 1.5, True)
    assert (second.peer, second.ratio, second.is_reached) == ("fast", 0.9, False)
    assert (third.peer, third.ratio, third.is_reached) == (None, None, False)


def test_a_server_with_errors_neither_wins_nor_loses():
    broken_peer = [
        rate("16", "A", "Headrace int8", 10.0, is_ours=True), rate("16", "A", "broken", 99.0, errors=1), rate("16", "A", "sound", 5.0)
    ]  # fmt: skip
    assert [each.peer for each in ratios(broken_peer)] == ["sound"]

    broken_ours = [rate("16", "A", "Headrace int8", 99.0, is_ours=True, errors=1), rate("16", "A", "sound", 5.0)]
    assert [each.ratio for each in ratios(broken_ours)] == [None]


def test_the_table_shows_ratio_and_target_in_eighty_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(ratio_table(ratios(RATES)))
    text = console.export_text()

    assert all(word in text for word in ("bf16", "int8", "1.50", "0.90", "1.30", "fast", "none without errors"))
    assert "…" not in text


def test_the_plot_has_a_bar_for_every_server_and_our_ratio(tmp_path):
    draw(tmp_path / "deep" / "plot.svg", RATES, ratios(RATES), "a machine")

    text = (tmp_path / "deep" / "plot.svg").read_text()
    assert all(
        word in text for word in ("16-bit weights", "8-bit weights", "Headrace bf16", "slow", "×1.50", "a machine")
    )


def test_tokens_agree_up_to_the_first_that_differs():
    found = compare.agreement("s", [[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6], []])

    assert (found.equal, found.num_tokens, found.equal_texts) == ([2, 2, 0], [4, 2, 1], 1)


class RunningServer:
    """A fake server as ServerProcess shows one. share: cores it takes when idle."""

    def __init__(self, fake, name, share=0.0):
        self.url, self.name, self.share = fake.url, name, share

    def cpu_share(self):
        return self.share

    def memory_mib(self):
        return 12.4


async def run_class(*, peer_share=0.0):
    ours, peer = FakeServer(tokens_per_chunk=2), FakeServer(fail=set(range(8, 40)))
    load = LoadOptions(presets="A,D", repeat=2, num_requests=1, warm_up=1)
    reference = [[ord("w")] * compare.NUM_TOKENS] * len(compare.CHECK_TEXTS)
    async with serving(ours), serving(peer):
        servers = [RunningServer(ours, "Headrace int8"), RunningServer(peer, "peer", peer_share)]
        return await compare.run_class("8", servers, WordTokenizer(), reference, load, Console(quiet=True)), load


async def test_a_class_is_checked_then_measured_in_turns_and_reported(tmp_path):
    done, load = await run_class()

    assert [each.equal_texts for each in done.agreements] == [5, 5]
    assert done.servers["Headrace int8"]["memory_mib"] == 12
    rates = {(each.preset, each.server): each for each in done.rates}
    assert set(rates) == {(preset, server) for preset in "AD" for server in ("Headrace int8", "peer")}
    assert rates["A", "Headrace int8"].is_ours
    assert not rates["A", "peer"].is_ours
    assert (
        rates["A", "Headrace int8"].lowest <= rates["A", "Headrace int8"].median <= rates["A", "Headrace int8"].highest
    )
    assert rates["D", "peer"].errors > 0

    load = LoadOptions(presets="A,D", output=tmp_path / "out.json", plot=tmp_path / "out.svg")
    compare.report([done], load, Console(quiet=True))
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["kind"] == "compare"
    assert content["classes"][0]["servers"] == ["Headrace int8", "peer"]
    assert [(each["preset"], each["target"]) for each in content["ratios"]] == [("A", 1.7), ("D", 1.6)]
    assert (tmp_path / "out.svg").stat().st_size > 1000


async def test_a_server_that_computes_while_idle_is_refused():
    with pytest.raises(ConfigError, match=r"peer takes 0\.40 cores while idle"):
        await run_class(peer_share=0.4)


@pytest.mark.parametrize("peer", [peer_headrace, peer_llama_cpp, peer_openvino])
def test_every_peer_has_a_command_for_every_class(peer):
    commands = [peer.command_for(precision, 4321) for precision in compare.PRECISIONS]

    assert all("4321" in command.arguments for command in commands)
    assert len({command.name for command in commands}) == 3
    assert len({tuple(command.arguments) for command in commands}) == 3


def test_a_server_that_is_not_installed_or_ends_is_one_clear_error(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(ConfigError, match="run benchmarks/compare/setup first"):
        ServerProcess(ServerCommand("gone", ["true"], needs=(tmp_path / "missing",)), 1, log)
    ends = ServerCommand("ends", [sys.executable, "-c", "print('no memory'); raise SystemExit(3)"])
    with (
        ServerProcess(ends, free_port(), log) as server,
        pytest.raises(ConfigError, match="ends ended with status 3:\nno memory"),
    ):
        server.wait_until_ready()


@pytest.mark.parametrize("text", ["", "16,32"])
def test_unknown_classes_are_refused(text):
    with pytest.raises(ConfigError, match="--classes takes any of 16, 8, 4"):
        compare._chosen(text, compare.PRECISIONS, "--classes")
