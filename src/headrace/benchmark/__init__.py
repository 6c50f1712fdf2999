"""`headrace bench`: measures a server from outside (serving.py) and an Engine from inside (offline.py). No torch there.

Read first: workloads.py (what is sent; tasks.py: texts that ask for something), figures.py (what is computed from it).

- Clients: serving.py, offline.py, load.py (when requests are sent), targets.py (where they go), http_stream.py, sse.py
- Exactness: quality.py (an Engine against float32), agreement.py (the arithmetic), held_out.py (the text)
- Inside one process: step.py (prefill and decode steps)
- Results: results.py (JSON, table, plot), machine.py (what it was measured on), tables.py (in the terminal)

What only its authors measure is in the folder `bench` of the checkout, which imports from here.
"""
