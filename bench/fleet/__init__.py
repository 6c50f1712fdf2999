"""What a policy of balancing does in fleets of 1 to 10,000 replicas, simulated. No model, no process, no socket.

Read first: simulation.py (the events, and who gets a request).

__main__.py (the command), run.py (fleets and policies in turn, tables, files), options.py (what can be asked), workload.py (sessions with
shared prefixes), replica.py (the scheduler's own planner, cache and commit, with a worker that takes time and makes up tokens), costs.py (how
long a step takes), outcome.py (the figures of a run), plot.py; disaggregation.py (mixed servers beside prefill and
decode servers).
"""
