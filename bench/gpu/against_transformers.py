"""The same model in transformers, and the ratios of our figures to its figures."""

import json
import math
import random
import time
from statistics import median
from typing import Any

import torch

from bench.gpu.bench import Bench, Rows
from bench.gpu.options import CONFIGS
from bench.gpu.serving import offline_lengths
from bench.gpu.steps import decode_name

_MOST_S = 60.0
"""For all 64 requests: what has not ended then is reported as a bound."""


def measure_transformers(bench: Bench, rows: Rows) -> None:
    """Measure the same model and context in transformers, with one request, and the ratios of our figures to its figures."""
    import transformers

    sizes, model = bench.sizes, bench.options.models[0]
    raw = json.loads((CONFIGS / model / "config.json").read_text()) | json.loads(bench.overrides)
    model_type = raw.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **raw)
    with torch.device(bench.device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    _continuous_batching(bench, rows, peer, config)
    prompt = torch.randint(0, config.vocab_size, (1, sizes.context), device=bench.device)
    attention_mask = torch.ones_like(prompt)
    peer.generation_config.eos_token_id = None
    short, long = (2, 4) if bench.tiny else (8, 8 + 4 * sizes.steps)

    # One cache for both lengths: it is compiled for its size.
    cache = transformers.StaticCache(config=config, max_cache_len=sizes.context + long)

    def generate(num_tokens: int) -> float:
        clock = bench.clock
        cache.reset()
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "pad_token_id": 0}
        begin = clock.mark()
        with torch.no_grad():
            inputs = {"attention_mask": attention_mask, "past_key_values": cache}
            out = peer.generate(prompt, **inputs, **lengths, do_sample=False, disable_compile=not bench.on_gpu)
        assert out.shape[1] == sizes.context + num_tokens, out.shape
        return clock.seconds(begin, clock.mark())

    for num_tokens in (short, long, short):  # compiles, or captures, in the first steps
        generate(num_tokens)
    each = [(generate(long) - generate(short)) / (long - short) for _ in range(3)]
    step = median(each)
    rows.add(f"transformers generate {model}, batch 1", f"{step * 1e3:.2f} ms a token", step_s=step)
    own = bench.figure("decode", decode_name(model, 1), "step_s")
    _add_ratio(bench, rows, "speed at batch 1 over transformers", step / own, 1.2)


def _continuous_batching(bench: Bench, rows: Rows, peer: Any, config: Any) -> None:
    """64 requests of the piece `offline`, batched continuously by transformers."""
    from transformers import GenerationConfig

    if bench.tiny:
        return  # its continuous batching wants a GPU
    lengths, draw = offline_lengths(bench)[:64], random.Random(0)
    generation = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
    peer.set_attn_implementation("paged|sdpa")
    with (
        torch.no_grad(),
        peer.continuous_batching_context_manager(generation_config=generation, block=True, timeout=5) as manager,
    ):
        for warm in (True, False):
            begin = time.perf_counter()
            sent = [(num_in, 4) for num_in, _ in lengths[:4]] if warm else lengths
            for num_in, num_out in sent:
                prompt = [draw.randrange(config.vocab_size) for _ in range(num_in)]
                manager.add_request(prompt, max_new_tokens=num_out, eos_token_id=-1)
            done = 0
            while done < len(sent) and time.perf_counter() - begin < _MOST_S:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done += 1
                assert manager.is_running(), "transformers' manager has stopped"
            elapsed = time.perf_counter() - begin
            if warm:
                rows.add("transformers, its first requests", f"{done} of {len(sent)} done after {elapsed:.1f} s")
    num_out = sum(out for _, out in lengths)
    bound = "" if done == len(sent) else "less than "
    text = f"{bound}{num_out / elapsed:.0f} output tok/s, {done} done after {elapsed:.1f} s"
    rows.add("transformers, 64 requests batched continuously", text, tokens_per_s=num_out / elapsed)
    own = bench.figure("offline", "the first 64 alone", "tokens_per_s")
    what = "64 requests over transformers' continuous batching" + (", at least" if bound else "")
    _add_ratio(bench, rows, what, own * elapsed / num_out, 1.2)


def _add_ratio(bench: Bench, rows: Rows, what: str, ratio: float, least: float) -> None:
    text = "not known: run decode, offline and transformers together" if math.isnan(ratio) else f"{ratio:.2f}x"
    figures = {} if math.isnan(ratio) else {"ratio": ratio}
    rows.add_at_least(what, text, ratio, bench.least(least), **figures)
