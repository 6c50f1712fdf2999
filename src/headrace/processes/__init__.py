"""What starts, watches, restarts and ends the parts of an engine, and what each of them runs.

Read first: parts.py (the parts of a running engine), child_main.py (where a child begins).

- The parent's side: children.py (the parts as processes), node_process.py (of a host that only has ranks), threads.py
  (as threads, --single-process), lasting_thread.py (one for all engines of a process), child.py (one child),
  environment.py (what it gets of ours), supervisor.py (notices a death), recovery.py (starts another), restarts.py
  (puts the two together), http_workers.py
- The child's side: scheduler_process.py, share.py (its part of the machine), numa.py (binds it to a NUMA node),
  ranks.py (its other ranks), rank_groups.py (how they are connected), node_facts.py (what all hosts must have),
  follower_process.py (what they run), kv_event_publisher.py (tells routers what is cached), kv_event_history.py
  (replays it), detokenizer_process.py, http_process.py
- Both: handshake.py (what a child is given and reports), loading_bar.py, lifeline.py (the other's death), model_files.py
"""
