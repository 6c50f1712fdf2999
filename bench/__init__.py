"""Measurements of Headrace that users need not run; not part of the wheel. `python -m bench.NAME --help` in a checkout says what each does.

What users measure (`headrace bench`) is in `headrace.benchmark`, which knows nothing of this package and lends it results, figures and clients.

- Shared: report.py (options, JSON), servers.py (a server for as long as it is measured)
- Of `headrace bench` results: ratios.py (of two servers); compare/ (beside other runtimes); fleet/ (simulated replicas), replicas.py (real ones)
- Kernels and steps: kernels.py, gpu/ (`scripts/gpu_check`), collectives.py, tower_parts.py, encoders.py, vision.py, sounds.py
- A mix of clients for hours: soak.py (`scripts/soak`)
- configs/: sizes of models that get random weights; results/: the newest of each kind, which docs quote; notes/: what was tried
"""
