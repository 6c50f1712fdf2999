"""All structs that cross a process or thread boundary: typed and frozen. Imports nothing above it.

Read first: requests.py (front end -> scheduler), step.py (scheduler <-> worker, and the `Worker` protocol), outputs.py
(back to the front end), rank_step.py (a step on its way to the other ranks), rank_job.py (what they do beside
the steps), rank_group.py (how they come together over a network).

- Operations: operations.py (their table), faults.py (why there is no reply),
  control.py, cache_tree.py, lora.py, weights.py, experts.py; grammar.py (what compiles grammars, and what follows them)
- Media of a prompt, and what stands for them in keys: media.py (as clients give them: `headrace.media_kinds`)
- HTTP workers: front.py
- The prefix cache: namespaces.py (what keeps KV apart), kv_events.py (what changes, for routers)
- Transport: channel.py (every message that a channel carries; queues within a process), sockets.py (between processes),
  fan_out.py, dispatch.py, packing.py, safetensors_bytes.py
- Fields of bodies: neutral.py (those that request nothing), whole_numbers.py (`8.0` for `8`), allowed_values.py, field_errors.py
"""
