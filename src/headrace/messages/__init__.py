"""All structs that cross a process or thread boundary: typed and frozen. Imports nothing above it.

Read first: requests.py (front end -> scheduler), step.py (scheduler <-> worker, and the `Worker` protocol), outputs.py
(back to the front end), ranks.py (to the other ranks: steps, what they do beside them, how they come together).

- Operations: operations.py (their table, and errors instead of replies), control.py, weights.py (and adapters);
  grammar.py (what compiles grammars, and what follows them)
- Media of a prompt, and what stands for them in keys: media.py (as clients give them: `headrace.media_kinds`)
- HTTP workers: front.py
- The prefix cache: namespaces.py (what keeps KV apart), kv_events.py (what changes, for routers)
- Transport: channel.py (every message that a channel carries; queues within a process), sockets.py (between processes),
  packing.py (arrays and tensors as bytes)
- Bodies of requests: bodies.py (fields that request nothing, `8.0` for `8`, errors that name the field)
"""
