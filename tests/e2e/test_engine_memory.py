"""A process that makes one engine after the other keeps nothing of those that are closed."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from headrace.api.engine import Engine
from headrace.config.server_args import ServerArgs
from headrace.processes import model_files, scheduler_process
from headrace.text import tokenizers

PROGRAM = """
import gc, sys
from headrace.api.engine import Engine

def memory_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("RssAnon:"))

for number in range(4):
    with Engine(sys.argv[1], single_process=True, num_threads=1, max_total_tokens=256, log_level="error"):
        pass
    gc.collect()
    print(memory_mib())
"""

MAX_GROWTH_MIB = 6
"""Of the last two engines the one that grows less: an engine that kept a tokenizer took 8 to 10, with its vocabulary of grammars 20. Pools of threads
and the allocator's arenas grow at times of their own."""


def test_memory_does_not_grow_with_each_engine(tiny_model: str):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiny_model], capture_output=True, text=True, timeout=300, check=True
    )
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == 4

    assert min(sizes[2] - sizes[1], sizes[3] - sizes[2]) < MAX_GROWTH_MIB, sizes


def test_the_threads_of_an_engine_share_a_tokenizer(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = copytree(tiny_model, tmp_path / "model")  # whose tokenizer is not open yet
    made: list[weakref.ref[Any]] = []
    load = tokenizers.load_tokenizer

    def counted(path: Path, **options: bool) -> Any:
        tokenizer = load(path, **options)
        made.append(weakref.ref(tokenizer))
        return tokenizer

    monkeypatch.setattr(tokenizers, "load_tokenizer", counted)
    options: dict[str, Any] = {"single_process": True, "num_threads": 1, "max_total_tokens": 256, "log_level": "error"}
    for number in (1, 2):
        with Engine(str(folder), **options) as engine:
            engine.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2, "stop": "x"})
        del engine
        scheduler_process.run_in_lasting_thread(gc.collect).result(60)  # after what it does for the engine's grammars
        # A thread of the engine may still have it in hand.
        deadline = time.monotonic() + 60
        while any(one() is not None for one in made) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert [one() for one in made] == [None] * number


def test_a_file_that_changes_is_another_tokenizer(tiny_model: str, tmp_path: Path):
    folder = tmp_path / "model"
    copytree(tiny_model, folder)
    args = ServerArgs(model_path=str(folder))
    first = model_files.open_tokenizer(args)
    assert model_files.open_tokenizer(args) is first
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert model_files.open_tokenizer(args) is not first


def test_work_of_all_engines_is_done_in_one_thread():
    idents = {scheduler_process.run_in_lasting_thread(threading.get_ident).result(60) for _ in range(3)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_process_that_ends_does_not_wait_for_that_thread():
    program = (
        "import threading\nfrom headrace.processes.scheduler_process import run_in_lasting_thread\n"
        "run_in_lasting_thread(threading.Event().wait)"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_work_that_fails_says_so_and_the_thread_goes_on():
    failed = scheduler_process.run_in_lasting_thread(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(60)
    assert scheduler_process.run_in_lasting_thread(lambda: 7).result(60) == 7
