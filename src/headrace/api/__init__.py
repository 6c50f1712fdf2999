"""The Python API: `Engine` (a model in this process and its children) and `Runtime` (a client that owns a server).

Read first: engine.py, runtime.py.

- Engine and Runtime: weight_operations.py (the methods for weights, pausing and memory)
- Runtime alone: server_process.py (`headrace serve` as a child), native_client.py (the native HTTP API as exceptions
  and values)
"""
