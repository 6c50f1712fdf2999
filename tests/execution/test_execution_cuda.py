"""The runner on a GPU, with and without graphs: the tokens that the same checkpoint gives on the CPU."""

import contextlib

import pytest
import torch
from runner_harness import make_driver, prompt, save_llama

from headrace.sampling.params import ResolvedSamplingParams

PROMPTS = [prompt(40, 1), prompt(9, 2)]
PENALISED = ResolvedSamplingParams(
    max_new_tokens=50, seed=0, temperature=0.0, frequency_penalty=0.9, presence_penalty=-0.4, repetition_penalty=1.7
)


def generate(folder, **options) -> list[list[int]]:
    """Greedy tokens of each prompt, the first computed in chunks; then with penalties."""
    driver = make_driver(folder, page_size=1, **{"attention_backend": "torch_native", **options})
    with contextlib.closing(driver.worker):
        assert driver.info.device == options["device"]
        plain = [driver.generate(0, PROMPTS[0], 16, chunks=(7, 20)), driver.generate(1, PROMPTS[1], 16)]
        return [*plain, driver.generate(2, PROMPTS[1], 16, sampling=PENALISED)]


@pytest.mark.gpu
@pytest.mark.parametrize("disable_overlap_schedule", [True, False], ids=["sync", "overlap"])
def test_a_gpu_gives_the_tokens_of_the_cpu(tmp_path, disable_overlap_schedule):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_llama(tmp_path)

    got = generate(tmp_path, device="cuda", disable_overlap_schedule=disable_overlap_schedule)

    assert got == generate(tmp_path, device="cpu", disable_native_kernels=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"cuda_graph_bs": "1,2,4"}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_graphs_change_no_token(tmp_path, options):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_llama(tmp_path)

    got = generate(tmp_path, device="cuda", attention_backend="triton", **options)

    assert got == generate(tmp_path, device="cpu", disable_native_kernels=True)
