"""The Python API: `Engine` (a model in this process and its children) and `Runtime` (a client that owns a server).

Read first: engine.py, runtime.py.

- Engine and Runtime: options.py (the types of their arguments), chat_reply.py (what `chat` returns), operations.py (control operations as
  methods), weight_operations.py (those for weights, pausing and memory), scores.py (`rerank` and `score`), media.py (the bytes of files)
- Engine alone: generate_request.py (what `generate` asks), engine_calls.py (its event loop), engine_chat.py (`chat` by the server's handler),
  engine_scores.py (`rerank` and `score` by the server's functions)
- Runtime alone: server_process.py (`headrace serve` as a child), native_client.py (the native HTTP API as exceptions
  and values)
"""
