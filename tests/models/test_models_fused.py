"""A decoder's layers in one native call give the bits of the ops one by one."""

import functools
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from model_harness import FAMILIES, Runner, open_runner, random_tokens, save_tiny, tiny_config

from headrace import kernels
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

PROMPT = random_tokens(70, seed=1)
OTHER = random_tokens(37, seed=2)
ISAS = [isa for isa, reason in cpu.isas() if not reason]
BY_OP = {
    "qwen3_moe": "a mixture of experts",
    "mixtral": "a mixture of experts",
    "ernie4_5": "other norms or another rotation",
    "cohere2-tied": "other norms or another rotation",
}
DENSE = [family for family in FAMILIES if family not in BY_OP]
VARIED = [family for family in DENSE if family in ("llama", "qwen3", "gemma3")]


@functools.cache
def checkpoint(family: str) -> tuple[Path, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    save_tiny(tiny_config(family), Path(folder.name))
    return Path(folder.name), folder


@functools.cache
def pair(family: str, dtype: torch.dtype) -> tuple[Runner, Runner]:
    """The same model op by op and fused."""
    plain, fused = (open_runner(checkpoint(family)[0], "cpu", dtype) for _ in range(2))
    assert fused.model.fuse(fused.attention) == ""
    return plain, fused


@pytest.fixture
def as_before() -> Iterator[None]:
    threads = kernels.num_threads()
    yield
    cpu.select_isa(ISAS[0])
    kernels.set_num_threads(threads)


def logits(runner: Runner) -> list[torch.Tensor]:
    """Prefill, chunks, decode, and a step that mixes them."""
    out = [runner.chunks(0, PROMPT, []), runner.chunks(1, PROMPT, [7, 16, 1, 30]), runner.chunks(2, OTHER, [30])]
    for i in range(3):
        out += runner.step([(0, 70 + i, [i]), (2, 37 + i, [i + 5])])
    return [*out, *runner.step([(3, 0, OTHER), (1, 70, [9]), (2, 40, PROMPT[:20])])]


# Every family with the best and the least instructions; every set of instructions with families whose layers differ most.
@pytest.mark.parametrize(
    ("family", "isa", "threads"),
    [(family, isa, 2) for family in DENSE for isa in ISAS if isa in (ISAS[0], ISAS[-1]) or family in VARIED]
    + [(family, ISAS[-1], 1) for family in VARIED],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_for_all_layers_gives_the_bits_of_the_ops(
    family: str, dtype: torch.dtype, isa: str, threads: int, as_before: None
):
    plain, fused = pair(family, dtype)
    cpu.select_isa(isa)
    kernels.set_num_threads(threads)

    for got, want in zip(logits(fused), logits(plain), strict=True):
        assert torch.equal(got, want)


def test_a_step_of_more_tokens_than_the_feed_forward_buffers_hold_gives_the_same_bits():
    plain, fused = pair("llama", torch.float32)
    rows = [(sequence, 0, random_tokens(140 + sequence, sequence)) for sequence in range(3)]

    for got, want in zip(fused.step(rows), plain.step(rows), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", BY_OP)
def test_layers_that_the_call_has_not_run_op_by_op_and_say_why(family: str):
    runner = open_runner(checkpoint(family)[0], "cpu")

    assert BY_OP[family] in runner.model.fuse(runner.attention)
    assert runner.chunks(0, OTHER, []).shape == (len(OTHER), 199)


def test_another_attention_backend_runs_op_by_op_and_says_why():
    runner = open_runner(checkpoint("llama")[0], "torch_native")

    assert "torch_native" in runner.model.fuse(runner.attention)


@pytest.mark.parametrize(
    ("family", "dtype", "isa"),
    [(family, torch.int8, isa) for family in DENSE for isa in ISAS if isa == ISAS[0] or family in VARIED]
    + [(DENSE[0], torch.int16, isa) for isa in ISAS],
)
def test_over_a_cache_of_integers_fused_layers_give_the_bits_of_the_ops(
    family: str, dtype: torch.dtype, isa: str, as_before: None
):
    plain, fused = (open_runner(checkpoint(family)[0], "cpu", kv_dtype=dtype) for _ in range(2))
    assert fused.model.fuse(fused.attention) == ""
    cpu.select_isa(isa)

    for got, want in zip(logits(fused), logits(plain), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("scheme", ["bfloat16", *names_on_cpu()])
@torch.inference_mode()
def test_rounded_layers_fused_give_the_bits_of_the_ops(scheme):
    folder = checkpoint("qwen2")[0]
    plain, fused = (open_runner(folder, "cpu", torch.bfloat16, quantization=scheme) for _ in range(2))
    assert fused.model.fuse(fused.attention) == ""
    for got, want in zip(logits(fused), logits(plain), strict=True):
        assert torch.equal(got, want)


def test_weights_packed_for_torch_run_op_by_op():
    with kernels.prefer("torch"):
        runner = open_runner(checkpoint("llama")[0], "cpu")
        assert "preferred" in runner.model.fuse(runner.attention)

    assert "layout torch" in runner.model.fuse(runner.attention)


@torch.inference_mode()
def test_a_slot_beyond_the_pool_is_refused_before_anything_is_written():
    runner = open_runner(checkpoint("llama")[0], "cpu")
    runner.model.fuse(runner.attention)
    kv = runner.attention.paged_kv()
    assert kv is not None
    runner.step([(0, 0, OTHER)])
    before = [tensor.clone() for tensor in (*kv.pool.k, *kv.pool.v)]
    kv.rows.out_slots[3] = kv.pool.num_slots

    with pytest.raises(ValueError, match=f"slot {kv.pool.num_slots} at index 3"):
        runner.model.forward(runner.model.embed(torch.tensor(OTHER)), kv.rows.positions, runner.attention)
    for now, then in zip((*kv.pool.k, *kv.pool.v), before, strict=True):
        assert torch.equal(now, then)


def test_two_threads_that_run_a_model_at_once_do_not_disturb_each_other(as_before: None):
    _, fused = pair("llama", torch.float32)
    other = open_runner(checkpoint("qwen3")[0], "cpu")
    assert other.model.fuse(other.attention) == ""
    kernels.set_num_threads(2)
    runners = [fused, other]
    want = [runner.chunks(0, PROMPT, []) for runner in runners]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            jobs = [pool.submit(runner.chunks, 0, PROMPT, [9]) for runner in runners]
            for job, expected in zip(jobs, want, strict=True):
                assert torch.equal(job.result(), expected)
