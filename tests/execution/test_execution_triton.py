"""A whole tiny model on the Triton kernels gives the tokens of the reference, greedy and sampled."""

import contextlib
from importlib.util import find_spec

import pytest
import torch
from runner_harness import ids_by_row, make_driver, prompt, save_llama

from headrace import kernels
from headrace.kernels import triton
from headrace.messages.step import StepResult
from headrace.sampling.params import ResolvedSamplingParams

SAMPLED = ResolvedSamplingParams(max_new_tokens=50, seed=3, temperature=0.8, top_p=0.9)


@pytest.fixture
def device() -> str:
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    if triton.is_interpreted():
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("Triton was told to compile (TRITON_INTERPRET is not 1), and there is no GPU")
    return "cuda"


def generate(folder, **options) -> list[int]:
    """One prompt in chunks and greedy, another sampled; then steps that mix a prompt with the decode of both."""
    driver = make_driver(folder, **options)
    with contextlib.closing(driver.worker):
        tokens = driver.generate(0, prompt(40, 1), 4, chunks=(7, 20))
        tokens += driver.generate(1, prompt(9, 2), 2, sampling=SAMPLED)
        steps: list[StepResult] = [
            driver.step([(0, 1, True), (2, 12, False), (1, 1, True)], (driver.new(2, prompt(14, 3)),)),
            driver.step([(2, 2, True), (0, 1, True)]),
            driver.step([(0, 1, True), (1, 1, True), (2, 1, True)]),
        ]
        return tokens + [token for step in steps for token in ids_by_row(step)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_triton_gives_the_tokens_of_the_reference(tmp_path, device: str, deterministic: bool, monkeypatch):
    if deterministic and device == "cpu":
        pytest.skip("needs a GPU: on CPU the option changes nothing")
    save_llama(tmp_path)

    # The rotation writes K and V, too.
    monkeypatch.setattr("headrace.kernels.triton.attention.write_kv", None)
    with kernels.prefer("triton"):
        got = generate(
            tmp_path, device=device, attention_backend="triton", enable_deterministic_inference=deterministic
        )

    assert got == generate(tmp_path, device="cpu", attention_backend="torch_native", disable_native_kernels=True)


def test_the_interpreter_is_for_tests_and_refuses_what_it_computes_wrong(tmp_path, device: str):
    if device != "cpu":
        pytest.skip("nothing is interpreted on a GPU")
    from headrace.errors import ConfigError

    save_llama(tmp_path)
    with kernels.prefer("triton"), pytest.raises(ConfigError, match="gives wrong results in bfloat16"):
        make_driver(tmp_path, attention_backend="triton", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="interpreted, for tests"):
        make_driver(tmp_path, attention_backend="triton")
