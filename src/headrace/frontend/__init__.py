"""The client side of the engine: a call becomes samples, sent by messages; their outputs come back as updates.

Read first: tokenizer_manager.py (one call, and the parts it needs), request_state.py (a sample and its call),
engine_link.py (to the schedulers).

- A call: prompts.py (its shape), inputs.py (what its prompts contain), tokenize.py (tokens and parameters), pooled.py
  (the same for embedding models and classifiers), media.py (media of its prompts),
  no_tokenizer.py, sessions.py, tenants.py (limits of keys)
- Its samples: sample_table.py (the live ones, the limit of waiting ones, aborts), outputs.py (messages applied to them),
  sample_update.py (new output of one, or its error), endings.py, native_answer.py (the dicts of /generate and /encode)
- The engine: balancers.py (which replica), engine_loop.py (messages from it), engine_parts.py (deaths and restarts),
  health.py, replica.py, all_replicas.py (of all together)
- Operations: communicator.py (a request to replicas, their replies), control.py, flush.py, expert_recording.py,
  main_operations.py (those that this process carries out),
  runtime_settings.py (settings that may change at run time), adapters.py (loaded adapters and their users),
  adapter_replicas.py, operation_log.py (what every replica must have done)
- Weights: weight_control.py, weight_checks.py, update_phases.py (all replicas or none)
- Records: records.py (what is known of requests afterwards), request_log.py, server_info.py
- HTTP workers: front_door.py (their calls), remote_methods.py (types of arguments and results)
"""
