"""Attention backends behind one interface, and the KV cache layout of each.

Read first: base.py (the interface, the facts of a backend, the KV pool), torch_native.py (the reference).

- Choice: select.py (the list of backends), fp8.py (whether a GPU computes in it)
- Backends: cpu.py (native kernels), cpu_slots.py (the same with page size 1), triton.py, flashinfer.py
"""
