"""Tests and times everything on a GPU, in one command: `scripts/gpu_check`.

Read first: check.py (the command, which runs each piece in a process).

- Shared: options.py, bench.py (sizes, clock, rows of results), plans.py (decode steps over a cached context), rates.py (the device at its best),
  floor.py (the least time of a step), scheduled.py (requests through a scheduler, whose steps are timed on the device)
- Correct: kernels.py (ops, attention, formats), tokens.py (a worker), equality.py (whole engines), features.py
- Fast: steps.py, serving.py, server.py (over HTTP), against_transformers.py, shapes.py (kernels in several shapes of tiles)
- Before there is a GPU: rehearse.py (`scripts/gpu_rehearse`)
"""
