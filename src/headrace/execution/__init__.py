"""Runs a model: loading, memory, the step, and the worker that the scheduler uses.

Read first: build.py (start-up; setup.py is what it decides before weights are loaded), model_runner.py (one step), worker.py (`ModelWorker`:
how steps run beside the scheduler).

- A step: forward_batch.py (as tensors), verify.py (rows that sample several tokens), sequence_table.py (tokens and slots of
  sequences), lora.py (adapters in memory, rows of a step by adapter), ranks.py (steps of several ranks), rank_jobs.py, rank_operations.py
  (what they do beside the steps)
- On a GPU: device_runner.py (how a step runs, also one that verifies guesses), step_queue.py (queues it on the device),
  queued_step.py (such a step, and when its constrained rows are sampled), graphs.py (CUDA graphs of decode), device.py (the
  seam), device_ranks.py (queued steps of several ranks), warm_up.py (steps before the first request)
- Vectors instead of tokens: build_embedding.py, embedding_runner.py (steps of an encoder), pooling.py (results of encoders and decoders)
- Images: media.py (what the encoder makes of them, in slices, and where it goes)
- Guesses by a model: build_draft.py, draft_model.py, eagle.py, draft_steps.py (what they share)
- Weights: load_weights.py, weight_cache.py (packed, from a file), update_weights.py, save_weights.py
- Memory: memory.py (how much there is), pool_plan.py (how much of it is for KV), kv_precision.py (in which dtype), released.py
  (given back for a while)
- Watching: profiler.py; faults.py (injected ones, for tests)
- `headrace quantize`: calibrate.py, perplexity.py
"""
