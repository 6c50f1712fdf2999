"""`headrace bench`: measures a server from outside (serving.py) and an Engine from inside (offline.py). No torch there.

Read first: workloads.py (what is sent; tasks.py: texts that ask for something), figures.py (what is computed from it).

- Clients: serving.py, offline.py, load.py (when requests are sent), targets.py (where they go), http_stream.py, sse.py
- Exactness: quality.py (an Engine against float32), agreement.py (the arithmetic), held_out.py (the text)
- Inside one process: step.py (prefill and decode steps), kernels.py (ops), timing.py (both: repetitions)
- Simulated: fleet/ (replicas behind a balancer)
- Results: results.py (JSON, table, plot), ratios.py (of two servers), machine.py (what it was measured on), tables.py (in the terminal)
- For the programs in `benchmarks/`: report.py (their JSON), own_server.py (a server for as long as they measure)
- A mix of clients for hours: soak.py (`scripts/soak`)
"""
