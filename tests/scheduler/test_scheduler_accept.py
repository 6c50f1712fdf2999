"""Rows that give several tokens at once: the same as one after another, and nothing after the one that ends the request."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_worker import EOS, Rig, expected_outputs

from headrace.messages.outputs import LogprobBlock
from headrace.messages.requests import LogprobSpec, PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.request import Req

OUTPUTS_ONLY = LogprobSpec(prompt_start=1000)


def prompt(n: int, start: int = 0) -> list[int]:
    return np.random.default_rng(start).integers(0, 2, n).tolist()


def several(**options: object) -> Rig:
    return Rig(overlap=False, ids_a_row=3, **options)


@pytest.mark.parametrize("page_size, chunk", [(1, 8), (4, 2)])
def test_three_tokens_a_row_are_the_tokens_of_one_a_row(page_size, chunk):
    rig = several(num_pages=400 // page_size, page_size=page_size, chunk=chunk)
    for i in range(4):
        rig.add(f"r{i}", prompt(5, start=i), 17 + i, ignore_eos=i % 2 == 0, logprobs=OUTPUTS_ONLY, stream=True)
    rig.drain()

    for i in range(4):
        want = expected_outputs(prompt(5, start=i), 17 + i, 9, ignore_eos=i % 2 == 0)
        assert rig.ids[f"r{i}"] == want
        assert rig.num_logprobs[f"r{i}"] == len(want)
        assert len(rig.rows[f"r{i}"]) < len(want)
    assert rig.state.counters.generation_tokens == sum(len(rig.ids[f"r{i}"]) for i in range(4))
    rig.check_idle()


def test_a_retraction_changes_no_token():
    rig = several(num_pages=120, eos_every=1000, chunk=32, step_tokens=32)
    rig.state.ratio.scale(0.1)
    for i in range(8):
        rig.add(f"r{i}", prompt(4, start=i), 60, ignore_eos=True)
    rig.drain()

    assert rig.state.counters.num_retracted > 0
    for i in range(8):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(4, start=i), 60, 1000, True)
    rig.check_idle()


def ended_by_the_second_token(kind: str) -> Rig:
    """A request whose first row gives three tokens, of which the second ends it."""
    rig = several(num_pages=100)
    pushed = []

    class Checker:
        def push(self, token_id):
            pushed.append(token_id)
            return SimpleNamespace(matched="xx") if len(pushed) == 2 else None

    rig.scheduler.stop_checkers = lambda request: Checker()
    start = next(s for s in range(100) if expected_outputs(prompt(6, s), 3, 9, ignore_eos=True)[:2] == [0, EOS])
    params = ResolvedSamplingParams(
        max_new_tokens=2 if kind == "length" else 40,
        seed=0,
        ignore_eos=kind != "eos",
        stop_token_ids=(EOS,) if kind == "stop token" else (),
        stop=("xx",) if kind == "stop string" else (),
    )
    task = SampleTask(params, logprobs=OUTPUTS_ONLY)
    content = PromptContent(np.array(prompt(6, start), np.int32).tobytes())
    rig.inbox.send(TokenizedGenerateReqInput("a", content, task))
    return rig


@pytest.mark.parametrize(
    "kind, finish",
    [
        ("stop string", ("stop", "xx", 0)),
        ("stop token", ("stop", EOS, 0)),
        ("eos", ("stop", EOS, 0)),
        ("length", ("length", None, 2)),
    ],
)
def test_what_a_row_gives_after_the_end_is_dropped(kind, finish):
    rig = ended_by_the_second_token(kind)
    rig.drain()

    ended = rig.finish["a"]
    assert (ended.type, ended.matched, ended.length) == finish
    assert rig.ids["a"] == [0, EOS]
    [row] = rig.rows["a"]
    assert row.num_output_tokens == 2
    assert np.frombuffer(row.logprobs.token_ids, np.int32).tolist() == [0, EOS]
    assert len(row.logprobs.values) == 2 * 4
    assert rig.state.counters.generation_tokens == 2
    rig.check_idle()


def test_a_stop_check_that_breaks_at_the_second_token_keeps_what_was_committed():
    rig = ended_by_the_second_token("stop string")

    class Broken:
        num_pushed = 0

        def push(self, token_id):
            self.num_pushed += 1
            if self.num_pushed == 2:
                raise RuntimeError("cannot decode")

    rig.scheduler.stop_checkers = lambda request: Broken()
    rig.drain()

    assert (rig.finish["a"].status_code, rig.ids["a"], rig.num_logprobs["a"]) == (500, [0, EOS], 2)
    assert rig.state.counters.generation_tokens == 2
    rig.check_idle()


def test_a_request_accepts_tokens_until_one_ends_it():
    params = ResolvedSamplingParams(max_new_tokens=4, seed=0, stop_token_ids=(7,))
    asked = TokenizedGenerateReqInput("r", PromptContent(bytes(4)), SampleTask(params))

    req = Req.from_input(asked, 0.0, 0, frozenset([2]), 1)
    assert req.accept([5, 5, 5]) is None
    assert req.accept([5, 5]).length == 4
    assert req.tokens().tolist() == [0, 5, 5, 5, 5]

    req = Req.from_input(asked, 0.0, 0, frozenset([2]), 1)
    assert req.accept([5, 2, 7]).matched == 2
    assert req.tokens().tolist() == [0, 5, 2]


def test_the_first_tokens_of_a_block_keep_their_alternatives():
    def ints(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    block = LogprobBlock(ints(1, 2, 3), ints(4, 5, 6), ints(*range(6)), ints(*range(6, 12)), ints(*range(9)))

    assert block.first(3) is block
    assert block.first(2) == LogprobBlock(ints(1, 2), ints(4, 5), ints(0, 1, 2, 3), ints(6, 7, 8, 9), ints(*range(6)))
    assert block.first(0) == LogprobBlock()
