"""A tiny model behind a `DeviceRunner`, on the CPU: a device whose queue runs at once."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from captured_work import CapturedWork
from runner_harness import CONTEXT, VOCAB_SIZE, Driver

from headrace.attention import select
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvPool
from headrace.attention.torch_native import TorchNativeAttention
from headrace.checkpoint.source import open_checkpoint
from headrace.execution import build
from headrace.execution.device import Device, Download
from headrace.execution.device_runner import DeviceRunner
from headrace.execution.forward_batch import SequenceTable
from headrace.execution.graphs import GraphPool
from headrace.execution.load_weights import load_model
from headrace.execution.lora import LoraPool
from headrace.execution.model_runner import ModelRunner
from headrace.execution.queued_step import Done
from headrace.execution.worker import ModelWorker, Pending, QueuedLane
from headrace.layers.weight import Placement
from headrace.messages.control import ReadyInfo
from headrace.messages.step import ModelWorkerBatch
from headrace.messages.weights import WeightExecutor
from headrace.models.registry import model_class_for
from headrace.models.spec import kv_shape
from headrace.sampling.penalties import DevicePenalties
from headrace.sampling.sampler import Sampler
from headrace.speculative.base import Drafts

NUM_SEQS = 4


class FakeDevice:
    """`Device` on the CPU. A graph does what was captured: it raises if that depends on the host, or on memory that is another now. is_computing:
    what events are told."""

    def __init__(self, is_computing: Callable[[], bool] = lambda: False) -> None:
        self.is_computing = is_computing
        self.num_waits = self.num_replays = self.num_captures = self.num_uploads = 0
        self._is_capturing = False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        assert not self._is_capturing
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def upload(self, values: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        assert not self._is_capturing, "a graph would upload what it was captured with"
        self.num_uploads += 1
        copy = torch.from_numpy(values.copy())
        return copy if out is None else out.copy_(copy)

    def download(self, values: torch.Tensor) -> Download:
        assert not self._is_capturing
        copy = values.clone()

        def wait() -> np.ndarray:
            self.num_waits += 1
            return copy.numpy()

        return Download(lambda: not self.is_computing(), wait)

    def record(self) -> Callable[[], bool]:
        assert not self._is_capturing
        return lambda: not self.is_computing()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        with self.capturing():
            run()  # to warm up
            work = CapturedWork(run)

        def replay() -> None:
            self.num_replays += 1
            with self.capturing():
                work.run()

        return replay


class Elsewhere(FakeDevice):
    """A device that keeps no values: asking for one raises, as do operations whose shapes depend on values."""

    def upload(self, values: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        copy = torch.from_numpy(values.copy()).to("meta")
        return copy if out is None else out.copy_(copy)

    def download(self, values: torch.Tensor) -> Download:
        return cast(Download, None)


class TensorAttention(TorchNativeAttention):
    """Decode as a captured step must compute it: how long a sequence is stands in a tensor; host integers are bounds."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        rows = self._rows
        if max(rows.counts) > 1:
            return super().forward(q, k, v, layer)
        k_cache, v_cache = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        k_cache.index_put_((rows.out_slots,), k)
        v_cache.index_put_((rows.out_slots,), v)
        group = layer.num_q_heads // layer.num_kv_heads
        keys, values = (cache[rows.slots].repeat_interleave(group, dim=2) for cache in (k_cache, v_cache))
        scores = torch.einsum("bhd,blhd->bhl", q, keys) * layer.scale
        unseen = torch.arange(rows.slots.shape[1], device=q.device) >= rows.seq_lens[:, None]
        weights = torch.softmax(scores.masked_fill(unseen[:, None], -torch.inf), dim=-1)
        values = values.masked_fill(unseen[:, :, None, None], 0.0)  # what stands there may be NaN
        return torch.einsum("bhl,blhd->bhd", weights, values).reshape(q.shape[0], -1)


def queue_on(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = (1, 4)) -> list[int]:
    """Engines have this device from now on, with graphs of these sizes. Returns how often it is waited for within each submitted step,
    but for steps that wait for it as a whole."""
    monkeypatch.setattr(build, "CudaDevice", lambda where: device)
    monkeypatch.setattr(build.Setup, "is_cpu", False)
    monkeypatch.setattr(build, "_graph_sizes", lambda *arguments: sizes)
    monkeypatch.setattr(select, "make_backend", lambda *arguments, **named: TensorAttention())
    waits: list[int] = []
    launch = DeviceRunner.launch

    def noting(runner: DeviceRunner, plan: ModelWorkerBatch) -> Pending:
        before = device.num_waits
        step = launch(runner, plan)
        waits.append(0 if isinstance(step, Done) else device.num_waits - before)
        return step

    monkeypatch.setattr(DeviceRunner, "launch", noting)
    return waits


def device_driver(
    folder: Path,
    *,
    sizes: tuple[int, ...] = (),
    device: Device | None = None,
    on: str = "cpu",
    attention: AttentionBackend | None = None,
    verifying: tuple[int, ...] = (),
    drafts: Drafts | None = None,
    make_runner: type[ModelRunner] = ModelRunner,
) -> tuple[Driver, DeviceRunner, KvPool]:
    """A driver over the checkpoint in `folder`, float32; sizes: batches that have a graph; verifying: numbers of tokens of
    steps with drafts that have one."""
    device = device or FakeDevice()
    where = torch.device(on)
    checkpoint = open_checkpoint(folder)
    placement = Placement(where, torch.float32, CONTEXT)
    model = load_model(checkpoint, model_class_for(checkpoint.config), placement)
    attention = attention or TensorAttention()
    num_slots = NUM_SEQS * CONTEXT
    pool = attention.make_kv_pool(kv_shape(checkpoint.config, torch.float32), num_slots + 1, 1, where)
    table = SequenceTable(NUM_SEQS, CONTEXT, where, link=device)
    loras = LoraPool(model, placement, max_loras=2, max_rank=8)
    penalties = DevicePenalties(table.tokens, VOCAB_SIZE, device.upload)
    sampler = Sampler(VOCAB_SIZE, NUM_SEQS, where, {}, penalties)
    runner = make_runner(model, attention, table, sampler, loras, drafts=drafts)
    graphs = None
    if sizes:
        graphs = GraphPool(model, attention, table, device, sizes, VOCAB_SIZE, num_slots, verifying_sizes=verifying)
        graphs.capture()
    device_runner = DeviceRunner(runner, device, graphs)
    worker = ModelWorker(device_runner, QueuedLane, cast(WeightExecutor, None))
    return Driver(worker, cast(ReadyInfo, None)), device_runner, pool


def reference(folder: Path, **options: Any) -> Driver:
    """The same model through the worker of the CPU."""
    from runner_harness import make_driver

    return make_driver(folder, attention_backend="torch_native", page_size=1, **options)
