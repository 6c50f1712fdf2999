"""`headrace bench quality` against engines that it starts itself."""

import io
import json
from pathlib import Path

import pytest
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


def test_float32_agrees_with_itself(tiny_model: str):
    args = ServerArgs(model_path=tiny_model, single_process=True, dtype="float32", log_level="error")

    quality = run_quality(args, 64, None, Console(file=io.StringIO()))["quality"]

    assert quality["perplexity_increase"] == quality["logprob_difference"] == 0
    assert (quality["agreement"]["identical"], quality["agreement"]["mean_tokens"]) == (25, 32)
