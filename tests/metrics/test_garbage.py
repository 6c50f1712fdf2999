"""Frozen objects are left out of collections while the process lives, and go with it; a process that starts collects nothing until it is ready. A
scheduler collects a little every second."""

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


PARTS = """
import gc
from headrace import garbage

class Ring:
    def __init__(self):
        self.ring = self
    def __del__(self):
        print("gone")

now_s = 0.0
given_back = []
garbage.give_back_free_memory = lambda: given_back.append(now_s)
collect = garbage.in_small_parts(lambda: now_s)
lasting = Ring()
Ring()
rings = [[] for _ in range(100_000)]
for second in range(600):
    print(second) if second in (0, 1, 2, 599) else None
    now_s = float(second)
    collect()
    if second == 2:
        del lasting
now_s += 1
print("all")
collect()
print(gc.isenabled(), len(given_back))
"""


def test_a_scheduler_collects_what_is_new_every_second_and_all_every_ten_minutes_and_trims_every_ten_seconds():
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "gone", "2", "599", "all", "gone", "False", "60"]


LOOP = """
import asyncio, gc
from headrace import garbage

async def main():
    sleeps = iter(range(3))

    async def sleep(seconds):
        if next(sleeps, None) is None:
            raise KeyboardInterrupt

    asyncio.sleep = sleep
    await garbage.keep_collecting()

garbage.in_small_parts = lambda **every: lambda: print("collected")
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("ended")
"""


def test_the_main_process_collects_in_small_parts_while_its_loop_runs():
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["collected"] * 3 + ["ended"]
