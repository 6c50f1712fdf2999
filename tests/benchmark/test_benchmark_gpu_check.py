"""The command that checks a GPU, tried on the CPU with tiny layers."""

import json
import math
import time
from importlib import import_module

import pytest

from bench.gpu import kernels, rates
from bench.gpu.bench import SMALL, Bench
from bench.gpu.check import PIECES, main
from bench.gpu.floor import Work
from bench.gpu.options import CONFIGS, MODELS, Options
from headrace.checkpoint.model_config import load_model_config
from headrace.models.registry import model_class_for

DRY = ["--device", "cpu", "--tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_config_that_our_own_code_serves(name):
    config = load_model_config(CONFIGS / name)

    assert model_class_for(config).name == config.model_type
    billions = Work.of(config).weight_bytes / 2e9
    assert billions == pytest.approx({"l": 8.0, "q": 8.2 if "8b" in name else 30.5, "s": 0.134}[name[0]], rel=0.02)


def test_every_piece_has_its_measure():
    for piece in PIECES.values():
        assert callable(getattr(import_module(f"bench.gpu.{piece.module}"), piece.function))


# All that a GPU will be asked for, as `scripts/gpu_check --rehearse` does it; features only names its tests, shapes interprets for half a minute.
REHEARSED = [name for name in PIECES if name not in ("features", "shapes")]


def test_all_pieces_run_and_leave_their_results(tmp_path, capsys):
    output, out = tmp_path / "gpu.json", tmp_path / "out"

    code = main(
        ["--rehearse", "--in-process", "--only", ",".join(REHEARSED), "--output", str(output), "--out", str(out)]
    )

    shown = capsys.readouterr().out
    results = {piece["piece"]: piece for piece in json.loads(output.read_text())["results"]}
    assert list(results) == REHEARSED
    assert {piece["status"] for piece in results.values()} == {"ok"}, shown
    assert code == 0, shown
    rows = {row["what"]: row for piece in results.values() for row in piece["rows"]}
    for what in (
        "copy bandwidth",
        "bfloat16 products",
        "op moe",
        "fp8 linear, 1 rows",
        "serving throughput",
        "HTTP B8",
    ):
        assert what in rows, shown
        assert what in shown
    for what in ("decode llama-3.1-8b, batch 3", "decode qwen3-30b-a3b, batch 1", "prefill llama-3.1-8b, 64 tokens"):
        assert rows[what]["share"] > 0, rows[what]
        assert rows[what]["step_s"] > 0
    assert rows["gap between decode steps"]["gap_s"] >= 0
    # A difference of two times that are noise in this dry form: it may be of either sign.
    assert math.isfinite(rows["speed at batch 1 over transformers"]["ratio"])
    kept = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["what"] for line in kept if "what" in line] == [
        row["what"] for p in results.values() for row in p["rows"]
    ]


def broken(bench, rows):
    rows.add("before", "1")
    raise RuntimeError("out of luck")


def endless(bench, rows):
    rows.add("before", "1")
    time.sleep(1000)


def test_what_fails_is_said_and_the_next_piece_runs(monkeypatch, capsys):
    def wrong(device, dtype):
        yield "op fine", lambda: (0.0, 0.0)
        yield "op wrong", lambda: (0.5, 0.1)
        yield "op broken", lambda: 1 / 0

    monkeypatch.setattr(rates, "measure_rates", broken)
    monkeypatch.setattr(kernels, "op_checks", wrong)
    for name in ("attention_checks", "format_checks"):
        monkeypatch.setattr(kernels, name, lambda *args: ())
    monkeypatch.setattr(kernels, "token_check", lambda bench: (0.0, 0.0))

    code = main([*DRY, "--in-process", "--only", "rates,kernels"])

    shown = capsys.readouterr().out
    assert code == 1
    assert "rates: failed: RuntimeError: out of luck" in shown
    assert "    before" in shown, "what it found before"
    assert "kernels: ok" in shown
    assert "    op fine" in shown
    assert "  ! op wrong" in shown
    assert "! op broken" in shown
    assert "ZeroDivisionError" in shown


def test_a_piece_in_a_process_of_its_own_reports_and_may_run_out_of_time(monkeypatch, capsys):
    monkeypatch.setattr(rates, "measure_rates", broken)
    assert main([*DRY, "--only", "device,rates"]) == 1
    shown = capsys.readouterr().out
    assert "device: ok" in shown
    assert "rates: failed: RuntimeError: out of luck" in shown

    monkeypatch.setattr(rates, "measure_rates", endless)
    monkeypatch.setitem(PIECES, "rates", PIECES["rates"]._replace(limit_s=1.5))
    assert main([*DRY, "--only", "rates"]) == 1
    shown = capsys.readouterr().out
    assert "not done after" in shown
    assert "    before" in shown, "what it found until then"

    assert main([*DRY, "--only", "device", "--limit-s", "0"]) == 1
    assert "run it with --only device" in capsys.readouterr().out


def test_the_rates_of_an_earlier_run_are_taken(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*DRY, "--in-process", "--only", "rates", "--out", str(out)]) == 0

    assert main([*DRY, "--in-process", "--only", "prefill", "--rates", str(out / "results.jsonl")]) == 0

    assert "nan" not in capsys.readouterr().out


def test_names_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit):
        main([*DRY, "--only", "device,speed"])
    assert "--only: takes any of device, kernels" in capsys.readouterr().err


def test_a_floor_counts_the_experts_that_are_met(monkeypatch):
    config = load_model_config(CONFIGS / "qwen3-30b-a3b")
    work = Work.of(config)
    known = [{"what": "copy bandwidth", "bytes_per_s": 1e12}, {"what": "bfloat16 products", "flops_per_s": 1e15}]
    bench = Bench(Options("cpu", False, ()), SMALL, {"rates": {"rows": known}})

    one, many = work.floor_s(bench, 1, 1, 0), work.floor_s(bench, 256, 1, 0)

    # 3.3 billion parameters work on a token; a large batch meets nearly all 128 experts of a layer.
    assert one == pytest.approx(2 * 3.3e9 / 1e12, rel=0.1)
    assert many == pytest.approx(2 * 30.2e9 / 1e12, rel=0.02)
    assert work.floor_s(bench, 1, 1, 1000) - one == pytest.approx(1000 * 98304 / 1e12, rel=1e-6)
