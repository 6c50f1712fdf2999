"""A real GGUF file in its own bits, through whole engines: what it takes, a second start, two ranks, an update from the file itself."""

from typing import Any

import pytest
from engines import running_engine

from headrace.checkpoint.names import resolve_model
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

PROMPTS = ["The capital of France is", "def fibonacci(n):"]
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
OPTIONS: dict[str, Any] = {"max_total_tokens": 1024, "kv_cache_dtype": "bfloat16"}


def texts(engine: Any) -> list[str]:
    return [one["text"] for one in engine.generate(PROMPTS, SAMPLING)]


def test_a_file_in_its_own_bits_starts_again_is_split_and_is_updated():
    file = resolve_model("smollm2")
    with running_engine("smollm2", **OPTIONS) as engine:
        info = engine.get_server_info()
        found = texts(engine)
        assert " Paris" in found[0]
        assert info["quantization"] == "gguf"
        kinds = {kind["type"]: kind for kind in info["stored_types"]}
        assert {name: (kind["num_tensors"], kind["runs_as"]) for name, kind in kinds.items()} == {
            "Q4_1": (210, "gguf"),
            "Q8_0": (1, "gguf"),
            "F32": (61, "gguf"),
        }
        assert sum(kind["num_bytes"] for kind in kinds.values()) <= file.stat().st_size
        assert info["weight_bytes"] <= 1.02 * file.stat().st_size

        assert engine.update_weights_from_disk(str(file))[0]
        assert texts(engine) == found
    with running_engine("smollm2", **OPTIONS) as engine:
        assert texts(engine) == found
    with running_engine("smollm2", **OPTIONS, tp_size=2, single_process=False) as engine:
        assert texts(engine) == found
