"""The client side of the engine: a call becomes samples, sent by messages; their outputs come back as updates.

Read first: tokenizer_manager.py (one call, and the parts it needs), request_state.py (a sample and its call),
engine_link.py (to the schedulers). Everything runs in the tokenizer manager's event loop, except where a module or a
method says otherwise.

- A call: prompts.py (its shape), inputs.py (what its prompts contain), tokenize.py (tokens and parameters), pooled.py
  (the same for embedding models and classifiers), media.py (media of its prompts), rooms.py (prompts of other servers),
  sessions.py, session_files.py, tenants.py (limits of keys)
- Its samples: sample_table.py (the live ones, the limit of waiting ones, aborts), outputs.py (messages applied to them,
  and their ends), sample_update.py (new output of one, or its error), native_answer.py (the dicts of /generate and /encode)
- The engine: balancers.py (which replica), engine_parts.py (its health, deaths and restarts)
- Operations: communicator.py (a request to replicas, their replies), control.py, runtime_settings.py (settings that may
  change at run time), adapters.py (loaded adapters and their users), pins.py (prefixes that stay cached), slots.py (llama.cpp's slots)
- Weights: weight_control.py, update_phases.py (all replicas or none, and what every replica must have done), weight_checks.py
- Records: records.py (what is known of requests afterwards), server_info.py
- HTTP workers: front_door.py (their calls)
"""
