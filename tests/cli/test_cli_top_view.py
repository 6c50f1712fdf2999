"""What `headrace top` shows, in terminals of any size."""

import io

import pytest
from rich.console import Console

from headrace.cli.running_servers import Load, Request, Snapshot
from headrace.cli.top import MAX_LISTED, View, printable, sparkline

LOADS = [Load(0, 8, 20, 4, 0.25, 0.5, 200.0), Load(1, 0, 0, 0, 0.9, 0.25, 131.4)]
REQUESTS = [
    Request("chatcmpl-one", "waiting", age_s=0.004, prompt_tokens=12),
    Request("chatcmpl-two", "running", "team-a", "poet", 1, 2048, 17, 3.25, ttft_s=0.1204),
    Request("chatcmpl-three", "finished", finish_reason="abort", completion_tokens=3, age_s=125.0, ttft_s=1.5, e2e_s=2),
]


def snapshot(**more):
    given = {"loads": LOADS[:1], "requests": REQUESTS, "model": "tiny", "version": "0.1.0"}
    return Snapshot(**(given | more))


def lines(shown, width=100, height=None, **more):
    view = View(url="http://127.0.0.1:30000", snapshot=shown, rates=[0.0, 10.0, 20.0], **more)
    console = Console(file=io.StringIO(), width=width)
    options = console.options if height is None else console.options.update(height=height)
    rendered = console.render_lines(view, options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in rendered]


def row(shown, name):
    (found,) = [line.split(maxsplit=1)[1] for line in shown if line.startswith(name)]
    return found


def test_everything_is_there():
    shown = lines(snapshot())

    assert shown[0] == "tiny · Headrace 0.1.0 · http://127.0.0.1:30000 · q quits"
    assert row(shown, "requests") == "8 running, 24 waiting"
    assert row(shown, "tokens/s") == "200 out"
    assert row(shown, "KV cache").split()[1:3] == ["25", "%"]
    assert row(shown, "prefix hits").endswith("50 %  (since start)")
    assert row(shown, "first token").endswith("median 120 ms, p95 1.5 s  (last 2)")
    assert row(shown, "between tokens").endswith("median 250 ms, p95 250 ms  (last 1)")
    assert [line.split() for line in shown[-3:]] == [
        ["chatcmpl-one", "waiting", "4", "ms", "12", "0"],
        ["chatcmpl-two", "running", "3.25", "s", "2048", "17", "poet", "team-a"],
        ["chatcmpl-three", "abort", "2", "min", "5", "s", "0", "3"],
    ]
    assert "▁▅█" in "\n".join(shown)
    assert not any(line.startswith("replica") for line in shown)


def test_replicas_have_a_line_each_when_there_are_several():
    shown = lines(snapshot(loads=LOADS))
    begin = next(number for number, line in enumerate(shown) if line.strip().startswith("replica"))
    assert [line.split() for line in shown[begin + 1 : begin + 3]] == [
        ["0", "8", "24", "25", "%", "50", "%", "200"],
        ["1", "0", "0", "90", "%", "25", "%", "131"],
    ]
    assert shown[-2].split()[-3:] == ["poet", "team-a", "1"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width):
    many = [Request(f"chatcmpl-{'x' * 40}", "finished", "team-a", "poet", 1, 131_072, 98_765, 86_399.0)]
    shown = lines(snapshot(loads=LOADS, requests=many if width >= 60 else REQUESTS[:1]), width)
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    assert "8 running, 24 waiting" in text
    assert ("131k" in text and "98.8k" in text and "23 h 59 min" in text) or width < 60
    assert (f"chatcmpl-{'x' * 40}" in text) == (width == 200)


def test_only_as_many_requests_are_listed_as_there_is_room_for():
    many = [Request(f"r{number}", "running") for number in range(50)]
    for height in (30, 18, 12, 5):
        shown = lines(snapshot(requests=many), height=height)
        assert len(shown) <= height
    assert sum(line.startswith("r") and "running" in line for line in lines(snapshot(requests=many), height=30)) > 10
    once = lines(snapshot(requests=many), is_live=False)
    assert sum(line.startswith("r") and line.split()[1] == "running" for line in once) == MAX_LISTED
    assert "q quits" not in once[0]


def test_what_the_key_does_not_open_is_left_out_in_one_line():
    nobody = lines(snapshot(loads=None, requests=None))
    assert nobody[-1] == "Load and requests need an API key (--api-key)."
    assert "chatcmpl" not in "\n".join(nobody)
    assert not any("need" in line for line in lines(snapshot()))


def test_problems_are_told():
    shown = "\n".join(lines(snapshot(loads=None, problem="the engine restarts")))
    assert "the engine restarts" in shown
    assert "need" not in shown


def test_without_a_server_it_waits_and_says_why():
    shown = lines(None, problem="no server answers at http://127.0.0.1:30000: Connection refused")
    assert "waiting for http://127.0.0.1:30000" in shown
    assert shown[-1].endswith("Connection refused")


def test_nothing_that_a_client_chose_commands_the_terminal():
    evil = "\x1b]0;title\x07\x1b[31m\u202e[bold]x"
    shown = lines(snapshot(requests=[Request(evil, "running", evil, evil)], model=evil, problem=evil))
    text = "\n".join(shown)
    assert printable(evil) == "?]0;title??[31m?[bold]x"
    assert text.count(printable(evil)) >= 4
    assert not any(char in text for char in "\x1b\x07\u202e")


def test_a_terminal_without_unicode_gets_plain_characters():
    class Plain(io.StringIO):
        encoding = "ascii"

    out = Plain()
    Console(file=out, width=80).print(View(url="http://a", snapshot=snapshot(), rates=[1.0, 2.0], is_live=False))
    assert out.getvalue().isascii()


@pytest.mark.parametrize(
    ("values", "width", "blocks"),
    [
        ([0, 0, 0], 9, "▁▁▁"),
        ([0, 1, 50, 100], 9, "▁▂▅█"),
        ([100, 1, 50], 2, "▂█"),
        ([1], 9, ""),
        ([1, 2], 0, ""),
    ],
)
def test_the_plot_shows_the_last_rates_against_their_highest(values, width, blocks):
    assert sparkline(values, width) == blocks
