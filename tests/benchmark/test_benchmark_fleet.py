"""The simulated fleet: real balancers, planners and caches over made-up workers and time."""

import dataclasses
import io
import json
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.fleet import disaggregation
from bench.fleet.__main__ import main
from bench.fleet.costs import DEFAULT_COSTS, StepSeconds, fit, read_costs
from bench.fleet.options import FleetOptions, ReplicaOptions, WorkloadOptions
from bench.fleet.outcome import Outcome
from bench.fleet.run import run_fleet
from bench.fleet.simulation import Fleet
from bench.fleet.workload import Workload
from headrace.errors import ConfigError
from headrace.frontend.balancers import Method
from headrace.scheduler.step_cost import StepWork

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PREFIXES = WorkloadOptions(groups=16, system_tokens=256, turns=3, turn_tokens=32, output_tokens=8)


def simulate(num_replicas: int, policy: Method = "cache_aware", seed: int = 1, **options) -> Outcome:
    return Fleet(
        FleetOptions(**{"workload": PREFIXES, "num_requests": 300} | options), num_replicas, policy, seed
    ).run()


def without_wall_time(outcome: Outcome) -> Outcome:
    return dataclasses.replace(outcome, wall_s=0.0)


def test_cache_aware_over_four_replicas_keeps_nine_tenths_of_the_hit_rate_of_one():
    one = simulate(1, rate=4.0)
    four = {policy: simulate(4, policy, rate=1.0) for policy in ("cache_aware", "round_robin")}
    assert one.prompt_tokens == four["cache_aware"].prompt_tokens, "the same requests"
    assert four["cache_aware"].hit_rate >= 0.9 * one.hit_rate
    assert four["round_robin"].hit_rate < 0.9 * one.hit_rate, "the workload tells policies apart"


@pytest.mark.parametrize("policy", ["round_robin", "shortest_queue", "total_tokens", "cache_aware"])
def test_the_same_seed_gives_the_same_run(policy: Method):
    first, again, other = (simulate(3, policy, seed, failures=2, restart_s=5.0) for seed in (1, 1, 2))
    assert without_wall_time(first) == without_wall_time(again)
    assert first.ttft_s != other.ttft_s


def test_decode_servers_go_on_with_prompts_of_prefill_servers():
    """With the scheduler's own rooms: every request is answered, none is computed twice, and its gaps know nothing of prompts."""
    given = SimpleNamespace(servers=2, num_requests=30, seed=1, gb_per_s=1.0)
    asked = WorkloadOptions(groups=1, system_tokens=0, turns=1, turn_tokens=600, output_tokens=40)
    mixed, split = (disaggregation.simulate(asked, given, ReplicaOptions(), number, 2.0) for number in (0, 1))
    assert mixed["ttft_s"]["count"] == split["ttft_s"]["count"] == 30
    assert mixed["itl_s"]["count"] == split["itl_s"]["count"] > 30 * 20
    assert split["num_own"] == 0
    assert split["itl_s"]["p99"] < 0.03 < 0.1 < mixed["itl_s"]["p99"]

    best = disaggregation.most(
        lambda rate: {"rate": rate, **{key: {"p99": rate} for key in ("ttft_s", "itl_s", "per_token_s")}}, 3.0, 5.0
    )
    assert 2.8 < best["rate"] <= 3.0
    assert best["keeps"]


def test_requests_of_replicas_that_die_are_answered_by_others():
    outcome = simulate(3, "shortest_queue", rate=3.0, failures=20, restart_s=2.0)
    assert outcome.num_requests == 300
    assert outcome.num_deaths > 5
    assert outcome.num_moved > 0
    assert outcome.output_tokens == simulate(3, "shortest_queue", rate=3.0).output_tokens


def test_requests_wait_while_no_replica_lives():
    outcome = simulate(1, failures=10, restart_s=20.0, rate=2.0)
    assert outcome.num_requests == 300
    assert outcome.e2e_s.p99 > 10.0


def test_a_replica_that_died_comes_back_with_an_empty_cache():
    assert simulate(1, failures=30, restart_s=0.0).hit_rate < simulate(1).hit_rate


def test_replicas_that_nobody_asks_are_not_made():
    fleet = Fleet(FleetOptions(workload=PREFIXES, num_requests=5, rate=0.001), 10_000, "round_robin", 1)
    assert fleet.run().num_used == len(fleet._replicas) <= 5


def test_a_request_alone_takes_what_its_steps_cost():
    cost = StepSeconds(token_s=0.001, attended_s=0.0, row_s=0.0, step_s=0.01)
    workload = WorkloadOptions(groups=1, system_tokens=0, turns=1, turn_tokens=1, output_tokens=1)
    outcome = simulate(1, workload=workload, replica=ReplicaOptions(cost=cost), num_requests=1)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.num_steps) == (1, 1, 1)
    assert outcome.ttft_s.p50 == outcome.e2e_s.p50 == pytest.approx(0.011)


def test_several_tokens_in_a_step_give_about_the_same_figures_in_fewer_steps():
    fine, coarse = (simulate(4, replica=ReplicaOptions(tokens_per_step=k)) for k in (1, 4))
    assert coarse.num_steps < fine.num_steps / 2
    assert coarse.output_tokens == fine.output_tokens
    assert coarse.hit_rate == pytest.approx(fine.hit_rate, abs=0.05)
    assert coarse.busy_fraction == pytest.approx(fine.busy_fraction, rel=0.1)


def test_a_pool_that_is_full_evicts_and_retracts_without_losing_requests():
    workload = dataclasses.replace(PREFIXES, turns=1, output_tokens=100)
    outcome = simulate(2, rate=20.0, replica=ReplicaOptions(kv_tokens=1280), workload=workload)
    assert outcome.num_requests == 300
    assert outcome.num_retracted > 0


def test_sessions_share_their_system_prompt_and_continue_their_own_text():
    workload = Workload(dataclasses.replace(PREFIXES, groups=1), 20, 1.0, 7)
    prompts = []
    for _, session in workload.sessions():
        before = b""
        while session.turns_left:
            prompt = session.next_request().content.token_ids
            assert prompt.startswith(before)
            before = prompt
            session.answered(array("i", [3, 4]))
        prompts.append(before)
    assert len({prompt[: 4 * 128] for prompt in prompts}) == 1
    assert len(set(prompts)) == len(prompts)


def test_costs_are_fitted_to_what_was_measured():
    want = StepSeconds(token_s=4e-4, attended_s=5e-7, row_s=1e-4, step_s=9e-3)
    works = [StepWork(n, n * context, n) for n in (1, 8, 32) for context in (128, 1024)]
    works += [StepWork(n, n * n / 2, 1) for n in (128, 512)]
    found = fit([(work, want.of(work)) for work in works])
    assert found.error < 1e-3
    assert dataclasses.astuple(found)[:4] == pytest.approx(dataclasses.astuple(want)[:4], rel=0.02)


def test_the_default_costs_are_those_of_the_kept_measurement():
    (kept,) = RESULTS.glob("*-step-fleet.json")
    assert dataclasses.astuple(DEFAULT_COSTS) == pytest.approx(dataclasses.astuple(read_costs(kept)), rel=0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "no result"),
        ('{"kind": "serving", "results": []}', "bench serving"),
        ('{"kind": "step", "results": []}', "at least four"),
    ],
)
def test_a_file_without_step_costs_is_refused(text: str, why: str, tmp_path: Path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_costs(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: FleetOptions(replicas=(0,)), "--replicas"),
        (lambda: FleetOptions(rate=0.0), "--rate"),
        (lambda: FleetOptions(failures=-1), "--failures"),
        (lambda: FleetOptions(replica=ReplicaOptions(kv_tokens=512)), "--kv-tokens"),
        (lambda: WorkloadOptions(turns=0), "--turns"),
        (lambda: WorkloadOptions(zipf=-1.0), "--zipf"),
        (lambda: ReplicaOptions(tokens_per_step=0), "--tokens-per-step"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, why: str):
    with pytest.raises(ConfigError, match=why):
        make()


def test_the_command_writes_tables_results_and_a_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    console = Console(file=io.StringIO(), width=80)
    options = FleetOptions(
        replicas=(2, 4),
        policies=("round_robin", "cache_aware"),
        workload=PREFIXES,
        num_requests=50,
        repeat=2,
        output=tmp_path / "fleet.json",
        plot=tmp_path / "fleet.svg",
    )
    run_fleet(options, console)

    content = json.loads((tmp_path / "fleet.json").read_text())
    assert content["kind"] == "fleet"
    assert [(entry["replicas"], entry["policy"]) for entry in content["results"]] == [
        (2, "round_robin"),
        (2, "cache_aware"),
        (4, "round_robin"),
        (4, "cache_aware"),
    ]
    assert all(len(entry["repetitions"]) == 2 for entry in content["results"])
    assert content["results"][0]["median"]["num_requests"] == 50
    assert (tmp_path / "fleet.svg").read_text().startswith("<?xml")
    assert "4 replicas, 50 requests" in console.file.getvalue()
    assert "p50" in console.file.getvalue()


def test_the_options_of_the_command_reach_the_simulation(tmp_path: Path):
    (kept,) = RESULTS.glob("*-step-fleet.json")
    arguments = ["--replicas", "2", "--policies", "shortest_queue", "--num-requests", "20", "--failures", "1"]
    arguments += ["--step-costs", str(kept), "--kv-tokens", "8192", "--output", str(tmp_path / "fleet.json")]
    main(arguments)
    content = json.loads((tmp_path / "fleet.json").read_text())
    assert content["options"]["failures"] == 1
    assert content["options"]["replica"]["kv_tokens"] == 8192
    assert [entry["policy"] for entry in content["results"]] == ["shortest_queue"]
