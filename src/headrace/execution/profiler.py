"""Watches steps: how long they take, traces of them by torch.profiler in a folder chosen by the operator, and which experts are chosen.

Owns the running profile and its file. Used by the thread that runs the steps: torch records the operations of the thread that
starts the profile.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headrace.errors import RequestError
from headrace.layers.mlp import ExpertCounts
from headrace.log import get_logger
from headrace.messages.control import ExpertCountsReply, ExpertCountsReq
from headrace.messages.operations import StartProfileBody

_logger = get_logger(__name__)


def new_stem() -> str:
    """The beginning of the names of a profile's files, by time and process."""
    return f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class StepClock:
    """Times steps of which one may begin before the last has finished."""

    def __init__(self) -> None:
        self._finished_s = 0.0

    def took(self, begun_s: float) -> float:
        """Seconds of a step that has just finished. Time that the step before was still running is that step's. begun_s: by `time.perf_counter`."""
        since_s, self._finished_s = max(begun_s, self._finished_s), time.perf_counter()
        return self._finished_s - since_s


class StepProfiler:
    """At most one profile at a time. folder None: profiling is off. suffix: of the names of files, before their ending."""

    def __init__(self, folder: str | None, suffix: str = "") -> None:
        self._folder = None if folder is None else Path(folder)
        self._suffix = suffix
        self._running: profile | None = None
        self._path = Path()
        self._steps_left: int | None = None

    def handle(self, request: StartProfileBody | None) -> str:
        """Start a profile, or stop it (None). Returns a line for the operator. Raises RequestError."""
        return self.stop() if request is None else self.start(request, new_stem())

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context of one step: names it in the trace, and ends the profile after its last step."""
        if self._running is None:
            yield
            return
        with record_function(f"headrace step {number}"):
            yield
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._finish()

    def start(self, request: StartProfileBody, stem: str) -> str:
        if self._folder is None:
            raise RequestError("profiling is off: start the server with --profile-dir")
        if self._running is not None:
            raise RequestError("a profile is already running; stop it first")
        chosen = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        if "GPU" in request.activities and not torch.cuda.is_available():
            raise RequestError("activities: this server has no GPU", "activities")
        folder = self._folder / (request.output_dir or "")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"the profile's folder cannot be created: {error.strerror}") from None
        self._path = folder / f"{stem}{self._suffix}.trace.json.gz"
        self._steps_left = request.num_steps
        self._running = profile(activities=[chosen[name] for name in request.activities])
        self._running.start()
        return "profiling" if self._steps_left is None else f"profiling {self._steps_left} steps"

    def stop(self) -> str:
        self.check_running()
        return self._finish()

    def check_running(self) -> None:
        """Raises RequestError if no profile is running."""
        if self._running is None:
            raise RequestError("no profile is running")

    def _finish(self) -> str:
        running, self._running = self._running, None
        assert running is not None, "checked by the callers"
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            _logger.error("the profile could not be written: %s", error)
            return "the profile could not be written; the server's log says why"
        _logger.info("wrote the profile %s", self._path)
        return f"wrote {self._path.name}"


class ExpertRecorder:
    """Counts which experts a mixture's routers choose. counts: by layer; empty = not available. refusal: why nothing can be recorded; "" if it
    can."""

    def __init__(self, counts: Mapping[int, ExpertCounts], device: torch.device, refusal: str = "") -> None:
        self._counts = counts
        self._device = device
        self._refusal = refusal if counts else "this model has no experts whose choice can be recorded"

    def handle(self, request: ExpertCountsReq) -> ExpertCountsReply:
        """Start from zero, stop, or return the counts and reset them. Raises RequestError."""
        if self._refusal:
            raise RequestError(self._refusal)
        layers: dict[int, list[int]] = {}
        match request.action:
            case "start":
                self.start()
            case "stop":
                self.stop()
            case "dump":
                layers = {layer: counts.take() for layer, counts in self._counts.items()}
        return ExpertCountsReply(layers)

    def start(self) -> None:
        for counts in self._counts.values():
            counts.start(self._device)

    def stop(self) -> None:
        for counts in self._counts.values():
            counts.stop()


NO_EXPERTS = ExpertRecorder({}, torch.device("cpu"))
