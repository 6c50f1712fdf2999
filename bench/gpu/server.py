"""The whole server over HTTP, with random weights and a tokenizer that is made here: start, presets of `headrace bench serving`."""

import json
import math
import subprocess
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench.gpu.bench import TINY, Bench, Rows
from bench.gpu.options import CONFIGS
from bench.servers import own_server
from headrace.benchmark.serving import LoadOptions, ServingOptions, run_serving


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of bytes with `vocab_size` ids, most of which no text gives: what random weights say must be text, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    vocab |= {f"Ġw{i}": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def measure_server(bench: Bench, rows: Rows) -> None:
    """Start of the server, then the presets B8, B32 and C; the same through the scheduler in piece `serving`."""
    model = bench.options.models[0]
    config = bench.config(model)
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder, config.vocab_size)
        options = ["--load-format", "dummy", "--tokenizer-path", name, "--device", bench.options.device]
        options += ["--context-length", "2048", "--max-running-requests", "64", "--served-model-name", "random"]
        if bench.tiny:
            overrides = json.dumps({**TINY, "vocab_size": 300})
            options += ["--json-model-override-args", overrides, "--max-total-tokens", "65536"]
            options += ["--disable-native-kernels"]
        begin = time.perf_counter()
        with own_server(str(CONFIGS / model), options) as server:
            seconds = time.perf_counter() - begin
            rows.add(f"start of the server with {model}", f"{seconds:.1f} s", seconds=seconds)
            with urllib.request.urlopen(f"{server.url}/server_info") as answer:
                info = json.load(answer)
            rows.add("max_total_tokens", str(info.get("max_total_tokens", "not told")))
            if bench.on_gpu:
                used = subprocess.run(
                    ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                rows.add("memory of the card", used.stdout.strip())
            presets: list[tuple[str, int | None]] = [("B32", 64), ("B8", None), ("B32", None), ("C", None)]
            for preset, concurrency in presets[1:2] if bench.tiny else presets:
                _measure(bench, rows, server.url, name, preset, concurrency)


def _measure(bench: Bench, rows: Rows, url: str, tokenizer: str, preset: str, concurrency: int | None) -> None:
    num_requests = 2 if bench.tiny else None
    load = LoadOptions(presets=preset, tokenizer=tokenizer, concurrency=concurrency, num_requests=num_requests)
    done = run_serving(ServingOptions(urls=(url,), load=load), Console(stderr=True))
    figures = done["results"][0]["median"]
    rate, num_errors = figures["output_throughput"], figures["num_errors"]
    name = f"HTTP {preset}" + (f", {concurrency} at once" if concurrency else "")
    text = f"{rate:.0f} output tok/s, TTFT p50 {figures['ttft_s']['p50'] * 1e3:.0f} ms, ITL p50 {figures['itl_s']['p50'] * 1e3:.1f} ms"
    rows.add(name, f"{text}, {num_errors:.0f} errors", ok=num_errors == 0, tokens_per_s=rate)
    own = bench.figure("serving", "throughput of B32's requests, all at once", "tokens_per_s")
    if concurrency and not math.isnan(own):
        rows.add_at_least("HTTP over in process", f"{rate / own:.2f}", rate / own, bench.least(0.9), ratio=rate / own)
