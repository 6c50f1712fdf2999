"""The runner on a GPU, with and without graphs: the tokens that the same checkpoint gives on the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head import NUM_LAYERS, save_head
from runner_harness import DRAWN, ids_by_row, make_driver, prompt, save_llama
from turns_grammar import Turns, under

from headrace.execution import step_times
from headrace.execution.drafting import DeviceDraftSteps, DraftSteps, Guessed
from headrace.messages.step import Int32Array
from headrace.sampling import grammar_rows
from headrace.sampling.params import ResolvedSamplingParams
from headrace.speculative import base

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


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within, what waits for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def constrained(folder, *, detect_waiting: bool = False, **options) -> list[list[int]]:
    """Tokens of a plain row, a greedy one under a grammar and one with penalties under another, two steps in flight."""
    driver = make_driver(folder, page_size=1, max_running_requests=3, **options)
    kinds = [{}, under(Turns(3)), under(Turns(2), PENALISED)]
    with contextlib.closing(driver.worker):
        new = tuple(driver.new(seq, PROMPTS[seq % 2], **kind) for seq, kind in enumerate(kinds))
        driver.submit([(seq, len(PROMPTS[seq % 2]), True) for seq in range(3)], new)
        got = []
        for step in range(16):
            # The first steps compile kernels.
            with no_waiting() if detect_waiting and step > 3 else contextlib.nullcontext():
                driver.submit([(seq, 1, True) for seq in range(3)])
            got.append(ids_by_row(driver.worker.collect()))
        return [list(tokens) for tokens in zip(*got, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"cuda_graph_bs": "1,2,4"}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_grammars_give_the_tokens_of_the_cpu(tmp_path, options, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    save_llama(tmp_path)

    got = constrained(
        tmp_path,
        detect_waiting=True,
        device="cuda",
        disable_overlap_schedule=False,
        attention_backend="triton",
        **options,
    )

    want = constrained(tmp_path, device="cpu", disable_native_kernels=True, attention_backend="torch_native")
    assert got == want


def guessed(folder, *, detect_waiting: bool = False, **options) -> tuple[list[list[int]], int]:
    """Tokens of a greedy row that repeats itself and of a drawn one, as the worker guesses them, and the number of steps."""
    driver = make_driver(folder, page_size=1, max_running_requests=2, **options)
    prompts, kinds = [prompt(17, 3), prompt(9, 2) * 2], [{}, {"sampling": DRAWN}]
    with contextlib.closing(driver.worker):
        new = tuple(driver.new(seq, prompts[seq], **kinds[seq]) for seq in range(2))
        result = driver.step([(seq, len(prompts[seq]), True) for seq in range(2)], new)
        got = [[token_id] for token_id in ids_by_row(result)]
        while len(got[0]) < 40:
            counts = [1 + result.drafts.get(seq, 0) for seq in range(2)]
            # The first steps compile kernels.
            with no_waiting() if detect_waiting and driver.num_steps > 12 else contextlib.nullcontext():
                driver.submit([(seq, counts[seq], counts[seq]) for seq in range(2)])
            result = driver.worker.collect()
            for seq, (begin, end) in enumerate(pairwise(result.id_starts.tolist())):
                got[seq] += result.ids[begin:end].tolist()
                driver.computed[seq] += end - begin - counts[seq]
        return [got[0][:40], got[1][:10]], driver.num_steps


def test_guesses_take_fewer_steps(tmp_path, monkeypatch):
    """On the CPU, so that the test of a GPU below is known to guess, whatever steps take on this machine."""
    monkeypatch.setattr(step_times, "measured_seconds", lambda *arguments: {})
    save_llama(tmp_path)
    options = {"device": "cpu", "disable_native_kernels": True, "attention_backend": "torch_native"}

    got, num_steps = guessed(tmp_path, speculative_algorithm="ngram", **options)
    want, num_plain = guessed(tmp_path, **options)

    assert got == want
    assert 10 < num_steps < num_plain == 40


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"cuda_graph_bs": "1,2"}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_guesses_change_no_token(tmp_path, options):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_llama(tmp_path)
    options |= {"device": "cuda", "attention_backend": "triton", "speculative_algorithm": "ngram"}

    got, _ = guessed(tmp_path, detect_waiting="cuda_graph_bs" in options, **options)

    assert got == guessed(tmp_path, device="cpu", disable_native_kernels=True, attention_backend="torch_native")[0]


def guessed_by_head(
    folder: Path, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[list[int]], set[tuple[int, int, int]]]:
    """Tokens as those of `guessed`, of a model with a head in the folder, and each guess: sequence, position, id."""
    found: set[tuple[int, int, int]] = set()

    def noting(guess: Callable[..., Guessed]) -> Callable[..., Guessed]:
        def note(steps: DraftSteps, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> Guessed:
            ids = guess(steps, logits, seqs, positions)

            def read() -> list[int]:
                read_ids = ids()
                found.update(zip(seqs.tolist(), positions.tolist(), read_ids, strict=True))
                return read_ids

            return read

        return note

    patch.setattr(base, "worthwhile", lambda chances, counts, times, pass_time: counts)
    for steps in (DraftSteps, DeviceDraftSteps):
        patch.setattr(steps, "guess", noting(steps.guess))
    options |= {
        "speculative_algorithm": "eagle3",
        "speculative_draft_model_path": str(folder / "head"),
        "speculative_num_draft_tokens": 3,
    }
    return guessed(folder, **options)[0], found


def test_a_head_changes_no_token(tmp_path, monkeypatch):
    """On the CPU, so that the test of a GPU below is known to guess."""
    save_llama(tmp_path, num_hidden_layers=NUM_LAYERS)
    save_head(tmp_path / "head")
    options = {"device": "cpu", "attention_backend": "torch_native"}

    got, guesses = guessed_by_head(tmp_path, monkeypatch, **options)

    assert got == guessed(tmp_path, **options)[0]
    assert len(guesses) > 80


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"cuda_graph_bs": "1,2"}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_a_head_on_a_gpu_guesses_what_it_guesses_on_the_cpu(tmp_path, options):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    save_llama(tmp_path, num_hidden_layers=NUM_LAYERS)
    save_head(tmp_path / "head")

    with pytest.MonkeyPatch.context() as patch:
        options |= {"device": "cuda", "attention_backend": "triton"}
        got, guesses = guessed_by_head(tmp_path, patch, detect_waiting="cuda_graph_bs" in options, **options)
    with pytest.MonkeyPatch.context() as patch:
        on_cpu = {"device": "cpu", "disable_native_kernels": True, "attention_backend": "torch_native"}
        want, guesses_on_cpu = guessed_by_head(tmp_path, patch, **on_cpu)

    assert got == want
    assert len(guesses) > 80
    assert guesses <= guesses_on_cpu
