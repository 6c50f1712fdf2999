"""Children killed at work on good inputs, over HTTP: whoever sent the input must not be told that it is at fault.

A server of a tiny vision model of its own gets one request after another, each with a schema or an image that is new and takes a while. While a
child works on it, the child is ended by SIGKILL, as the kernel's out-of-memory killer does; every `twice_every`th time its successor, too. The
input of a request that was refused is sent again, and must be served then.

    python tests/attacks/killed_children.py --kills 200
"""

import argparse
import base64
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from headrace.api.runtime import Runtime

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_tiny_vlm

KINDS = {
    "grammar": ("headrace.grammar.compile_child", "grammar_kills"),
    "image": ("headrace.multimodal.media_child", "media_processes_killed"),
}
"""What children of a server work on, the module that they run, and the counter of those that were lost at their work."""
AT_WORK_S = 0.02
"""Processor time that a child must have taken since the request was sent: two ticks of the clock by which it is counted."""
TIMEOUT_S = 300


def inputs(kind: str) -> Iterator[dict[str, Any]]:
    """Bodies of `/generate`, each with a good input that takes a child some tenths of a second."""
    number = 0
    while True:
        number += 1
        if kind == "grammar":
            names = [f"{number} is a name of {index}" for index in range(4000)]
            yield body("Hi", json_schema=json.dumps({"enum": names}))
        else:
            file = io.BytesIO()
            Image.new("RGB", (6000, 6000), (number % 256, number // 256, 7)).save(file, "JPEG")
            yield body("<image>", image_data=base64.b64encode(file.getvalue()).decode())


def body(text: str, json_schema: str | None = None, **more: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 2, "json_schema": json_schema}, **more}


class Children:
    """Those of a server that run a module."""

    def __init__(self, server: int, module: str) -> None:
        self._server, self._module = psutil.Process(server), module
        self._killed: set[int] = set()

    def busy_s(self) -> dict[int, float]:
        """The processor time that each has taken so far."""
        found = {}
        for process in self._server.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if self._module in process.cmdline():
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system
        return found

    def kill(self, before: dict[int, float], done: "Future[Any]", *, starting: bool) -> bool:
        """Kill one that works. before: what they had taken when the question came. starting: one that was not there then counts, too. False: the
        question was answered before one could be killed."""
        while not done.done():
            for pid, busy_s in self.busy_s().items():
                is_at_work = starting if pid not in before else busy_s >= before[pid] + AT_WORK_S
                if is_at_work and pid not in self._killed:
                    self._killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
                    return True
            time.sleep(0.002)
        return False


def attack(num_kills: int, twice_every: int = 10) -> dict[str, Any]:
    """Half of the kills while schemas are compiled, half while images are decoded. Returns what was answered, by kind and status."""
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    killed: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as threads:
        make_tiny_vlm.write("llava", Path(name))
        options = {"max_total_tokens": 2048, "num_threads": 1, "dtype": "float32", "log_level": "error"}
        with (
            Runtime(model_path=name, **options) as runtime,
            httpx.Client(base_url=runtime.url, timeout=TIMEOUT_S) as client,
        ):

            def ask(question: dict[str, Any]) -> httpx.Response:
                return client.post("/generate", json=question)

            def lost(counter: str) -> int:
                """As the server counts: a child that had just answered was not at work."""
                found = re.search(
                    rf"^headrace:{counter}_total\{{.*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE
                )
                return int(float(found[1])) if found else 0

            for kind, (module, counter) in KINDS.items():
                bodies, children = inputs(kind), Children(runtime.pid, module)
                ask(next(bodies))  # starts a child
                for number, question in enumerate(islice(bodies, 10 * num_kills)):
                    is_refused = any(status.endswith("again") for status in answers[kind])
                    if killed[kind] >= num_kills // len(KINDS) and is_refused:
                        break
                    before = children.busy_s()
                    done = threads.submit(ask, question)
                    if children.kill(before, done, starting=False) and number % twice_every == 0:
                        children.kill(before, done, starting=True)
                    reply = done.result()
                    killed[kind] = lost(counter)
                    answers[kind][str(reply.status_code)] += 1
                    if reply.status_code == 200:
                        continue
                    if reply.status_code != 503 or "retry-after" not in reply.headers:
                        wrong.append(f"{kind}: {reply.status_code} {reply.text[:300]}")
                    again = ask(question)
                    answers[kind][f"{again.status_code} when sent again"] += 1
                    if again.status_code != 200:
                        wrong.append(f"{kind}, sent again: {again.status_code} {again.text[:300]}")
    return {
        "killed at work": dict(killed),
        "answers": {kind: dict(counts) for kind, counts in answers.items()},
        "answered as the client's fault": sum(
            count for counts in answers.values() for status, count in counts.items() if status.startswith("4")
        ),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    report = attack(parser.parse_args().kills)
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["wrong"]))


if __name__ == "__main__":
    main()
