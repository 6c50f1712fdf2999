"""A process that has Engines, of one process and of several, may fork; the child has none."""

import subprocess
import sys

PROGRAM = """
import os, sys
from headrace.errors import ExecutionError
from headrace.api.engine import Engine

options = {"model_path": sys.argv[1], "num_threads": 1, "max_total_tokens": 256, "log_level": "error"}
engines = [Engine(**options, single_process=is_one) for is_one in (True, False)]
wanted = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
streams = [engine.generate(input_ids=[5, 6], sampling_params=wanted, stream=True) for engine in engines]
firsts = [next(stream) for stream in streams]
child = os.fork()
if child == 0:
    for engine, stream in zip(engines, streams):
        for call in (engine.flush_cache, lambda: engine.generate(input_ids=[5], sampling_params=wanted), lambda: next(stream)):
            try:
                call()
            except ExecutionError as error:
                assert f"belongs to process {os.getppid()}" in error.message, error.message
            else:
                sys.exit("a call of the child was answered")
        engine.shutdown()
    sys.exit(0)  # the interpreter ends by itself, with what was registered for its end
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
for engine, first, stream in zip(engines, firsts, streams):
    assert len([first, *stream][-1]["output_ids"]) == 3  # the first chunk may hold all of them
    assert engine.health()
    engine.shutdown()
print("done")
"""


def test_the_child_of_a_fork_is_told_so_and_ends(tiny_model):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, tiny_model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
