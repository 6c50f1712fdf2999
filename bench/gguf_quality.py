"""How near the logprobs of a GGUF file in its own bits are to those of its float values, beside llama.cpp's server on the same file.

    .venv/bin/python -m bench.gguf_quality FILE.gguf --llama-server PATH [--output FILE]

The texts are given, and the logprob of each of their tokens behind the ones before it is compared with that of the dequantised weights in float32:
mean, 95th percentile and largest difference. llama.cpp's server tells the logprobs of the 400 likeliest tokens; others are left out, for all.
"""

import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.program import parser_of, write_report
from bench.servers import free_port
from headrace import Engine
from headrace.benchmark.agreement import PROMPTS, default_text
from headrace.checkpoint.names import resolve_model

FLOAT32 = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "float32"}
OURS: dict[str, dict[str, Any]] = {
    "16-bit KV": {"quantization": "gguf", "kv_cache_dtype": "bfloat16"},
    "defaults": {},
    "dequantised": {"quantization": "none"},
}
LIKELIEST = 400
START_S = 120.0

Logprobs = list[list[float | None]]  # of each text, of its tokens but the first


def by_engine(model: str, options: dict[str, Any], texts: Sequence[list[int]]) -> tuple[Logprobs, str]:
    """Their logprobs, and the KV precision that was chosen."""
    with Engine(model_path=model, max_total_tokens=8192, log_level="error", **options) as engine:
        outputs = engine.generate(
            input_ids=list(texts),
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        kv_cache = str(engine.get_server_info()["kv_cache_dtype"])
    return [[entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs], kv_cache


def by_llama_cpp(program: Path, model: str, texts: Sequence[list[int]]) -> Logprobs:
    port = free_port()
    command = [str(program), "-m", model, "--host", "127.0.0.1", "--port", str(port), "-c", "8192", "-np", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url)
            found: Logprobs = []
            for text in track(texts, description="llama.cpp"):
                found.append([_next_logprob(url, text[:end], text[end]) for end in range(1, len(text))])
            return found
        finally:
            server.terminate()


def _wait_for(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    sys.exit(f"error: {url} did not answer within {START_S:.0f} s")


def _next_logprob(url: str, ids: list[int], token: int) -> float | None:
    body = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": LIKELIEST,
        "temperature": -1,
        "samplers": [],
        "cache_prompt": True,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        likeliest = json.load(reply)["completion_probabilities"][0]["top_logprobs"]
    return next((float(entry["logprob"]) for entry in likeliest if entry["id"] == token), None)


def differences(found: Logprobs, reference: Logprobs, told: Logprobs) -> dict[str, float]:
    """told: llama.cpp's, which leave some out."""
    values = sorted(
        abs(a - b)
        for of_text in zip(found, reference, told, strict=True)
        for a, b, c in zip(*of_text, strict=True)
        if a is not None and b is not None and c is not None
    )
    largest = {"p95": values[len(values) * 95 // 100], "max": values[-1]}
    return {"tokens": len(values), "mean": round(statistics.fmean(values), 4)} | {
        name: round(value, 3) for name, value in largest.items()
    }


def main() -> None:
    """Measure every precision, and llama.cpp."""
    parser = parser_of(__doc__)
    parser.add_argument("file")
    parser.add_argument("--llama-server", type=Path, required=True, help="the program, of a build of llama.cpp")
    parser.add_argument("--tokens", type=int, default=1000, help="of the longer text")
    options = parser.parse_args()
    file = str(resolve_model(options.file))
    with Engine(model_path=file, log_level="error", max_total_tokens=1024) as engine:
        texts = [engine.tokenizer.encode(text) for text in PROMPTS]
        long = engine.tokenizer.encode(default_text("held out"))[: options.tokens]
    texts += [long[begin : begin + 250] for begin in range(0, len(long), 250)]
    told = by_llama_cpp(options.llama_server, file, texts)
    reference, _ = by_engine(file, FLOAT32, texts)
    found = {"llama.cpp": differences(told, reference, told)}
    for name, chosen in OURS.items():
        logprobs, kv_cache = by_engine(file, chosen, texts)
        found[f"{name} ({kv_cache} KV)"] = differences(logprobs, reference, told)
    write_report({"file": Path(file).name, "found": found}, options.output)


if __name__ == "__main__":
    main()
