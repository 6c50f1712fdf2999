"""The Python API: `Engine` (a model in this process and its children) and `Runtime` (a client that owns a server).

Read first: engine.py, runtime.py.

- Engine and Runtime: methods.py (what both do), options.py (the types of their arguments), arguments.py (the requests that
  they make), chat_reply.py (what `chat` returns)
- Engine alone: engine_calls.py (its event loop), engine_chat.py (`chat`, `encode` and scores by the server's functions)
- Runtime alone: native_client.py (the native HTTP API as exceptions and values)
- For benchmarks and the command line, too: http_client.py (a request, the events of a stream)
"""
