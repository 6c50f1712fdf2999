"""What all pieces share: their sizes, the clock of the device, engine options with random weights, and the rows of the results."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.options import CONFIGS, Options
from headrace.checkpoint.model_config import ModelConfig, load_model_config
from headrace.config.server_args import ServerArgs
from headrace.execution.model_source import override_model


class Rows:
    """The rows of a piece, which are told to `keep` as soon as they are known."""

    def __init__(self, keep: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        self._keep = keep
        self._known: list[dict[str, Any]] = []

    def add(self, what: str, value: str, ok: bool = True, expected: str = "", **figures: float | str) -> None:
        """One line of the results. ok: whether the value is as expected."""
        row = {"what": what, "value": value, "ok": ok, "expected": expected, **figures}
        self._known.append(row)
        self._keep(row)

    def add_at_least(self, what: str, value: str, got: float, least: float, **figures: float | str) -> None:
        """One line, whose figure must be at least `least`; 0: anything is as expected."""
        self.add(what, value, ok=not least or got >= least, expected=f">= {least:g}" if least else "", **figures)

    @contextmanager
    def failure_of(self, what: str) -> Iterator[None]:
        """If what is tried here fails, this is a row, and the others go on."""
        try:
            yield
        except Exception as error:
            self.add(what, f"failed: {type(error).__name__}: {error}"[:300], ok=False)

    def figure(self, what: str, key: str) -> float:
        """A figure of a row; NaN when there is none."""
        return figure_of(self._known, what, key)


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the pieces are. context, prompt, chunk in tokens; copy in bytes; product: rows, columns and depth."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prompts: tuple[int, ...] = (2048, 8192)
    steps: int = 20
    copy: int = 2 << 30
    product: int = 8192
    requests: int = 64
    new_tokens: int = 128


SMALL = Sizes(batches=(1, 3), context=32, prompts=(64,), steps=3, copy=1 << 20, product=128, requests=4, new_tokens=6)


class Clock:
    """Times work that is queued on a device, by marks in its queue; on a CPU, whose work is done when it returns, by the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def mark(self) -> Any:
        """A mark at the moment when all work that was queued so far is done."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks; waits until the second is reached."""
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that the device takes for `work`."""
        begin = self.mark()
        work()
        return self.seconds(begin, self.mark())


@dataclass(slots=True)
class Bench:
    """What all pieces are given: options, sizes, the results of the pieces that ran before, and a folder for profiles."""

    options: Options
    sizes: Sizes
    earlier: dict[str, Any]
    out: Path = Path()

    @property
    def device(self) -> torch.device:
        """The device to measure."""
        return torch.device(self.options.device)

    @property
    def on_gpu(self) -> bool:
        return self.options.device == "cuda"

    @property
    def tiny(self) -> bool:
        return self.options.tiny

    @property
    def overrides(self) -> str:
        """Of a model's config, as JSON."""
        return json.dumps(TINY) if self.tiny else "{}"

    @property
    def clock(self) -> Clock:
        """The clock of the device."""
        return Clock(self.on_gpu)

    def least(self, expected: float) -> float:
        """What is expected of a figure: nothing, where the run is only tried."""
        return expected if self.on_gpu and not self.tiny else 0.0

    def args(self, model: str, **changes: Any) -> ServerArgs:
        """Options of an engine with random weights."""
        fields: dict[str, Any] = {
            "model_path": str(CONFIGS / model),
            "load_format": "dummy",
            "device": self.options.device,
            "json_model_override_args": self.overrides,
            # On a CPU a mark means something only when the work is done where it is submitted.
            "disable_overlap_schedule": not self.on_gpu,
        }
        return ServerArgs(**{**fields, **changes})

    def config(self, model: str) -> ModelConfig:
        """The config of a model, with its shapes (or tiny ones)."""
        return override_model(load_model_config(CONFIGS / model), self.overrides)

    def figure(self, piece: str, what: str, key: str) -> float:
        """A figure of an earlier piece; NaN when it was not measured."""
        return figure_of(self.earlier.get(piece, {}).get("rows", []), what, key)


def figure_of(rows: Iterable[dict[str, Any]], what: str, key: str) -> float:
    """A figure of the first row that has it; NaN when none has."""
    return next((float(entry[key]) for entry in rows if entry["what"] == what and key in entry), math.nan)
