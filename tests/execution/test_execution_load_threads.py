"""Threads that load a model: how many tensors they hold at once, and that the bits do not depend on them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runner_harness import CONTEXT, save_llama
from safetensors.torch import load_file, save_file

from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.execution.load_weights import IN_THIS_THREAD, Job, LoadThreads, load_model, load_threads
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

PATIENCE_S = 60.0


class Gauge:
    """Counts who is inside, and the most at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self.most = 0

    def add(self, change: int) -> None:
        with self._lock:
            self._now += change
            self.most = max(self.most, self._now)


def test_two_jobs_run_at_a_time_and_never_three():
    gauge, both = Gauge(), threading.Barrier(2)

    def work(number: int) -> int:
        gauge.add(1)
        both.wait(PATIENCE_S)  # until another job runs, too
        gauge.add(-1)
        return number

    with load_threads(2) as threads:
        got = list(threads.run(Job(lambda number=number: work(number), 0) for number in range(10)))

    assert sorted(got) == list(range(10))
    assert gauge.most == 2


def test_jobs_wait_for_memory():
    gauge = Gauge()
    with load_threads(4) as threads:
        threads._max_bytes = 100

        def work(num_bytes: int) -> int:
            gauge.add(num_bytes)
            gauge.add(-num_bytes)
            return num_bytes

        sizes = [60, 50, 40, 30, 70, 100, 10] * 20
        got = list(threads.run(Job(lambda size=size: work(size), size) for size in sizes))
        larger = list(threads.run([Job(lambda: work(1000), 1000)]))  # alone it may

    assert (sorted(got), larger) == (sorted(sizes), [1000])
    assert gauge.most == 1000


@pytest.mark.parametrize("num", [1, 2])
def test_an_error_ends_the_run_and_no_more_jobs_are_made(num: int):
    made = []

    def jobs() -> Iterator[Job[float]]:
        for number in range(20):
            made.append(number)
            yield Job(lambda number=number: 1 / (number - 3), 0)

    with pytest.raises(ZeroDivisionError), load_threads(num) as threads:
        list(threads.run(jobs()))

    assert len(made) <= 3 + 1 + num


def test_torch_has_one_thread_while_there_are_threads_and_as_many_as_before_later():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with load_threads(2) as threads:
            (inside,) = threads.run([Job(torch.get_num_threads, 0)])
            meanwhile = torch.get_num_threads()
        assert (inside, meanwhile, torch.get_num_threads()) == (1, 1, 3)
    finally:
        torch.set_num_threads(before)


def kept(checkpoint, scheme, threads: LoadThreads) -> list[torch.Tensor]:
    """Every tensor that the layers of the loaded model keep."""
    placement = Placement(torch.device("cpu"), torch.bfloat16, CONTEXT, scheme)
    model = load_model(checkpoint, model_class_for(checkpoint.config), placement, threads=threads)
    fields = [keeper.kept() for weight in model.weights() for keeper in weight.keepers]
    return [value for one in fields for value in one.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("kind", ["safetensors", "dummy"])
@pytest.mark.parametrize("scheme", ["none", "bfloat16", *names_on_cpu()])
def test_the_bits_of_a_loaded_model_do_not_depend_on_threads(tmp_path: Path, scheme, kind: str):
    # Biases: half of the parts of a product come in tensors of their own.
    save_llama(tmp_path, hidden_size=64, attention_bias=True, num_hidden_layers=4)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor + 0.5 if "bias" in name else tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")  # fmt: skip
    checkpoint = open_checkpoint(tmp_path) if kind == "safetensors" else dummy_checkpoint(tmp_path)

    with load_threads(3) as threads:
        many = kept(checkpoint, scheme, threads)
    alone = kept(checkpoint, scheme, IN_THIS_THREAD)

    assert len(many) == len(alone) > 4 * 7
    assert all(torch.equal(a, b) for a, b in zip(many, alone, strict=True))
