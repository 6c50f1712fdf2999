"""What the scheduler's memory does under hours of mixed load with weight updates and adapters that come and go.

A server of SmolLM2 gets chats, completions with a schema, several samples and logprobs, of the model and of adapters, by clients at nice 19. Every so
often the weights are updated from a checkpoint, and an adapter is loaded while the oldest is unloaded. Once a minute the private memory of the
scheduler is read (`/proc/PID/smaps`), apart from the KV pool, which only fills up, at least `SETTLE_S` after an update: every second for as long as
free memory is kept at most, so the lowest is what is in use. The median and the highest have free memory, too.

    python tests/attacks/memory.py --minutes 60
"""

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from safetensors.numpy import save_file

from headrace.api.runtime import Runtime

NUM_CLIENTS = 4
NUM_ADAPTERS = 3
WORDS = [
    "river",
    "stone",
    "light",
    "winter",
    "engine",
    "paper",
    "garden",
    "signal",
    "orange",
    "window",
    "thunder",
    "market",
]
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")
SETTLE_S = 15
"""So long after an update, the memory of the weights before it has gone back to the system."""
NUM_SAMPLES = 11
"""One a second: free memory goes back every ten seconds (`headrace.garbage`)."""

_ARENA = 64 << 20
"""malloc begins the memory of an arena at a multiple of this."""


def private_mb(pid: int) -> dict[str, float]:
    """Private memory in MB by what it is: `pool` (the KV cache, the only anonymous memory that is mapped as shared), and the rest, which is `all`:
    malloc's first heap, its arenas, other anonymous memory (weights, large tensors), and what was written of mapped files."""
    found: Counter[str] = Counter()
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (mapping := _MAPPING.fullmatch(line)) is not None:
            start, end, name = int(mapping[1], 16), int(mapping[2], 16), mapping[3]
            if name.startswith("/dev/zero"):
                kind = "pool"
            elif name == "[heap]":
                kind = "heap"
            elif name.startswith("/"):
                kind = "files"
            else:
                kind = "arenas" if start % _ARENA == 0 and end - start <= _ARENA else "anonymous"
        elif line.startswith("Private_Dirty:") or (kind != "files" and line.startswith("Private_Clean:")):
            found[kind] += int(line.split()[1])
    found["all"] = sum(kb for name, kb in found.items() if name != "pool")
    return {name: round(kb / 1024, 1) for name, kb in sorted(found.items())}


def write_adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter of SmolLM2 of rank 8. Returns its path."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    tensors = {}
    for layer in range(30):
        for name, size in (("q_proj", 576), ("v_proj", 192)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = numbers.normal(0, 0.01, (8, 576)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = numbers.normal(0, 0.01, (size, 8)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


class Load:
    """Clients in threads, from `start` to `stop`."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.answers: Counter[int] = Counter()
        self.adapters: list[str] = []
        self._client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=num_clients))
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(num_clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.is_set():
            text = " ".join(rng.choices(WORDS, k=rng.randint(5, 200)))
            sampling = {"max_new_tokens": rng.randint(2, 60), "temperature": 0.8}
            body: dict[str, Any] = {"text": text, "sampling_params": sampling}
            match rng.randrange(4):
                case 0:
                    names = [f"{word} {rng.randrange(1000)}" for word in WORDS]
                    sampling["json_schema"] = json.dumps({"enum": names})
                case 1:
                    sampling["n"] = 3
                case 2:
                    body |= {"return_logprob": True, "top_logprobs_num": 5}
                case 3 if self.adapters:
                    body["lora_path"] = rng.choice(self.adapters)
            with contextlib.suppress(httpx.TransportError):
                self.answers[self._client.post("/generate", json=body).status_code] += 1


@contextlib.contextmanager
def server(**options: Any) -> Iterator[tuple[Runtime, int]]:
    """A server and the process of its scheduler."""
    common = {"model_path": "smollm2", "max_total_tokens": 8192, "max_loras": NUM_ADAPTERS + 1, "log_level": "warning"}
    with Runtime(**{**common, **options}) as runtime:
        children = psutil.Process(runtime.pid).children()
        yield runtime, next(child.pid for child in children if "scheduler" in child.cmdline())


def change(runtime: Runtime, load: Load, folder: Path, number: int) -> None:
    """An update of the weights, and another adapter in the place of the oldest."""
    success, message = runtime.update_weights_from_disk("smollm2", weight_version=str(number))
    assert success, message
    runtime.load_lora_adapter(f"adapter-{number}", write_adapter(folder / str(number), number))
    load.adapters.append(f"adapter-{number}")
    if len(load.adapters) > NUM_ADAPTERS:
        runtime.unload_lora_adapter(load.adapters.pop(0))


def attack(minutes: float, every_s: float, num_clients: int = NUM_CLIENTS) -> dict[str, Any]:
    """The private memory, once a minute and at the end, with the number of updates and adapters so far."""
    series: list[dict[str, Any]] = []
    with server() as (runtime, scheduler), tempfile.TemporaryDirectory() as folder:
        load = Load(runtime.url, num_clients)
        load.start()
        begin_s = time.monotonic()
        try:
            changes, changed_s = 0, 0.0
            while (now_s := time.monotonic() - begin_s) < 60 * minutes:
                if now_s >= 60 * len(series):
                    if now_s >= changed_s + SETTLE_S or not changes:
                        series.append(point(now_s, changes, load, scheduler))
                elif now_s >= every_s * changes:
                    changes += 1
                    change(runtime, load, Path(folder), changes)
                    changed_s = time.monotonic() - begin_s
                time.sleep(0.2)
            series.append(point(now_s, changes, load, scheduler))
        finally:
            load.stop()
    return {"series": series, "answers": dict(load.answers), "growth after 10 minutes, MB": growth(series)}


def point(now_s: float, changes: int, load: Load, scheduler: int) -> dict[str, Any]:
    """The lowest of some seconds."""
    found: dict[str, Any] = {"minute": round(now_s / 60, 1), "updates": changes, "answers": load.answers.total()}
    samples = []
    for _ in range(NUM_SAMPLES):
        samples.append(private_mb(scheduler))
        time.sleep(1)
    samples.sort(key=lambda each: each["all"])
    found |= samples[0] | {"median": samples[NUM_SAMPLES // 2]["all"], "highest": samples[-1]["all"]}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def growth(series: list[dict[str, Any]]) -> float | None:
    """Between the highest and the first after ten minutes; None for a run that is shorter."""
    later = [each["all"] for each in series if each["minute"] >= 10]
    return round(max(later) - later[0], 1) if later else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between two updates and adapters")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    given = parser.parse_args()
    os.nice(19)
    print(json.dumps(attack(given.minutes, given.every, given.clients), indent=2))


if __name__ == "__main__":
    main()
