"""The benchmarks of steps and kernels: they run the real thing, and their documents say what was measured."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.kernels import parse, run_kernels
from headrace import kernels
from headrace.benchmark.figures import timing
from headrace.benchmark.step import MachineLimits, StepOptions, run_step
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.kernels.decoder import PHASES

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not() or "-")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def same_threads():
    before = kernels.num_threads()
    yield
    kernels.set_num_threads(before)


@pytest.fixture
def dummy(tmp_path: Path) -> ServerArgs:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ServerArgs(model_path=str(tmp_path), load_format="dummy", num_threads=1)


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_steps_are_timed_by_shape_and_written(dummy: ServerArgs, quiet: Console, tmp_path: Path):
    output = tmp_path / "results" / "step.json"

    run_step(dummy, StepOptions((1, 3), (16, 40), (32,), repeat=2, output=output), quiet)

    content = json.loads(output.read_text())
    assert content["kind"] == "step"
    assert [(row["kind"], row["batch"], row["context"], row["new_tokens"]) for row in content["results"]] == [
        ("decode", 1, 16, 1),
        ("decode", 3, 16, 1),
        ("decode", 1, 40, 1),
        ("decode", 3, 40, 1),
        ("prefill", 1, 0, 32),
    ]
    for row in content["results"]:
        assert row["total"]["repetitions"] == 2
        assert 0 < row["model"]["best_s"] < row["total"]["best_s"]
        assert row["limit_s"] > 0
    assert any(decision.startswith("fused decoder: yes") for decision in content["model"]["decisions"])


def test_parts_of_a_step_and_busy_neighbours_are_shown(dummy: ServerArgs, tmp_path: Path):
    console, output = Console(file=io.StringIO(), width=200), tmp_path / "step.json"

    run_step(dummy, StepOptions((2,), (16,), (), repeat=2, phases=True, busy_neighbours=1, output=output), console)

    (row,) = json.loads(output.read_text())["results"]
    assert list(row["phases"]) == [*PHASES, "lm_head"]
    assert min(row["phases"].values()) >= 0 < sum(row["phases"].values())
    assert row["busy_total"]["repetitions"] == 2
    assert "beside" in console.file.getvalue()
    assert "1 busy" in console.file.getvalue()
    assert "gate_up" in console.file.getvalue()


def test_a_step_without_rows_is_refused(dummy: ServerArgs, quiet: Console):
    with pytest.raises(ConfigError, match="at least one batch"):
        run_step(dummy, StepOptions((), (16,), ()), quiet)


def test_every_op_is_timed_and_written(quiet: Console, tmp_path: Path):
    output = tmp_path / "kernels.json"
    what = ["--shapes", "135m", "--ops", "rms,attention,linear out", "--rows", "1,16", "--context", "32"]

    run_kernels(parse([*what, "--repeat", "1", "--output", str(output)]), quiet)

    results = json.loads(output.read_text())["results"]
    assert {(row["op"], row["rows"]) for row in results} == {
        *((op, rows) for op in ("rms_norm", "linear out", "attention decode") for rows in (1, 16)),
        ("attention extend", 16),
    }
    assert all(row["num_bytes"] > 0 and row["time"]["median_s"] > 0 for row in results)


def test_an_unknown_shape_or_op_is_refused(quiet: Console):
    with pytest.raises(SystemExit):
        parse(["--shapes", "7b"])
    with pytest.raises(ConfigError):
        run_kernels(parse(["--shapes", "135m", "--ops", "no_such_op", "--rows", "1", "--repeat", "1"]), quiet)


def test_the_limit_is_the_longer_of_reading_and_computing():
    limits = MachineLimits(10.0, 100.0, 400.0, 200.0, 50.0).best(MachineLimits(20.0, 50.0, 200.0, 300.0, 40.0))

    assert limits.shortest_s(40, 100) == 2.0
    assert limits.shortest_s(40, 400) == 4.0
    assert limits.shortest_s(40, 100, 800) == 3.0
    assert limits.shortest_s(40, 100, 400, 600) == 4.0
    assert limits.shortest_s(40, 100, 400, 600, 50) == 5.0


def test_timings_are_ordered():
    got = timing([3.0, 1.0, 2.0])

    assert (got.best_s, got.median_s, got.p90_s, got.repetitions) == (1.0, 2.0, 2.0, 3)
