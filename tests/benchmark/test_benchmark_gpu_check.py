"""The command that checks a GPU, tried on the CPU with tiny layers."""

import json
import math

import pytest

from headrace.benchmark.gpu import kernels, pieces
from headrace.benchmark.gpu.bench import SMALL, Bench, row
from headrace.benchmark.gpu.check import LIMIT_S, PIECES, main
from headrace.benchmark.gpu.floor import Work
from headrace.benchmark.gpu.options import CONFIGS, MODELS, Options
from headrace.checkpoint.model_config import load_model_config
from headrace.models.registry import model_class_for

DRY = ["--device", "cpu", "--tiny"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_config_that_our_own_code_serves(name):
    config = load_model_config(CONFIGS / name)

    assert model_class_for(config).name == config.model_type
    billions = Work.of(config).weight_bytes / 2e9
    assert billions == pytest.approx({"l": 8.0, "q": 8.2 if "8b" in name else 30.5, "s": 0.134}[name[0]], rel=0.02)


def test_every_piece_has_its_measure_and_its_limit():
    assert list(pieces.MEASURES) == list(PIECES) == list(LIMIT_S)


def test_all_pieces_run_and_leave_a_document(tmp_path, capsys):
    output = tmp_path / "gpu.json"

    code = main([*DRY, "--in-process", "--models", "llama-3.1-8b,qwen3-30b-a3b", "--output", str(output)])

    shown = capsys.readouterr().out
    results = {piece["piece"]: piece for piece in json.loads(output.read_text())["results"]}
    assert list(results) == list(PIECES)
    assert {piece["status"] for piece in results.values()} == {"ok"}, shown
    assert code == 0, shown
    rows = {row["what"]: row for piece in results.values() for row in piece["rows"]}
    for what in ("copy bandwidth", "bfloat16 products", "op moe", "fp8 linear", "serving throughput"):
        assert what in rows, shown
        assert what in shown
    for what in ("decode llama-3.1-8b, batch 3", "decode qwen3-30b-a3b, batch 1", "prefill llama-3.1-8b, 64 tokens"):
        assert rows[what]["share"] > 0, rows[what]
        assert rows[what]["step_s"] > 0
    assert rows["gap between decode steps"]["gap_s"] >= 0
    # A difference of two times that are noise in this dry form: it may be of either sign.
    assert math.isfinite(rows["speed at batch 1 over transformers"]["ratio"])


def test_what_fails_is_said_and_the_next_piece_runs(monkeypatch, capsys):
    def broken(bench, rows):
        rows.append(row("before", "1"))
        raise RuntimeError("out of luck")

    def wrong(device, dtype):
        yield "op fine", lambda: (0.0, 0.0)
        yield "op wrong", lambda: (0.5, 0.1)
        yield "op broken", lambda: 1 / 0

    monkeypatch.setitem(pieces.MEASURES, "rates", broken)
    monkeypatch.setattr(kernels, "op_checks", wrong)
    for name in ("attention_checks", "format_checks"):
        monkeypatch.setattr(kernels, name, lambda *args: ())
    monkeypatch.setattr(kernels, "token_check", lambda bench: (0.0, 0.0))

    code = main([*DRY, "--in-process", "--only", "rates,kernels"])

    shown = capsys.readouterr().out
    assert code == 1
    assert "rates: failed: RuntimeError: out of luck" in shown
    assert "kernels: ok" in shown
    assert "    op fine" in shown
    assert "  ! op wrong" in shown
    assert "! op broken" in shown
    assert "ZeroDivisionError" in shown


def test_a_piece_in_a_process_of_its_own_reports_and_may_run_out_of_time(monkeypatch, capsys):
    assert main([*DRY, "--only", "device"]) == 0
    assert "device: ok" in capsys.readouterr().out

    monkeypatch.setitem(LIMIT_S, "device", 0.01)
    assert main([*DRY, "--only", "device"]) == 1
    assert "not done after" in capsys.readouterr().out

    assert main([*DRY, "--only", "device", "--budget-s", "0"]) == 1
    assert "run it with --only device" in capsys.readouterr().out


def test_names_that_do_not_exist_are_refused(capsys):
    with pytest.raises(SystemExit):
        main([*DRY, "--only", "device,speed"])
    assert "no piece is called speed" in capsys.readouterr().err


def test_a_floor_counts_the_experts_that_are_met(monkeypatch):
    config = load_model_config(CONFIGS / "qwen3-30b-a3b")
    work = Work.of(config)
    rates = [{"what": "copy bandwidth", "bytes_per_s": 1e12}, {"what": "bfloat16 products", "flops_per_s": 1e15}]
    bench = Bench(Options("cpu", False, ()), SMALL, {"rates": {"rows": rates}})

    one, many = work.floor_s(bench, 1, 1, 0), work.floor_s(bench, 256, 1, 0)

    # 3.3 billion parameters work on a token; a large batch meets nearly all 128 experts of a layer.
    assert one == pytest.approx(2 * 3.3e9 / 1e12, rel=0.1)
    assert many == pytest.approx(2 * 30.2e9 / 1e12, rel=0.02)
    assert work.floor_s(bench, 1, 1, 1000) - one == pytest.approx(1000 * 98304 / 1e12, rel=1e-6)
