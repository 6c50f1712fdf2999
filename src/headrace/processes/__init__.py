"""What starts, watches, restarts and ends the parts of an engine, and what each of them runs.

Read first: parts.py (the parts of a running engine, and what is done when one dies), child_main.py (where a child begins, and what each kind
runs).

- The parent's side: node_process.py (of a host that only has ranks), threads.py (the parts as threads, --single-process), child.py (one child),
  early.py (how its process is started, and with what of our environment), recovery.py (notices a death, and starts another), http_workers.py
- The child's side: scheduler_process.py, share.py (its part of the machine), numa.py (binds it to a NUMA node), ranks.py (its other ranks),
  rank_groups.py (how they are connected, and what all hosts must have), kv_event_publisher.py (tells routers what is cached)
- Both: handshake.py (what a child is given and reports), lifeline.py (the other's death), model_files.py
"""
