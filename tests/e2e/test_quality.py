"""`headrace bench quality` against engines that it starts itself."""

import io
import json
from pathlib import Path

import pytest
from engines import running_engine
from rich.console import Console

from headrace.benchmark.quality import run_quality
from headrace.config.server_args import ServerArgs


def test_a_class_is_compared_with_float32(tiny_model: str, tmp_path: Path):
    output, console = tmp_path / "quality.json", Console(file=io.StringIO(), width=200)
    args = ServerArgs(model_path=tiny_model, single_process=True, quantization="int8", log_level="error")

    run_quality(args, 300, output, console)

    content = json.loads(output.read_text())
    quality = content["quality"]
    assert content["precision"] == "int8 weights, int8 KV"
    assert quality["num_tokens"] == 299
    assert 0 < quality["logprob_difference"] < 0.1
    assert quality["perplexity"] == pytest.approx(quality["reference_perplexity"], rel=0.02)
    assert quality["agreement"]["num_prompts"] == 25
    assert "int8 weights, int8 KV, against float32" in console.file.getvalue()


def test_smollm2_keeps_a_kv_cache_of_8_bits_by_default():
    with running_engine("smollm2", quantization="int8") as engine:
        info = engine.get_server_info()

    assert info["kv_cache_dtype"] == "int8"
    assert info["kv_cache_added_error"] < 0.015  # 0.006, and three standard errors


def test_a_model_that_8_bits_hurt_answers_as_with_16(tiny_biased_model: str):
    prompts = ["The river rises", "中国的首都是", "def area(points):", "Question: Which planet"]
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    found = []
    for dtype in ("bfloat16", "auto", "int8"):
        with running_engine(tiny_biased_model, quantization="int8", kv_cache_dtype=dtype) as engine:
            dtype = engine.get_server_info()["kv_cache_dtype"]
            found.append((dtype, [one["output_ids"] for one in engine.generate(prompts, sampling)]))
    asked, chosen, bytes_ = found

    assert chosen == asked
    assert bytes_[0] == "int8"
    assert bytes_[1] != chosen[1]


def test_float32_agrees_with_itself(tiny_model: str):
    args = ServerArgs(model_path=tiny_model, single_process=True, dtype="float32", log_level="error")

    quality = run_quality(args, 64, None, Console(file=io.StringIO()))["quality"]

    assert quality["perplexity_increase"] == quality["logprob_difference"] == 0
    assert (quality["agreement"]["identical"], quality["agreement"]["mean_tokens"]) == (25, 32)
