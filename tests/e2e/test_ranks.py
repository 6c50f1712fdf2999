"""One model on two ranks, through whole engines: the text of one process, the same bits however it is computed, and what happens when a rank dies."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import GREEDY, SEEDED, Answer, ids_after_retraction, make_cases, one_by_one, running_engine, together
from rank_processes import follower_of, followers

from headrace.api.engine import Engine
from headrace.errors import ConfigError, HeadraceError
from headrace.processes.numa import dealt, read_nodes, usable

TWO: dict[str, Any] = {"tp_size": 2, "single_process": False}
STAGES: dict[str, Any] = {"pp_size": 2, "single_process": False}
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a lighthouse keeper who",
    "1, 2, 3, 4,",
    "Water boils at",
    "The three primary colors are",
]
LIMIT_S = 60.0
POLICIES_ARE_TOLD = Path("/proc/self/numa_maps").exists()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def ranks(tiny_model: str, profiles: Path) -> Iterator[Engine]:
    with running_engine(tiny_model, profile_dir=str(profiles), **TWO) as engine:
        yield engine


@pytest.fixture(scope="module")
def bound(tiny_model: str) -> Iterator[Engine]:
    """The same ranks on cores of their own, which compute prompts in chunks and one step at a time."""
    options = {"chunked_prefill_size": 16, "disable_overlap_schedule": True, "numa_bind": POLICIES_ARE_TOLD}
    with running_engine(tiny_model, **options, **TWO) as engine:
        yield engine


def test_greedy_text_and_logprobs_are_those_of_one_process_and_ranks_end_with_their_engine(
    tiny_uneven_model: str, capfd: pytest.CaptureFixture[str]
):
    """Of three KV heads one rank has two."""
    others = followers()
    found = []
    for options in ({}, TWO):
        with running_engine(tiny_uneven_model, dtype="float32", **options) as engine:
            sampling = {"temperature": 0.0, "max_new_tokens": 12}
            found.append(
                engine.generate(PROMPTS, sampling, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
            )
    for one, two in zip(*found, strict=True):
        assert two["text"] == one["text"]
        for side in ("input_token_logprobs", "output_token_logprobs"):
            for a, b in zip(one["meta_info"][side], two["meta_info"][side], strict=True):
                assert a[1] == b[1]
                assert a[0] is None or abs(a[0] - b[0]) < 2e-3
    assert followers() == others
    assert "leaked" not in capfd.readouterr().err  # by the kernels' library, of what outlives its process's last line


def test_an_answer_has_the_same_bits_alone_together_in_chunks_and_cached(ranks: Engine, bound: Engine):
    cases = make_cases([1, 17, 130], {"greedy": GREEDY, "seeded": SEEDED})
    alone: dict[str, Answer] = one_by_one(ranks, cases)

    assert together(ranks, cases) == alone
    assert together(bound, cases) == alone


def test_every_rank_says_what_it_keeps(tiny_model: str, ranks: Engine):
    [leader, follower] = ranks.get_ranks()

    assert [(one["dp_rank"], one["rank"]) for one in (leader, follower)] == [(0, 0), (0, 1)]
    assert [psutil.Process(one["pid"]) in followers() for one in (leader, follower)] == [False, True]
    with running_engine(tiny_model) as engine:
        [alone] = engine.get_ranks()
    for one in (leader, follower):
        assert 0 < one["weight_bytes"] < alone["weight_bytes"] < one["resident_bytes"]
        assert one["kv_bytes"] > 0


def test_a_profile_has_the_same_steps_of_every_rank(ranks: Engine, profiles: Path):
    def steps_of(file: Path) -> set[str]:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        return {event["name"] for event in events if event.get("name", "").startswith("headrace step")}

    def traces(folder: str) -> list[Path]:
        return sorted((profiles / folder).glob("steps-*-rank*.trace.json.gz"))

    assert ranks.start_profile("until-stopped") == "profiling"
    ranks.generate("Water boils at", GREEDY)
    assert "and each other rank its own file" in ranks.stop_profile()
    assert ranks.start_profile("three-steps", num_steps=3) == "profiling 3 steps"
    ranks.generate("Water boils at", GREEDY)
    # The answer needs the steps of all ranks, and each writes its file before the step after its profile.
    for folder, num_steps in (("until-stopped", None), ("three-steps", 3)):
        first, second = traces(folder)
        assert first.name.replace("rank0", "rank1") == second.name
        assert steps_of(first) == steps_of(second)
        assert num_steps in (None, len(steps_of(first)))
    with pytest.raises(HeadraceError, match="no profile is running"):
        ranks.stop_profile()


def test_rows_with_a_grammar_and_rows_that_were_set_back_are_as_alone(tiny_model: str):
    """More prompts than the pool has room for, some with a grammar; and a pause that sends all of them back to the queue."""
    plain = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    sampling = [
        plain,
        {**plain, "ignore_eos": False, "regex": "[a-z ]{5,20}"},
        {**plain, "temperature": 0.8, "seed": 3},
    ] * 2
    prompts = [[5 + i] * 40 for i in range(len(sampling))]
    with running_engine(tiny_model, max_total_tokens=256, **(TWO | STAGES)) as engine:
        alone = [
            engine.generate(input_ids=prompt, sampling_params=one)["output_ids"]
            for prompt, one in zip(prompts, sampling, strict=True)
        ]
        together = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert [one["output_ids"] for one in together] == alone
        assert ids_after_retraction(engine, prompts, sampling) == alone


@pytest.mark.parametrize("parts", [TWO, STAGES], ids=["rank", "stage"])
def test_a_quantised_rank_that_is_stopped_costs_no_token(tiny_model: str, parts: dict[str, Any]):
    prompts = [[5 + i, 6, 7, 8, 9] for i in range(4)]
    sampling = {"temperature": 0.9, "seed": 5, "max_new_tokens": 200, "ignore_eos": True}
    others = followers()
    with running_engine(tiny_model, quantization="int8", rank_timeout_s=4.0, **parts) as engine:
        info = engine.get_server_info()
        assert (info["kv_cache_dtype"], info["kv_cache_added_error"] <= 0.02) == ("int8", True)
        first, second = (engine.generate("Water boils at", GREEDY, return_hidden_states=True) for _ in range(2))
        assert first["output_ids"] == second["output_ids"]
        assert len(first["meta_info"]["hidden_states"]) == len(second["meta_info"]["hidden_states"])
        whole = [out["output_ids"] for out in engine.generate(input_ids=prompts, sampling_params=sampling)]
        [lost] = followers() - others
        begun = threading.Event()
        outputs: list[list[int]] = []

        def generate() -> None:
            last: dict[int, list[int]] = {}
            for item in engine.generate(input_ids=prompts, sampling_params=sampling, stream=True):
                last[item.get("index", 0)] = item["output_ids"]
                begun.set()
            outputs.extend(last[i] for i in sorted(last))

        thread = threading.Thread(target=generate)
        thread.start()
        assert begun.wait(LIMIT_S)
        os.kill(lost.pid, signal.SIGSTOP)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert outputs == whole
        [new] = followers() - others
        assert new != lost


def heap_policy(process: psutil.Process) -> str:
    """Where a process's heap gets memory, as in numa(7)."""
    maps = [line.split() for line in Path(f"/proc/{process.pid}/numa_maps").read_text().splitlines()]
    [heap] = [words for words in maps if "heap" in words]
    return heap[1]


def test_bound_ranks_have_the_memory_of_their_node_and_answer_as_others(ranks: Engine, bound: Engine):
    if not POLICIES_ARE_TOLD:
        pytest.skip("the kernel does not tell the policy of a process's memory")
    whole = usable(read_nodes(), os.sched_getaffinity(0), None)
    follower = follower_of(bound)
    for place, process in zip(dealt(whole, 2), (follower.parent(), follower), strict=True):
        assert process is not None
        assert heap_policy(process) == f"bind:{place.node}"
        assert process.cpu_affinity() == list(place.cores)
    want, found = (engine.generate(PROMPTS, GREEDY) for engine in (ranks, bound))
    assert [one["output_ids"] for one in found] == [one["output_ids"] for one in want]


def test_what_ranks_cannot_do_is_refused(tiny_model: str):
    with pytest.raises(ConfigError, match="--single-process"):
        Engine(model_path=tiny_model, tp_size=2, single_process=True)
    one_head = '{"num_attention_heads": 1, "num_key_value_heads": 1}'
    with (
        pytest.raises(HeadraceError, match="cannot be split over"),
        running_engine(tiny_model, json_model_override_args=one_head, **TWO),
    ):
        pass


def test_a_stopped_rank_ends_with_its_leader(ranks: Engine):
    """It holds weights and shared memory, and nobody would continue it."""
    want = ranks.generate(PROMPTS[0], GREEDY)["output_ids"]
    stopped = follower_of(ranks)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(stopped.ppid(), signal.SIGKILL)
    psutil.wait_procs([stopped], LIMIT_S)
    assert not stopped.is_running()
    assert ranks.generate(PROMPTS[0], GREEDY)["output_ids"] == want
