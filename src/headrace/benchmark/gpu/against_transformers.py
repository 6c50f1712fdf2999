"""The same model in transformers, and the ratios of our figures to its figures."""

import json
import math
from statistics import median

import torch

from headrace.benchmark.gpu.bench import TINY, Bench, Rows, row
from headrace.benchmark.gpu.options import CONFIGS
from headrace.benchmark.gpu.steps import decode_name


def measure_transformers(bench: Bench, rows: Rows) -> None:
    """Measure the same model and context in transformers, with one request, and the ratios of our figures to its figures."""
    import transformers

    sizes, model = bench.sizes, bench.options.models[0]
    raw = json.loads((CONFIGS / model / "config.json").read_text()) | (TINY if bench.options.tiny else {})
    model_type = raw.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **raw)
    with torch.device(bench.device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (1, sizes.context), device=bench.device)
    attention_mask = torch.ones_like(prompt)
    peer.generation_config.eos_token_id = None
    short, long = (8, 8 + 4 * sizes.steps) if not bench.options.tiny else (2, 4)

    # One cache for both lengths: it is compiled for its size.
    cache = transformers.StaticCache(config=config, max_cache_len=sizes.context + long)

    def generate(num_tokens: int) -> float:
        clock = bench.clock
        cache.reset()
        begin = clock.mark()
        with torch.no_grad():
            out = peer.generate(
                prompt, attention_mask=attention_mask, min_new_tokens=num_tokens, max_new_tokens=num_tokens, do_sample=False,
                past_key_values=cache, pad_token_id=0, disable_compile=bench.options.device == "cpu",
            )  # fmt: skip
        assert out.shape[1] == sizes.context + num_tokens, out.shape
        return clock.seconds(begin, clock.mark())

    for num_tokens in (short, long, short):  # compiles, or captures, in the first steps
        generate(num_tokens)
    each = [(generate(long) - generate(short)) / (long - short) for _ in range(3)]
    step = median(each)
    rows.append(row(f"transformers generate {model}, batch 1", f"{step * 1e3:.2f} ms a token", step_s=step))
    own = bench.figure("decode", decode_name(model, 1), "step_s")
    serving = bench.figure("serving", "serving throughput", "tokens_per_s")
    check = bench.options.device == "cuda" and not bench.options.tiny
    for what, ratio, least in (
        ("speed at batch 1 over transformers", step / own, 1.2),
        (f"throughput of {sizes.requests} requests over transformers", serving * step, 10.0),
    ):
        if math.isnan(ratio):
            rows.append(row(what, "not known: run decode, serving and transformers together", ok=not check))
            continue
        rows.append(
            row(
                what,
                f"{ratio:.2f}x",
                ok=not check or ratio >= least,
                expected=f">= {least}x" if check else "",
                ratio=ratio,
            )
        )
