"""Random histories: whatever arrives, stops, aborts or runs short of pages, tokens are right and pages come back."""

import math

from fake_worker import EOS, Rig, expected_outputs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.messages.control import AbortReq
from headrace.messages.operations import FLUSH_CACHE, Nothing

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)

REQUEST = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_new_tokens": st.integers(0, 20),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
        "priority": st.integers(-2, 2),
        "namespace": st.sampled_from(["", "", "a"]),
        "n": st.sampled_from([1, 1, 1, 3]),
    }
)
ACTION = st.one_of(
    REQUEST,
    st.integers(1, 6),  # so many turns
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.just("flush"),
    st.tuples(st.sampled_from(["nan", "fail"]), st.integers(0, 20)),
)
SETUP = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16]),
        "num_pages": st.integers(12, 40),
        "radix": st.booleans(),
        "overlap": st.booleans(),
        "policy": st.sampled_from(["fcfs", "lpm", "priority"]),
        "chunk": st.integers(1, 12),
        "step_tokens": st.integers(4, 24),
        "max_running": st.integers(1, 5),
        "preemption": st.sampled_from([0, 0, 1, 2]),
        "ids_a_row": st.sampled_from([1, 1, 3]),
        "max_step_s": st.sampled_from([math.inf, 1e-3, 0.03]),
        "num_stages": st.sampled_from([1, 1, 2, 3]),
        "num_parts": st.sampled_from([1, 1, 2, 3]),
        "sits_out": st.sampled_from([0, 0, 2, 3, 7]),  # one row in so many sits a step out
        "guesses": st.sampled_from([0, 0, 1, 3, 6]),  # tokens that are guessed at a time, at most
    }
)


def guess_of(number: int, most: int) -> tuple[int, int]:
    """0 to `most` tokens, of which any number from the first on are right."""
    count = number % (most + 1)
    return count, number // 7 % (count + 1)


@settings(max_examples=800, deadline=None)
@given(setup=SETUP, actions=st.lists(ACTION, min_size=1, max_size=25))
def test_every_history_ends_with_right_tokens_and_a_whole_pool(setup, actions):
    setup = setup | {
        "num_pages": setup["num_pages"] * (4 if setup["page_size"] == 1 else 1),
        # With several tokens a row, where the next step begins is known only after the commit; stages wait for that.
        "overlap": setup["overlap"] and setup["ids_a_row"] == 1 and setup["num_stages"] == 1,
        # Guesses are about one token after another.
        "guesses": setup["guesses"] if setup["ids_a_row"] == 1 else 0,
    }
    if setup["num_parts"] > 1:
        setup["num_stages"] = 1  # the two are not combined
    every, most = setup.pop("sits_out"), setup.pop("guesses")
    rig = Rig(**setup)
    rig.worker.seconds = lambda batch: 1e-3 * batch.num_tokens
    rig.worker.sits_out = lambda step, row: bool(every) and hash((step, row)) % every == 0
    rig.worker.guesses = lambda step, row: guess_of(hash((step, row)), most)
    asked = {}
    aborted = set()
    for action in actions:
        if isinstance(action, dict):
            group = f"g{len(asked)}" if action["n"] > 1 else ""
            for _ in range(action["n"]):
                rid = f"r{len(asked)}"
                asked[rid] = {name: value for name, value in action.items() if name != "n"}
                rig.add(rid, group=group, **asked[rid])
        elif isinstance(action, int):
            for _ in range(action):
                rig.turn()
        elif action == "flush":
            rig.inbox.send(FLUSH_CACHE.message(1, Nothing()))
        elif action[0] == "nan":
            rig.worker.nan_rids.add(f"r{action[1]}")
        elif action[0] == "fail":
            rig.worker.fail_steps.add(rig.state.next_step + action[1] % 4)
        else:
            rid = f"r{action[1]}"
            if rid in asked:
                aborted.add(rid)
                rig.inbox.send(AbortReq((rid,)))
    rig.drain()

    assert set(rig.finish) == set(asked)
    for rid, request in asked.items():
        want = expected_outputs(request["prompt"], request["max_new_tokens"], 9, request["ignore_eos"])
        got, finish = rig.ids[rid], rig.finish[rid]
        if finish.type == "abort":
            assert (
                rid in aborted or finish.message in ("injected", "the model produced NaN") or "alone" in finish.message
            )
            assert got == want[: len(got)]
        else:
            assert got == want
            stopped = bool(want) and want[-1] == EOS and not request["ignore_eos"]
            assert finish.type == ("stop" if stopped else "length")
    rig.check_idle()


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 24)), min_size=2, max_size=10),
    overlap=st.booleans(),
    page_size=st.sampled_from([1, 4]),
    chunk=st.integers(1, 9),
)
@example(
    requests=[([0] * 16, 20), ([0] * 11, 18)], overlap=False, page_size=1, chunk=3
)  # retracted and admitted by one plan
def test_pressure_changes_nothing_but_time(requests, overlap, page_size, chunk):
    tight = Rig(num_pages=60 // page_size, page_size=page_size, overlap=overlap, chunk=chunk, eos_every=50)
    for i, (prompt, max_new) in enumerate(requests):
        tight.add(f"r{i}", prompt, max_new, stream=True)
    tight.drain()

    for i, (prompt, max_new) in enumerate(requests):
        assert tight.ids[f"r{i}"] == expected_outputs(prompt, max_new, 50)
        assert tight.finish[f"r{i}"].type in ("stop", "length")
    tight.check_idle()


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    chunk=st.integers(1, 9),
    start=st.integers(0, 23),
    overlap=st.booleans(),
    num_pages=st.integers(50, 200),
)
def test_logprobs_one_per_token_whatever_the_chunks_cache_and_retractions(prompts, chunk, start, overlap, num_pages):
    from headrace.messages.requests import LogprobSpec

    rig = Rig(num_pages=num_pages, chunk=chunk, overlap=overlap, eos_every=30)
    for i, prompt in enumerate(prompts):
        rig.add(f"r{i}", prompt, 16, logprobs=LogprobSpec(min(start, len(prompt))), stream=True)
    rig.drain()

    for i, prompt in enumerate(prompts):
        rid = f"r{i}"
        assert rig.num_logprobs[rid] == len(rig.ids[rid])
        prompt_blocks = [row.prompt_logprobs for row in rig.rows[rid] if row.prompt_logprobs is not None]
        got = sum(len(b.values) // 4 for b in prompt_blocks)
        assert got == len(prompt) - max(1, min(start, len(prompt)))
        assert len(prompt_blocks) <= 1  # with the first output only
