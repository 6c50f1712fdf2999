"""Frozen objects are left out of collections while the process lives, and go with it; a process that starts collects nothing until it is ready."""

import subprocess
import sys

SCRIPT = """
import gc
from headrace.garbage import freeze

class Ring:
    def __init__(self):
        self.ring = self
    def __del__(self):
        print("gone")

ring = Ring()
count = freeze()
assert count > 0 and freeze() >= count
del ring
gc.collect()
print("still here")
"""


def test_frozen_garbage_goes_at_the_end_of_the_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["still here", "gone", ""]
    assert done.stderr == ""


START = """
import gc
from headrace import garbage

class Ring:
    def __init__(self):
        self.ring = self
    def __del__(self):
        print("gone")

garbage.pause()
Ring()
rings = [[] for _ in range(100_000)]
print("started")
garbage.settle()
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_a_start_is_collected_once_when_it_is_over_and_left_out_of_later_collections():
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n") == ["started", "gone", "True True", ""]
