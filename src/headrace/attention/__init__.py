"""Attention backends behind one interface, and the KV cache layout of each.

Read first: base.py (the interface, the facts of a backend, the KV pool), torch_native.py (the reference).

- Choice: select.py (the list of backends)
- Backends: cpu.py (native kernels), triton.py, flashinfer.py
- sparsity.py: the settings of double sparsity, and the file with the order of channels
"""
