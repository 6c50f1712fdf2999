"""`headrace bench`: measures a server from outside and an Engine from inside (serving.py). No torch there.

Read first: workloads.py (what is sent), figures.py (what is computed from it).

- Clients: serving.py (what is sent when), targets.py (where it goes), http_stream.py
- Exactness: quality.py (an Engine against float32), agreement.py (the texts and the arithmetic)
- Inside one process: step.py (prefill and decode steps)
- Results: results.py (JSON, table, plot), machine.py (what it was measured on), tables.py (in the terminal)

What only its authors measure is in the folder `bench` of the checkout, which imports from here.
"""
