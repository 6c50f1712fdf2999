"""A child process as the real one, but for the model: a worker of hashes, so that it starts in a moment and its tokens say which weights
made them. Run as `replica_child.py KIND`, see `headrace.processes.child_main`.

A checkpoint is a file that holds a number, an adapter any file.
"""

import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("scheduler", "frontend")]

from fake_worker import EOS, VOCAB, FakeLoras, FakeWorker  # noqa: E402
from frontend_fakes import ByteTokenizer  # noqa: E402

import headrace.processes.child_main  # noqa: E402
import headrace.processes.scheduler_process  # noqa: E402
from headrace.cache.base import PageAllocator  # noqa: E402
from headrace.cache.radix_cache import RadixCache  # noqa: E402
from headrace.checkpoint.weight_cache import identity  # noqa: E402
from headrace.config.server_args import ServerArgs  # noqa: E402
from headrace.errors import ModelError  # noqa: E402
from headrace.messages.channel import Channels, FanOutSender  # noqa: E402
from headrace.messages.control import ReadyInfo  # noqa: E402
from headrace.messages.step import StepResult  # noqa: E402
from headrace.messages.weights import Prepared, UpdateFromDisk, UpdateFromTensors, WorkerOperation  # noqa: E402
from headrace.metrics.watchdog import Watchdog  # noqa: E402
from headrace.scheduler.kv_manager import KVManager, KvPart  # noqa: E402
from headrace.scheduler.scheduler import Scheduler  # noqa: E402
from headrace.scheduler.state import SchedulerConfig  # noqa: E402
from headrace.text.detokenizer_manager import DetokenizerManager  # noqa: E402

EOS_EVERY = 2
"""Every second token or so is another: a few of them tell weights apart."""
NUM_PAGES = 8192
MAX_RUNNING = 16
STEP_S = 0.001
PREPARE_S = 0.02
LOAD_S = 0.05


def ready_info(checkpoint: str) -> ReadyInfo:
    """What a scheduler says of itself. Raises ModelError when the checkpoint is not there."""
    _, fingerprint = read_weights(checkpoint)
    return ReadyInfo(
        max_total_tokens=NUM_PAGES,
        max_running_requests=MAX_RUNNING,
        context_length=1024,
        vocab_size=VOCAB,
        hidden_size=2,
        page_size=1,
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        attention_backend="fake",
        model_class="Fake",
        weight_bytes=0,
        kv_bytes=0,
        load_s=0.0,
        fingerprint=fingerprint,
    )


def read_weights(path: str) -> tuple[int, str]:
    """The number in a file, and the file's fingerprint."""
    try:
        return int(Path(path).read_text()), identity([Path(path)], {})
    except OSError as error:
        raise ModelError(f"{Path(path).name} cannot be read: {error.strerror}") from error


class DiskWeights:
    """A WeightExecutor whose weights are the number in a file. A job takes a while, beside the steps."""

    holds_steps = False

    def __init__(self, worker: "DiskWorker") -> None:
        self.worker = worker

    def start(self, operation: WorkerOperation) -> "DiskJob":
        return DiskJob(self.worker, operation)


class DiskJob:
    def __init__(self, worker: "DiskWorker", operation: WorkerOperation) -> None:
        self.worker, self.operation = worker, operation
        self.done_s = time.monotonic() + PREPARE_S

    @property
    def is_done(self) -> bool:
        return time.monotonic() >= self.done_s

    def abandon(self) -> None:
        pass

    def result(self) -> Prepared:
        match self.operation:
            case UpdateFromDisk():
                number, fingerprint = read_weights(self.operation.model_path)
            case UpdateFromTensors():
                number, fingerprint = int(Path(self.operation.file).read_text()), ""
            case _:
                return Prepared("done")

        def install() -> None:
            assert not self.worker.queue, "the weights change under a step"
            self.worker.version = number

        return Prepared("updated", install, changes_weights=True, fingerprint=fingerprint)


class DiskLoras(FakeLoras):
    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
        if not os.path.exists(path):
            raise ModelError("there is no such adapter")
        time.sleep(LOAD_S)
        return super().load(lora_id, path, fingerprint)


class DiskWorker(FakeWorker):
    def __init__(self, checkpoint: str) -> None:
        super().__init__(NUM_PAGES, MAX_RUNNING + 2, EOS_EVERY)
        self.version, _ = read_weights(checkpoint)
        self.weights = DiskWeights(self)
        self.loras = DiskLoras()

    def collect(self) -> StepResult:
        time.sleep(STEP_S)
        return super().collect()


def run_scheduler(
    args: ServerArgs, channels: Channels, on_ready, on_progress, replica: int = 0, source: int = 0, ports=None
) -> None:
    receiver = channels.receiver("to_scheduler", replica)
    to_tokenizer = channels.sender("to_tokenizer")
    ready = ready_info(args.model_path)
    config = SchedulerConfig(
        policy="fcfs",
        chunk_tokens=8,
        step_tokens=64,
        max_running=MAX_RUNNING,
        max_queued=10**6,
        max_steps_in_flight=2,
        eos_token_ids=frozenset([EOS]),
        vocab_size=VOCAB,
        stream_interval=1,
        replica=replica,
    )
    kv = KVManager([KvPart(PageAllocator(NUM_PAGES, 1), RadixCache(1))], MAX_RUNNING + 2)
    worker = DiskWorker(args.model_path)
    to_detokenizer = channels.sender("to_detokenizer")
    scheduler = Scheduler(
        config, kv, worker, receiver, to_detokenizer, to_tokenizer, lambda request: None, source=source
    )
    on_ready(ready)
    scheduler.run()


def run_detokenizer(args: ServerArgs, channels: Channels, on_ready, on_progress) -> None:
    receiver = channels.receiver("to_detokenizer")
    schedulers = FanOutSender([channels.sender("to_scheduler", replica) for replica in range(args.dp_size)])
    manager = DetokenizerManager(
        ByteTokenizer(), channels.sender("to_tokenizer"), schedulers, watchdog=Watchdog("detokenizer", 0.0)
    )
    on_ready(None)
    manager.run(receiver, heartbeats=False)


if __name__ == "__main__":
    headrace.processes.scheduler_process.run_scheduler = run_scheduler
    headrace.processes.child_main.run_detokenizer = run_detokenizer
    headrace.processes.child_main.main()
