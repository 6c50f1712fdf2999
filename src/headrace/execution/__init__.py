"""Runs a model: loading, memory, the step, and the worker that the scheduler uses.

Read first: model_source.py (the model that the options name, opened; without torch, since every process asks it), build.py (start-up; setup.py is
what it decides before weights are loaded), model_runner.py (one step), worker.py (`ModelWorker`:
how steps run beside the scheduler).

- A step: forward_batch.py (tables of sequences; a step as tensors), verify.py (rows that sample several tokens), lora.py (adapters in memory, rows
  of a step by adapter), ranks.py (steps of several ranks), rank_jobs.py, rank_operations.py (what they do beside the steps)
- On a GPU: device_runner.py (how a step runs, also one that verifies guesses), queued_step.py (queues it on the device, and when its constrained rows
  are sampled), graphs.py (CUDA graphs of decode), device.py (the seam)
- Vectors instead of tokens: pooling.py (steps of an encoder, results of encoders and decoders)
- Images: media.py (what the encoder makes of them, in slices, and where it goes)
- Guesses: build_draft.py, drafting.py (by a model), step_times.py (what steps with them cost)
- Weights: load_weights.py, update_weights.py, weight_files.py (packed ones, and saved ones)
- Memory: memory.py (how much there is), pool_plan.py (how much of it is for KV), kv_precision.py (in which dtype), released.py
  (given back for a while), page_transfer.py (KV out of the pool and into it)
- Watching: profiler.py; faults.py (injected ones, for tests)
- `headrace quantize`: calibrate.py
"""
