"""Measurements of Headrace that users need not run; not part of the wheel. `python -m bench.NAME --help` in a checkout says what each does.

What users measure (`headrace bench`) is in `headrace.benchmark`, which knows nothing of this package and lends it results, figures and clients.
compare/ is Headrace beside other servers, fleet/ simulated replicas, gpu/ `scripts/gpu_check`.

- Shared: program.py (command line, JSON), servers.py (a server for as long as it is measured), contest.py (calls in turns beside peers)
- Of results: ratios.py (what the second server of one gives over the first)
- Kernels and encoders: kernels.py, encoders.py, vision.py
- The host: scheduler_turn.py, host_path.py
- Grammars: constrained.py, maskbench.py, hostile_grammars.py
- What others notice: images_beside_streams.py, recovery.py (of a part that is killed), weight_updates.py (while requests run)
- KV that is kept in files: kv_files.py
- Prefill and decode on different servers: disaggregation.py
- Output, not time: families.py, rank_equality.py, speculation_equality.py, embedding_agreement.py, gguf_types.py, gguf_tokenizers.py
- A mix of clients for hours: soak.py (`scripts/soak`)

configs/ holds sizes of models that get random weights, results/ the newest result of each kind and machine, which docs quote, notes/ what was
tried.
"""
