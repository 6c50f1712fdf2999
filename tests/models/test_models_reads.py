"""Of tokens whose hidden states nobody reads, the last layer computes keys and values only; what is read keeps its bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import BACKENDS, FAMILIES, Runner, open_runner, random_tokens, save_tiny, tiny_config

from headrace.kernels.cpu import why_not

FIRST, SECOND, THIRD, FOURTH = (random_tokens(70, seed) for seed in range(4))
# A chunk in the middle of a prompt, a token after another, a whole prompt, and the rest of one.
HISTORY = [(0, 0, FIRST[:5]), (1, 0, SECOND[:20]), (3, 0, FOURTH[:30])]
ROWS = [(0, 5, FIRST[5:66]), (1, 20, SECOND[20:21]), (2, 0, THIRD[:37]), (3, 30, FOURTH[30:47])]
NUM_READ = {
    "all rows sample": [1, 1, 1, 1],
    "a chunk beside rows that sample": [0, 1, 0, 1],
    "hidden states and logprobs": [61, 1, 20, 0],
    "nothing": [0, 0, 0, 0],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"backend": "torch_native", "impl": "transformers"},
    "pages of 1": {"backend": "cpu", "page_size": 1},
    "int8 cache": {"backend": "cpu", "kv_dtype": torch.int8},
    "int8 weights": {"backend": "cpu", "quantization": "int8"},
}
needs_kernels = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(tiny_config(request.param), folder)
    return folder


def caches_after(runner: Runner, num_read: list[int] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of a step over a cache that has nothing but the history, and the cache after it."""
    caches = [*runner.pool.k, *runner.pool.v]
    for cache in caches:
        cache.zero_()
    runner.hidden(HISTORY)
    return runner.hidden(ROWS, num_read), [cache.clone() for cache in caches]


def check_all_reads(runner: Runner) -> None:
    whole, caches = caches_after(runner, None)
    rows = whole.split([len(tokens) for _, _, tokens in ROWS])
    for num_read in NUM_READ.values():
        got, caches_now = caches_after(runner, num_read)

        assert torch.equal(got, torch.cat([row[len(row) - n :] for row, n in zip(rows, num_read, strict=True)]))
        assert all(torch.equal(now, want) for now, want in zip(caches_now, caches, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_read_and_what_is_kept_has_the_bits_of_whole_layers(folder: Path, backend: str):
    check_all_reads(open_runner(folder, backend))


@needs_kernels
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_it_has_with_other_pages_precisions_and_layers(tmp_path, options: dict[str, Any]):
    save_tiny(tiny_config("gemma3"), tmp_path)
    check_all_reads(open_runner(tmp_path, **options))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_it_has_in_one_call_for_all_layers(folder: Path, dtype: torch.dtype):
    runner = open_runner(folder, "cpu", dtype)
    if "mixture" in runner.model.fuse(runner.attention):
        pytest.skip("a mixture of experts runs op by op")

    check_all_reads(runner)


def test_the_last_layer_goes_on_with_what_is_read(tmp_path):
    save_tiny(tiny_config("llama"), tmp_path)
    runner = open_runner(tmp_path, "torch_native")
    seen: dict[str, int] = {}
    for weight in runner.model.weights():
        if weight.layer is not None:
            weight.layer.observer = lambda x, name=weight.name: seen.update({name: len(x)})  # type: ignore[misc]

    runner.hidden(ROWS, [0, 1, 20, 0])

    assert seen["model.layers.2.self_attn.v_proj.weight"] == seen["model.layers.1.mlp.down_proj.weight"] == 116
    assert seen["model.layers.2.self_attn.o_proj.weight"] == seen["model.layers.2.mlp.down_proj.weight"] == 21


@needs_kernels
@pytest.mark.parametrize(
    ("num_read", "message"),
    [([62, 1, 1, 1], "62 of the 61 rows of sequence 0"), ([1, 1, -1, 1], "-1 of the 37 rows of sequence 2")],
)
def test_reads_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, num_read: list[int], message: str):
    save_tiny(tiny_config("llama"), tmp_path)
    runner = open_runner(tmp_path, "cpu")
    assert runner.model.fuse(runner.attention) == ""

    with pytest.raises(ValueError, match=message):
        runner.hidden(ROWS, num_read)
    assert not any(cache.any() for cache in (*runner.pool.k, *runner.pool.v))
